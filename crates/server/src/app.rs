//! What every handler shares: the services, the credentials, the metrics.

use std::sync::Arc;
use std::time::Instant;

use crate::address_limits::{AddressCounters, AddressLimits};
use crate::auth::Auth;
use crate::buffer_budget::BufferBudget;
use crate::engines::Engines;
use crate::gateway::Gateway;
use crate::operations::clocks::Clocks;
use crate::operations::health::Health;
use crate::quota::service::QuotaService;
use crate::request::encryption::Keyring;
use crate::request::service::RequestService;
use crate::sale::service::SaleService;
use crate::settings::Settings;
use crate::shutdown::Shutdown;
use crate::slot::service::SlotService;
use crate::telemetry::metrics::{Metrics, Shortage};
use crate::tier::service::TierService;

/// What every handler shares.
pub struct App {
    /// The settings it was started with.
    pub settings: Settings,
    /// Who may call.
    pub auth: Auth,
    /// What it tells about itself.
    pub metrics: Arc<Metrics>,
    /// Where the state is.
    pub engines: Engines,
    /// Quota.
    pub quota: QuotaService,
    /// Slot.
    pub slot: SlotService,
    /// Tier.
    pub tier: TierService,
    /// Request.
    pub requests: RequestService,
    /// Where AI calls go.
    pub gateway: Gateway,
    /// Sale.
    pub sale: SaleService,
    /// What one address may do.
    pub address_limits: AddressLimits,
    /// The memory for unfinished heads and bodies: half of `http.max_buffered`.
    pub buffers: BufferBudget,
    /// The memory for bulk uploads and their answers: the other half, so that uploads that wait for memory, or for callers
    /// that do not read, leave ordinary requests theirs.
    pub upload_buffers: BufferBudget,
    /// What callers entrust to request is sealed with these.
    pub keys: Arc<Keyring>,
    /// Whether the engines answer.
    pub health: Health,
    /// The clocks that decide.
    pub(crate) clocks: Arc<Clocks>,
    /// When it started.
    pub started: Instant,
    /// The steps of a stop.
    pub shutdown: Shutdown,
}

impl App {
    /// Puts the parts together.
    #[must_use]
    pub fn new(settings: Settings, auth: Auth, keys: Keyring, engines: Engines) -> Arc<Self> {
        let metrics = Metrics::new(
            engines.follow_metrics.clone(),
            engines.cache_metrics.clone(),
            engines.store.writer_metrics.clone(),
        );
        let (metrics, keys) = (Arc::new(metrics), Arc::new(keys));
        let quota = QuotaService::start(&engines, &settings, &metrics);
        let slot = SlotService::start(&engines, &settings, &metrics);
        let tier = TierService::start(&engines, &settings, &metrics);
        let requests = RequestService::start(&engines, &settings, Arc::clone(&keys), &metrics);
        let shutdown = Shutdown::default();
        let gateway = Gateway::start(&settings, &metrics, &shutdown);
        let sale = SaleService::start(&engines, &settings, &metrics);
        let counters = AddressCounters {
            limited: metrics.sale.address_limited.clone(),
            streams_full: metrics.shortage(Shortage::Streams),
        };
        let burst = settings.edge.per_ip_burst.saturating_add(1);
        let throttle = engines.throttle(settings.edge.per_ip_per_second, burst);
        let address_limits =
            AddressLimits::new(&settings.edge, throttle, settings.http.max_streams, counters);
        let upload_buffers = BufferBudget::new(settings.http.max_buffered / 2);
        let buffers = BufferBudget::new(settings.http.max_buffered - upload_buffers.total());
        Arc::new(Self {
            health: Health::new(engines.clone()),
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
