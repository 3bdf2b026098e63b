//! Starts the workers of a process's roles.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::TaskTracker;
use weir_store::Result;
use weir_store::request::Rollout;

use crate::app::App;
use crate::console::sampler;
use crate::quota::maintenance::KeyPurge;
use crate::quota::provider::ProviderDependencies;
use crate::quota::sender::Sender;
use crate::request::work::maintenance::Maintenance;
use crate::request::work::webhooks::Webhooks;
use crate::request::work::{EnabledCheck, Worker, WorkerDependencies, webhooks};
use crate::sale::replayed_purchases::ReplayedPurchases;
use crate::slot;
use crate::slot::dispatcher::Dispatcher;

/// The part of the shutdown timeout that is reserved for putting back unfinished jobs.
const RELEASE_TIME: Duration = Duration::from_secs(2);

/// Starts the workers that the settings ask for. They stop when the app closes.
/// Fails when a consumer cannot be made.
pub(crate) fn start(app: &Arc<App>) -> Result<TaskTracker> {
    let (workers, roles) = (TaskTracker::new(), app.settings.process.roles);
    workers.spawn(Arc::clone(&app.clocks).watch(app.shutdown.closing().clone()));
    workers.spawn(sampler::run(Arc::clone(app), app.shutdown.closing().clone()));
    workers.spawn(sampler::watch_engines(Arc::clone(app), app.shutdown.closing().clone()));
    if roles.api {
        app.sale.run(&workers, app.shutdown.closing());
        let app = Arc::clone(app);
        workers.spawn(async move { app.auth.tokens.keep_keys_fresh(app.shutdown.closing()).await });
    }
    if let Some(sales) = &app.engines.redis_sales {
        if roles.worker {
            workers.spawn(sales.clone().persist_purchases(app.shutdown.closing().clone()));
            let (queue, ledger) =
                (Arc::clone(&app.engines.store.queue), Arc::clone(&app.engines.store.sale_ledger));
            workers.spawn(ReplayedPurchases::new(queue, ledger).run(app.shutdown.closing().clone()));
        }
        if roles.reconciler {
            workers.spawn(sales.clone().reconcile(app.shutdown.closing().clone()));
        }
    }
    if roles.sender {
        start_sender(app, &workers)?;
    }
    if roles.worker {
        start_request_worker(app, &workers)?;
    }
    if roles.reconciler {
        let purge =
            KeyPurge { store: Arc::clone(&app.engines.store.quota), metrics: app.metrics.quota.clone() };
        workers.spawn(purge.run(app.shutdown.closing().clone()));
        start_maintenance(app, &workers);
    }
    workers.close();
    Ok(workers)
}

fn start_sender(app: &App, workers: &TaskTracker) -> Result<()> {
    let provider = ProviderDependencies {
        secret: app.auth.webhook.clone(),
        clock: Arc::clone(&app.engines.store.wall_clock),
        steady_clock: Arc::clone(&app.engines.store.steady_clock),
    };
    let sender = Sender::new(app.engines.source()?, provider, &app.settings, &app.metrics.quota);
    workers.spawn(sender.run(app.shutdown.closing().clone()));
    if let Some(topic) = &app.settings.slot.dispatch_topic {
        let (due, publisher) = (Arc::clone(&app.engines.store.due), app.engines.publisher());
        let dispatcher = Dispatcher::new(due, publisher, topic, &app.metrics.slot);
        workers.spawn(dispatcher.run(app.shutdown.closing().clone()));
    }
    Ok(())
}

fn start_request_worker(app: &App, workers: &TaskTracker) -> Result<()> {
    let hub = Arc::clone(app.requests.hub());
    let dependencies = WorkerDependencies {
        store: app.engines.requests(),
        source: app.engines.request_source()?,
        keyring: Arc::clone(&app.keys),
        form: Arc::clone(app.requests.form()),
        clock: Arc::clone(&app.engines.store.steady_clock),
        secret: app.auth.webhook.clone(),
        wall_clock: Arc::clone(&app.engines.store.wall_clock),
        settings: app.settings.request.clone(),
        metrics: app.metrics.request.work.clone(),
        is_enabled: rollout_switch(app, |rollout| rollout.processing_enabled),
        on_change: Arc::new(move |id, status| hub.publish(id, status)),
        grace: app.settings.http.shutdown_timeout.saturating_sub(RELEASE_TIME),
    };
    workers.spawn(Worker::new(dependencies).run(app.shutdown.closing().clone()));
    let dependencies = webhooks::WebhookDependencies {
        queue: Arc::clone(&app.engines.store.queue),
        // Not the cached store: a webhook must show the request as it is now.
        store: Arc::clone(&app.engines.store.requests),
        keyring: Arc::clone(&app.keys),
        secret: app.auth.webhook.clone(),
        clock: Arc::clone(&app.engines.store.wall_clock),
        steady_clock: Arc::clone(&app.engines.store.steady_clock),
        metrics: app.metrics.request.work.clone(),
    };
    workers.spawn(Webhooks::new(dependencies, &app.settings.request).run(app.shutdown.closing().clone()));
    Ok(())
}

fn start_maintenance(app: &App, workers: &TaskTracker) {
    let hub = Arc::clone(app.requests.hub());
    let maintenance = Maintenance {
        // The cached one, so that what is erased is not read from the cache.
        store: app.engines.requests(),
        broker: app.engines.request_broker(),
        retention: app.settings.request.retention,
        is_reconciling: rollout_switch(app, |rollout| rollout.reconciler_enabled),
        clock: Arc::clone(&app.engines.store.wall_clock),
        metrics: app.metrics.request.work.clone(),
        on_change: Arc::new(move |id, status| hub.publish(id, status)),
    };
    workers.spawn(maintenance.run(app.shutdown.closing().clone()));
    workers.spawn(Arc::clone(&app.recounter).run(app.settings.audit.recount_every));
    if let Some(keep) = app.settings.slot.retention {
        let (closing, slots) = (app.shutdown.closing().clone(), Arc::clone(&app.engines.store.slots));
        workers.spawn(slot::retention::purge_until(closing, slots, keep));
    }
}

/// One of the rollout's switches. It counts as off while the store does not answer: nothing could be done anyway.
fn rollout_switch(app: &App, which: fn(&Rollout) -> bool) -> EnabledCheck {
    let rollout = Arc::clone(app.requests.rollout());
    Arc::new(move || {
        let rollout = Arc::clone(&rollout);
        Box::pin(async move { rollout.get().await.is_ok_and(|rollout| which(&rollout)) })
    })
}
