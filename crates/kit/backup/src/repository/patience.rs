//! How long one request to a bucket may take: by what it carries, so that a slow line does not count as dead. And how much its
//! answer may be: as much as was asked for, whatever a server sends.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use futures_util::TryStreamExt;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, RetryConfig};
use tokio::time::timeout;

/// For a request that carries next to nothing.
const LEAST: Duration = Duration::from_secs(30);
/// Bytes a second that a request makes at least. Four packs are on their way at once, so a line that has 1 Mbit/s will do.
const SLOWEST: u64 = 32 << 10;

/// Bytes of an answer that says itself how long it is: a page of a list has a thousand names.
const PAGE: u64 = 8 << 20;

/// Bytes that the answer to a request may have.
fn most(request: &HttpRequest) -> u64 {
    let range = request.headers().get("range").and_then(|range| range.to_str().ok()?.strip_prefix("bytes="));
    let asked = range.and_then(|range| {
        let (first, last) = range.split_once('-')?;
        (last.parse::<u64>().ok()? + 1).checked_sub(first.parse().ok()?)
    });
    if request.method() == "HEAD" { 0 } else { asked.unwrap_or(0).max(PAGE) }
}

/// Which page of a list is asked for, where it is not the first.
fn page(request: &HttpRequest) -> Option<String> {
    let url = reqwest::Url::parse(&request.uri().to_string()).ok()?;
    let (_, page) = url.query_pairs().find(|(name, _)| name == "continuation-token")?;
    let page = page.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    Some(format!("<NextContinuationToken>{page}</NextContinuationToken>"))
}

async fn read(body: HttpResponseBody, length: u64, most: u64) -> Result<Vec<u8>, HttpError> {
    let mut stream = body.bytes_stream();
    let mut bytes = Vec::with_capacity(length.min(most) as usize);
    while let Some(part) = stream.try_next().await? {
        if (bytes.len() + part.len()) as u64 > most {
            return Err(wrong(format!("the server's answer is longer than the {most} bytes it may have")));
        }
        bytes.extend_from_slice(&part);
    }
    Ok(bytes)
}

/// What is wrong with an answer, and would be with the next.
fn wrong(why: impl Into<String>) -> HttpError {
    HttpError::new(HttpErrorKind::Decode, std::io::Error::other(why.into()))
}

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
            let (most, page) = (most(&request), page(&request));
            let (head, body) = timeout(sent, self.0.execute(request)).await.map_err(late)??.into_parts();
            // Nothing that is read is longer than a few packs, so that it may be read before it is handed on.
            let length =
                head.headers.get("content-length").and_then(|length| length.to_str().ok()?.parse().ok());
            let length: u64 = length.unwrap_or(0);
            let body = timeout(limit(length), read(body, length, most)).await.map_err(late)??;
            if page.is_some_and(|page| String::from_utf8_lossy(&body).contains(&page)) {
                return Err(wrong("a page of the server's list is followed by itself: it would never end"));
            }
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
