//! How long one request to a bucket may take: by what it carries, so that a slow line does not count as dead.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use object_store::{ClientOptions, RetryConfig};
use tokio::time::timeout;

/// For a request that carries next to nothing.
const LEAST: Duration = Duration::from_secs(30);
/// Bytes a second that a request makes at least. Four packs are on their way at once, so a line that has 1 Mbit/s will do.
const SLOWEST: u64 = 32 << 10;

/// How long a number of bytes may take.
fn limit(bytes: u64) -> Duration {
    LEAST + Duration::from_secs(bytes / SLOWEST)
}

/// Tries of one request: after a pack that took all of its time there is another one. A request is signed once, for 15
/// minutes, and the last try must begin before.
pub fn retries() -> RetryConfig {
    RetryConfig { retry_timeout: Duration::from_secs(600), ..RetryConfig::default() }
}

/// Makes clients whose requests have as much time as they need.
#[derive(Debug)]
pub struct BySize;

impl HttpConnector for BySize {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let options = options.clone().with_timeout_disabled();
        Ok(HttpClient::new(Timed(ReqwestConnector::default().connect(&options)?)))
    }
}

#[derive(Debug)]
struct Timed(HttpClient);

impl HttpService for Timed {
    // As the macro `async_trait` writes it, with which the trait is made.
    fn call<'life0, 'async_trait>(
        &'life0 self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(async move {
            let late = |error| HttpError::new(HttpErrorKind::Timeout, error);
            let sent = limit(request.body().content_length() as u64);
            let (head, body) = timeout(sent, self.0.execute(request)).await.map_err(late)??.into_parts();
            // Nothing that is read is longer than a few packs, so that it may be read before it is handed on.
            let length =
                head.headers.get("content-length").and_then(|length| length.to_str().ok()?.parse().ok());
            let body = timeout(limit(length.unwrap_or(0)), body.bytes()).await.map_err(late)??;
            Ok(HttpResponse::from_parts(head, body.into()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pack_has_minutes_and_a_lock_half_of_one() {
        assert_eq!(limit(200), LEAST);
        let pack = limit(crate::repository::pack::PACK as u64);
        assert_eq!(pack, Duration::from_secs(30 + 512));
        assert!(pack < retries().retry_timeout, "and a second try");
    }
}
