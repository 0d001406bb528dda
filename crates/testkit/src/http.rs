//! Asks a program over HTTP.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The code and the body that a program answers with at this port, over HTTP/1.0, which knows no chunks; `None` where no program
/// listens or the answer is cut. Metrics are those of the reference.
pub async fn get(port: u16, path: &str) -> Option<(u16, String)> {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    let code = answer.split(' ').nth(1)?.parse().ok()?;
    let body = answer.split_once("\r\n\r\n")?.1.to_owned();
    if (code, path) == (200, "/metrics") {
        crate::pages::assert_has_metrics(&body);
    }
    Some((code, body))
}
