//! Questions to the Kubernetes API server: the client for them, and each of them bounded in time, measured, and what a client hears where no answer comes.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use axum::http::{Request, Response, StatusCode};
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
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
        None => Config::infer().await.map_err(|error| {
            match error.source().and_then(<dyn Error>::downcast_ref) {
                Some(unread @ KubeconfigError::Parse(_)) => {
                    said_of("the file of KUBECONFIG, or ~/.kube/config,", unread)
                }
                _ => error.to_string(),
            }
        })?,
        Some(path) => {
            let said = |error| said_of(&path.display().to_string(), &error);
            let kubeconfig = Kubeconfig::read_from(path).map_err(said)?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.map_err(said)?
        }
    };
    Ok(relisting(Client::try_from(config)?))
}

/// Why a kubeconfig cannot be used. What stands in it, a token perhaps, is not quoted, as the parser does.
fn said_of(file: &str, error: &KubeconfigError) -> String {
    match error {
        KubeconfigError::Parse(error) => {
            let at =
                error.location().map(|at| format!(": look at line {}, column {}", at.line(), at.column()));
            format!("{file} is not a kubeconfig in YAML{}", at.unwrap_or_default())
        }
        error => format!("the kubeconfig {file} cannot be used: {error}"),
    }
}

/// A client by which a watch whose resourceVersion is too old is listed again. The API server may say so in the HTTP status (410) or in
/// an event; `kube`'s watcher lists again only after the event, and after the status asks for the same version for ever.
fn relisting(client: Client) -> Client {
    let namespace = client.default_namespace().to_owned();
    let relisting = tower::service_fn(move |request: Request<Body>| {
        let client = client.clone();
        async move {
            let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let response = client.send(request).await?;
            Ok::<_, kube::Error>(match is_watch && response.status() == StatusCode::GONE {
                true => Response::new(Body::from(GONE.as_bytes().to_vec())),
                false => response,
            })
        }
    });
    Client::new(relisting, namespace)
}

/// The event that says the same as HTTP 410.
const GONE: &str = concat!(
    r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","#,
    r#""message":"too old resource version","reason":"Expired","code":410}}"#,
    "\n"
);

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

/// The status for a client whose call needed the answer. The client also learns what it cannot mend: it may be the one who
/// can tell the operator.
pub fn away(error: &kube::Error) -> Status {
    tracing::warn!(%error, "the Kubernetes API server gave no answer that can be used");
    let kube::Error::Api(refusal) = error else {
        return Status::unavailable("the Kubernetes API server does not answer: try again");
    };
    let (code, reason) = (refusal.code, &refusal.reason);
    match code {
        401 => Status::unavailable(
            "the Kubernetes API server refuses the credentials of this server (401): renew its service account's token or --kubeconfig",
        ),
        // `RESOURCE "NAME" is forbidden: User "ACCOUNT" cannot VERB resource ...`; the name may be another tenant's.
        403 => Status::unavailable(match refusal.message.split_once("is forbidden: ") {
            Some((_, missing)) => {
                format!("this server lacks a right at the Kubernetes API server: {missing}")
            }
            None => "this server lacks a right at the Kubernetes API server (403): see its log".to_owned(),
        }),
        429 | 500.. => Status::unavailable(format!(
            "the Kubernetes API server answers with an error ({code} {reason}): try again"
        )),
        _ => Status::internal(format!(
            "the Kubernetes API server refuses what this server asks ({code} {reason}): see its log"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::extract::RawQuery;
    use axum::response::IntoResponse;
    use axum::routing::get;
    use futures_util::StreamExt;
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::Api;
    use kube::runtime::watcher::{self, Event};
    use tonic::Code;

    use super::*;

    #[test]
    fn a_refusal_is_told_as_what_it_is() {
        let denied = concat!(
            r#"secrets "theirs" is forbidden: User "system:serviceaccount:backup:gateway" cannot get resource "#,
            r#""secrets" in API group "" in the namespace "shop""#
        );
        for (code, reason, message, expected, said) in [
            (
                401,
                "Unauthorized",
                "Unauthorized",
                Code::Unavailable,
                "refuses the credentials of this server",
            ),
            (
                403,
                "Forbidden",
                denied,
                Code::Unavailable,
                r#"lacks a right at the Kubernetes API server: User "system:serviceaccount:backup:gateway" cannot get resource "secrets""#,
            ),
            (403, "Forbidden", "theirs", Code::Unavailable, "(403): see its log"),
            (429, "TooManyRequests", "later", Code::Unavailable, "(429 TooManyRequests): try again"),
            (500, "InternalError", "etcd", Code::Unavailable, "(500 InternalError): try again"),
            (422, "Invalid", "theirs", Code::Internal, "(422 Invalid): see its log"),
        ] {
            let status = kube::core::Status::failure(message, reason).with_code(code).boxed();
            let status = away(&kube::Error::Api(status));
            assert_eq!(status.code(), expected, "{status:?}");
            assert!(status.message().contains(said), "{}", status.message());
            assert!(!status.message().contains("theirs"), "{}", status.message());
        }
        let late = away(&kube::Error::Service("no connection".into()));
        assert_eq!((late.code(), late.message().contains("does not answer")), (Code::Unavailable, true));
    }

    /// Found from outside: a watch that began with HTTP 410 was begun again with the same resourceVersion for ever.
    #[tokio::test]
    async fn a_watch_that_begins_too_late_is_listed_anew() {
        let lists = Arc::<AtomicUsize>::default();
        let counted = lists.clone();
        let answer = async move |RawQuery(query): RawQuery| {
            if query.unwrap_or_default().contains("watch=true") {
                let gone = kube::core::Status::failure("too old resource version", "Expired").with_code(410);
                return (StatusCode::GONE, serde_json::to_string(&gone).expect("JSON")).into_response();
            }
            counted.fetch_add(1, Ordering::Relaxed);
            let list = serde_json::json!({
                "apiVersion": "v1", "kind": "ConfigMapList", "metadata": {"resourceVersion": "7"}, "items": [],
            });
            list.to_string().into_response()
        };
        let listener = crate::slots::bind(([127, 0, 0, 1], 0).into()).expect("bind");
        let address = listener.local_addr().expect("an address");
        let router = axum::Router::new().route("/api/v1/configmaps", get(answer));
        let serving = tokio::spawn(crate::http::serve(listener, router));
        let config = Config::new(format!("http://{address}").parse().expect("a URI"));
        let client = relisting(Client::try_from(config).expect("a client"));
        let events = watcher::watcher(Api::<ConfigMap>::all(client), watcher::Config::default());
        let listed = events.filter(|event| {
            let is_listed = matches!(event, Ok(Event::InitDone));
            async move { is_listed }
        });
        let twice = tokio::time::timeout(Duration::from_secs(30), listed.take(2).count()).await;
        assert_eq!((twice, lists.load(Ordering::Relaxed)), (Ok(2), 2));
        serving.abort();
    }
}
