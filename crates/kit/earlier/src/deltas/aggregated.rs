//! `cbt-earlier aggregated`: the aggregated API server, started and stopped. Every replica serves; one of them, which is
//! elected, keeps the status of DriverDiscoveries.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper_util::server::graceful::GracefulShutdown;
use serve::certificate::Certificate;
use serve::lease::{Lease, Times};
use serve::program::{self, Stop};
use serve::reviews::Reviews;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::api::{self, Api};
use super::discovery::{self, Callers};
use super::front_proxy::{AnyClient, FrontProxy};
use crate::Aggregated as Arguments;
use crate::server::{self, METRICS};

/// How often users are forgotten who have not asked for a while.
const TIDY_EVERY: Duration = Duration::from_secs(60);

/// Serves until a signal. Ends with an error when a task of its own does: then it would only seem to work.
pub async fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let common = arguments.common;
    let mut tasks = JoinSet::new();
    // What can fail at once does so before anything is served.
    let metrics = serve::http::install_metrics(server::DROPPED_LINES)?;
    let http = program::bind_http(common.http_endpoint)?;
    let listener = program::bind(common.bind_address, common.port)?;
    let certificate = Arc::new(Certificate::default());
    certificate.load(&common.tls_cert, &common.tls_key)?;
    let (chain, key) = (common.tls_cert, common.tls_key);
    tasks.spawn(certificate.clone().follow(chain, key, server::FILES_EVERY));
    tasks.spawn(certificate.clone().tell_end(server::CERTIFICATE_ENDS));
    let client = serve::questions::client(common.kubeconfig.as_deref()).await?;
    let stop = Stop::watch()?;

    let (proxy, is_stopping) = (Arc::new(FrontProxy::default()), Arc::new(AtomicBool::default()));
    tasks.spawn(proxy.clone().follow(client.clone()));
    let missing = {
        let (proxy, is_stopping, certificate) = (proxy.clone(), is_stopping.clone(), certificate.clone());
        move || match (is_stopping.load(Ordering::Relaxed), proxy.is_known()) {
            (true, _) => Some("it is stopping"),
            (false, false) => Some("the front-proxy CA is not loaded yet: see the log"),
            (false, true) => certificate.missing(),
        }
    };
    tasks.spawn(serve::http::probes(http, metrics, missing));
    let callers = Arc::new(Callers { token: arguments.token_file, clients: Default::default() });
    let lease =
        Lease::new(client.clone(), &common.namespace, &arguments.lease, &common.pod_name, Times::default());
    tasks.spawn({
        let (client, callers) = (client.clone(), callers.clone());
        async move { lease.lead(|| discovery::control(client.clone(), callers.clone())).await }
    });
    let api = Arc::new(Api {
        reviews: Reviews::new(client.clone(), common.review_cache, METRICS)?,
        client,
        proxy,
        callers,
        users: api::bound(arguments.client_qps, arguments.client_burst),
        max_entries: arguments.max_entries,
        places: Semaphore::new(usize::from(common.max_requests)),
        timeout: arguments.page_timeout,
    });
    tasks.spawn({
        let api = api.clone();
        async move {
            loop {
                tokio::time::sleep(TIDY_EVERY).await;
                api.users.retain_recent();
            }
        }
    });
    tracing::info!(address = %listener.local_addr()?, "serving");
    let config = certificate.server_config_for(Arc::new(AnyClient::new()));
    let graceful = GracefulShutdown::new();
    tokio::select! {
        () = server::answer(listener, config, api::router(api), &graceful) => {
            return Err("the API server takes no more connections: see the log".into());
        }
        _ = tasks.join_next() => return Err("a task ended unexpectedly: see the log".into()),
        () = stop.asked() => {}
    }
    is_stopping.store(true, Ordering::Relaxed);
    server::drain(graceful).await;
    Ok(())
}
