//! The state that handlers and workers share: services, credentials, metrics.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use crate::address_limits::{AddressCounters, AddressLimits};
use crate::auth::Auth;
use crate::buffer_budget::BufferBudget;
use crate::console::live::Live;
use crate::console::servers::Servers;
use crate::engines::Engines;
use crate::gateway::Gateway;
use crate::operations::backlog::Backlog;
use crate::operations::clocks::Clocks;
use crate::operations::health::Health;
use crate::operations::recount::Recounter;
use crate::quota::service::QuotaService;
use crate::request::encryption::Keyring;
use crate::request::service::RequestService;
use crate::sale::metrics::FAST_PER_SECOND;
use crate::sale::service::SaleService;
use crate::settings::Settings;
use crate::shutdown::Shutdown;
use crate::slot::service::SlotService;
use crate::telemetry::metrics::{Metrics, Shortage};
use crate::tier::service::TierService;

pub struct App {
    pub settings: Settings,
    pub auth: Auth,
    pub metrics: Arc<Metrics>,
    pub engines: Engines,
    pub quota: QuotaService,
    pub slot: SlotService,
    pub tier: TierService,
    pub requests: RequestService,
    pub gateway: Gateway,
    pub sale: SaleService,
    pub address_limits: AddressLimits,
    /// The memory for unfinished heads and bodies: half of `http.max_buffered`.
    pub buffers: BufferBudget,
    /// The memory for bulk uploads and their responses: the other half. Uploads that wait for memory, or for callers that do
    /// not read, take none from ordinary requests.
    pub upload_buffers: BufferBudget,
    /// Encrypts payloads, results, failure messages and callback URLs of requests.
    pub keys: Arc<Keyring>,
    pub health: Health,
    pub(crate) backlog: Backlog,
    pub(crate) live: Live,
    /// All servers, as Prometheus has them; only with `console.prometheus`.
    pub(crate) servers: Option<Servers>,
    pub(crate) clocks: Arc<Clocks>,
    pub(crate) recounter: Arc<Recounter>,
    pub started: Instant,
    pub shutdown: Shutdown,
}

impl App {
    #[must_use]
    pub fn new(settings: Settings, auth: Auth, keys: Keyring, engines: Engines) -> Arc<Self> {
        let metrics = Metrics::new(
            engines.ledger_metrics.clone(),
            engines.cache_metrics.clone(),
            engines.store.writer_metrics.clone(),
            &engines.calls,
        );
        let (metrics, keys) = (Arc::new(metrics), Arc::new(keys));
        let slot = SlotService::start(&engines, &settings, &metrics);
        let tier = TierService::start(&engines, &settings, &metrics);
        let requests = RequestService::start(&engines, &settings, Arc::clone(&keys), &metrics);
        let form = Arc::clone(requests.form());
        let hash_key = move || -> Pin<Box<dyn Future<Output = _> + Send>> {
            let form = Arc::clone(&form);
            Box::pin(async move { form.hash_key().await })
        };
        let quota = QuotaService::start(&engines, &settings, Arc::new(hash_key), &metrics);
        let shutdown = Shutdown::default();
        let gateway = Gateway::start(&settings, &metrics, &shutdown);
        let sale = SaleService::start(&engines, &settings, &metrics);
        let counters = AddressCounters {
            limited: metrics.sale.address_limited.clone(),
            fast: metrics.sale.address_fast.clone(),
            streams_full: metrics.shortage(Shortage::Streams),
        };
        let throttle = engines.throttle(settings.edge.per_ip_per_second, settings.edge.burst());
        let fast = engines.throttle(FAST_PER_SECOND, FAST_PER_SECOND);
        let (together, max_streams) = (engines.attempts(), settings.http.max_streams);
        let address_limits =
            AddressLimits::new(&settings.edge, throttle, fast, together, max_streams, counters)
                .with_known_networks(&settings.edge.networks, |per_second, burst| {
                    engines.throttle(per_second, burst)
                });
        let upload_buffers = BufferBudget::new(settings.http.max_buffered / 2);
        let buffers = BufferBudget::new(settings.http.max_buffered - upload_buffers.total());
        Arc::new(Self {
            health: Health::new(engines.clone()),
            backlog: Backlog::new(&engines, &settings, &metrics.operations),
            live: Live::default(),
            servers: Servers::new(&settings.console),
            recounter: Recounter::new(Arc::clone(&engines.store.books), shutdown.closing().clone()),
            clocks: Clocks::new(&engines, quota.denials(), metrics.operations.clone()),
            quota,
            slot,
            tier,
            requests,
            gateway,
            sale,
            address_limits,
            buffers,
            upload_buffers,
            keys,
            metrics,
            engines,
            auth,
            settings,
            started: Instant::now(),
            shutdown,
        })
    }
}
