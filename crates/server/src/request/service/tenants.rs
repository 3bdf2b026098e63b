//! What operators do with a whole tenant: its limit of new requests, and erasing its data.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use weir_core::TenantId;
use weir_core::quota::QuotaLimits;
use weir_store::Result;
use weir_store::request::{RequestStore, TenantLimit};

use super::RequestService;
use super::cached::CachedRead;

/// The most requests that are counted when an erasure begins.
const COUNT_MAX: usize = 1_000_000;

/// The limits that operators have set, by tenant.
type OwnLimits = BTreeMap<TenantId, Option<QuotaLimits>>;

/// The limits of tenants: those that operators have set, and that of the settings for all others.
pub struct TenantLimits {
    store: Arc<dyn RequestStore>,
    default: Option<QuotaLimits>,
    cached: CachedRead<Arc<OwnLimits>>,
}

/// The limit of one tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EffectiveLimit {
    /// `None` if there is no limit.
    pub limits: Option<QuotaLimits>,
    /// Whether an operator has set it for this tenant.
    pub is_own: bool,
}

impl TenantLimits {
    pub(super) fn new(store: Arc<dyn RequestStore>, default: Option<QuotaLimits>, timeout: Duration) -> Self {
        Self { store, default, cached: CachedRead::new(timeout) }
    }

    /// The limit of a tenant, at most five seconds old.
    pub async fn of(&self, tenant: &TenantId) -> Result<EffectiveLimit> {
        let own = self.cached.get(self.read()).await?.get(tenant).copied();
        Ok(EffectiveLimit { limits: own.unwrap_or(self.default), is_own: own.is_some() })
    }

    /// Sets the limit of a tenant: at once on this server, within five seconds on others. Returns `false` if too many tenants
    /// have one.
    pub async fn put(&self, limit: TenantLimit) -> Result<bool> {
        self.cached.change(self.store.put_tenant_limit(&limit)).await
    }

    /// Removes the limit of a tenant, so that the one of the settings applies. Returns `false` if there is none.
    pub async fn delete(&self, tenant: &TenantId) -> Result<bool> {
        self.cached.change(self.store.delete_tenant_limit(tenant)).await
    }

    async fn read(&self) -> Result<Arc<OwnLimits>> {
        let limits = self.store.tenant_limits().await?.into_iter();
        Ok(Arc::new(limits.map(|TenantLimit { tenant, limits }| (tenant, limits)).collect()))
    }
}

impl RequestService {
    /// The limits of tenants.
    #[must_use]
    pub const fn tenant_limits(&self) -> &TenantLimits {
        &self.tenant_limits
    }

    /// Begins to erase what a tenant has submitted until now. Maintenance goes on with it. Returns how many requests there are,
    /// a million at most.
    pub async fn begin_erasure(&self, tenant: &TenantId) -> Result<u64> {
        let (store, tenant) = (Arc::clone(&self.store), tenant.clone());
        self.change(async move { store.begin_erasure(&tenant, COUNT_MAX).await }).await
    }
}
