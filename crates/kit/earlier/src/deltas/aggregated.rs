//! `cbt-earlier aggregated`: the aggregated API server, started and stopped. Every replica serves; one of them, which is
//! elected, keeps the status of DriverDiscoveries.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serve::certificate::Certificate;
use serve::reviews::Reviews;
use tokio::sync::Semaphore;

use super::api::{self, Api};
use super::discovery::{self, Callers};
use super::front_proxy::{AnyClient, FrontProxy};
use crate::Aggregated as Arguments;
use crate::server::{METRICS, Server};

/// How often users are forgotten who have not asked for a while.
const TIDY_EVERY: Duration = Duration::from_secs(60);

/// Serves until a signal.
pub async fn run(arguments: Arguments) -> Result<(), Box<dyn Error>> {
    let common = arguments.common;
    let certificate = Arc::new(Certificate::default());
    let (proxy, is_stopping) = (Arc::new(FrontProxy::default()), Arc::new(AtomicBool::default()));
    let missing = {
        let (proxy, is_stopping, certificate) = (proxy.clone(), is_stopping.clone(), certificate.clone());
        move || match (is_stopping.load(Ordering::Relaxed), proxy.is_known()) {
            (true, _) => Some("it is stopping"),
            (false, false) => Some("the front-proxy CA is not loaded yet: see the log"),
            (false, true) => certificate.missing(),
        }
    };
    let mut server = Server::begin(&common, &certificate, missing).await?;
    let client = server.client.clone();
    server.tasks.spawn(proxy.clone().follow(client.clone()));
    let callers = Arc::new(Callers { token: arguments.token_file, clients: Default::default() });
    let lease = server.lease(&common, &arguments.lease);
    server.tasks.spawn({
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
        places: Arc::new(Semaphore::new(usize::from(common.max_requests))),
        timeout: arguments.page_timeout,
    });
    server.tasks.spawn({
        let api = api.clone();
        async move {
            loop {
                tokio::time::sleep(TIDY_EVERY).await;
                api.users.retain_recent();
            }
        }
    });
    tracing::info!(address = %server.listener.local_addr()?, "serving");
    let config = certificate.server_config_for(Arc::new(AnyClient::new()));
    let at_end = async { is_stopping.store(true, Ordering::Relaxed) };
    server.serve(config, api::router(api), "the API server", at_end).await
}
