//! Questions to the Kubernetes API server: the client for them, and each of them bounded in time, measured, and what a client hears where no answer comes.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tonic::Status;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// The names of a server's metrics about its questions.
#[derive(Clone, Copy, Debug)]
pub struct Metrics {
    /// A histogram: how long each answer took, by `call`.
    pub seconds: &'static str,
    /// A counter: reviews, by `review` and `outcome`.
    pub reviews: &'static str,
}

/// A client of the API server: by this kubeconfig file, or else the pod's service account or what kubectl would take.
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, Box<dyn Error>> {
    let config = match kubeconfig {
        None => Config::infer().await?,
        Some(path) => {
            let kubeconfig = Kubeconfig::read_from(path)?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?
        }
    };
    Ok(Client::try_from(config)?)
}

/// Waits for the answer. `seconds` is the histogram that it is measured in, `call` its label there.
pub async fn ask<T>(
    seconds: &'static str,
    call: &'static str,
    question: impl Future<Output = kube::Result<T>>,
) -> kube::Result<T> {
    let asked = Instant::now();
    let answer = tokio::time::timeout(PATIENCE, question).await;
    metrics::histogram!(seconds, "call" => call).record(asked.elapsed());
    answer.unwrap_or_else(|late| Err(kube::Error::Service(late.into())))
}

/// The status for a client whose call needed the answer.
pub fn away(error: &kube::Error) -> Status {
    tracing::warn!(%error, "the Kubernetes API server did not answer");
    Status::unavailable("the Kubernetes API server does not answer: try again")
}
