//! What answers behind the proxy: a driver's socket, a gateway's address, or a mock in the same process. And reading
//! its answers message by message.

use std::error::Error;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use rustls::ClientConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serve::relay::{self, deadline};
use shell::Usage;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, Request, Response, header};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use tower::ServiceExt;

use super::address::Address;
use crate::tls;

/// What a stream may send ahead of the client, in bytes, and all streams of the connection. Small messages that wait are
/// counted by their number too: h2 closes a connection on which too many wait, and allows more the larger its window is.
const WINDOW: u32 = 8 << 10;
const WINDOWS: u32 = 16 << 20;
/// Length of a message's prefix.
const PREFIX: usize = 5;

/// What answers.
#[derive(Clone)]
pub(crate) enum Upstream {
    Channel { channel: Channel, name: String },
    Here(Arc<dyn Local>),
}

/// A server in the same process.
pub(crate) trait Local: Send + Sync {
    /// Answers the request at `path`, such as `/csi.v1.Identity/Probe`.
    fn call(&self, path: &str, deadline: Option<Instant>, body: Bytes) -> Result<Response<Body>, Status>;
}

impl Upstream {
    /// A server elsewhere. It is connected to when it is first called, and again whenever it was away.
    pub fn at(address: &Address, ca: Option<&Path>) -> Result<Self, Box<dyn Error>> {
        // The proxy must not read far ahead: a client that waits is one that the driver waits for.
        let endpoint = |text: String| {
            Endpoint::from_shared(text)
                .map(|endpoint| {
                    endpoint.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOWS)
                })
                .map_err(|error| format!("{address}: {error}"))
        };
        let channel = match (address, ca) {
            (Address::Tcp { tls: true, .. }, None) => {
                let why =
                    format!("--upstream {address} needs --upstream-ca, the authority of its certificate");
                return Err(Usage(why).into());
            }
            (Address::Tcp { host, port, tls: true }, Some(ca)) => {
                let config = config(ca)?;
                let name =
                    ServerName::try_from(host.clone()).map_err(|error| format!("{address}: {error}"))?;
                let endpoint = endpoint(format!("http://{host}:{port}"))?;
                tls::channel(&endpoint, config, name, (host.clone(), *port))
            }
            (_, Some(_)) => {
                return Err(Usage(format!("{address} is not https://, so it has no authority")).into());
            }
            (Address::Tcp { .. }, None) => endpoint(address.to_string())?.connect_lazy(),
            (Address::Unix(path), None) => {
                let connector = csi_client::connector(path.clone());
                endpoint("http://localhost".to_owned())?.connect_with_connector_lazy(connector)
            }
        };
        Ok(Upstream::Channel { channel, name: address.to_string() })
    }

    /// Passes a request on; an error is not the server's answer.
    pub async fn call(&self, request: Request<Body>) -> Result<Response<Body>, Status> {
        match self {
            Upstream::Channel { channel, name } => channel.clone().oneshot(request).await.map_err(|error| {
                Status::unavailable(format!("no answer from {name}: {}", base::report(&error)))
            }),
            Upstream::Here(local) => {
                let (head, body) = request.into_parts();
                let body = body.collect().await?.to_bytes();
                let answer = local.call(head.uri.path(), deadline(&head.headers), body);
                Ok(answer.unwrap_or_else(Status::into_http))
            }
        }
    }

    /// Makes a call of the proxy's own.
    pub(super) async fn ask(&self, path: &str, body: Bytes) -> Result<Reader, Status> {
        let request = Request::post(path)
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers")
            .body(Body::new(http_body_util::Full::new(body)))
            .map_err(|error| Status::internal(error.to_string()))?;
        Reader::of(self.call(request).await?).map(|(_, reader)| reader)
    }
}

/// Trusts the authorities in a PEM file.
fn config(ca: &Path) -> Result<ClientConfig, String> {
    let failed = |error: &dyn fmt::Display| format!("{}: {error}", ca.display());
    let all: Result<Vec<_>, _> = CertificateDer::pem_file_iter(ca).and_then(Iterator::collect);
    let all = all.map_err(|error| failed(&error))?;
    match all.is_empty() {
        true => Err(failed(&"there is no certificate in it")),
        false => tls::config(all).map_err(|error| failed(&error)),
    }
}

/// The messages of an answer.
#[derive(Debug)]
pub(super) struct Reader {
    body: Body,
    buffer: BytesMut,
    end: Option<Status>,
}

impl Reader {
    /// Head and messages of an answer; an error where it is one at once.
    pub fn of(answer: Response<Body>) -> Result<(HeaderMap, Self), Status> {
        let (head, body) = answer.into_parts();
        let end = relay::status(&head.headers);
        if let Some(status) = end.as_ref().filter(|status| status.code() != Code::Ok) {
            return Err(status.clone());
        }
        if let Some(code) = relay::code_of_http(head.status) {
            return Err(Status::new(code, format!("it answered with HTTP status {}", head.status)));
        }
        Ok((head.headers, Reader { body, buffer: BytesMut::new(), end }))
    }

    /// The next message, with its prefix; `None` at the end with `OK`.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(message) = self.message()? {
                return Ok(Some(message));
            }
            if let Some(end) = &self.end {
                return match end.code() {
                    Code::Ok if !self.buffer.is_empty() => {
                        Err(Status::internal("its answer ends within a message"))
                    }
                    Code::Ok => Ok(None),
                    _ => Err(end.clone()),
                };
            }
            match self.body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.buffer.extend_from_slice(&data),
                    Err(frame) => {
                        let trailers = frame.into_trailers().unwrap_or_default();
                        let status = relay::status(&trailers);
                        self.end =
                            Some(status.unwrap_or_else(|| Status::unknown("its answer has no status")));
                    }
                },
                Some(Err(status)) => return Err(status),
                None => self.end = Some(Status::unavailable("its answer was cut")),
            }
        }
    }

    fn message(&mut self) -> Result<Option<Bytes>, Status> {
        if self.buffer.len() < PREFIX {
            return Ok(None);
        }
        if self.buffer[0] != 0 {
            return Err(Status::internal("its answer is compressed, and the client did not ask for that"));
        }
        let length = (&self.buffer[1..PREFIX]).get_u32() as usize;
        if self.buffer.len() < PREFIX + length {
            return Ok(None);
        }
        Ok(Some(self.buffer.split_to(PREFIX + length).freeze()))
    }
}
