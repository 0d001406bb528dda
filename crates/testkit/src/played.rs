//! Nodes that are played: they have certificates of the cluster, and answer calls as a test says.

use std::convert::Infallible;
use std::io;
use std::path::Path;
use std::sync::Arc;

use futures_util::stream::{self, Stream};
use http_body_util::{BodyExt, StreamBody};
use prost::bytes::Bytes;
use serve::identity::Role;
use serve::listen::{self, Limits};
use serve::mutual::{Files, Mutual};
use serve::relay::unframe_bytes;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Response};
use tonic::transport::server::Connected;

/// TLS with the files of this name, which [`Authority::issue`](crate::cluster::Authority::issue) has written.
pub fn tls(dir: &Path, name: &str, role: Role) -> Arc<Mutual> {
    let file = |end| dir.join(format!("{name}.{end}"));
    let files = Files { certificate: file("crt"), key: file("key"), authorities: file("ca") };
    let tls = Mutual::new(files, role);
    tls.load().expect("certificates");
    tls
}

/// What a call is answered by: messages with their prefixes.
pub type Played = Result<Vec<Bytes>, Status>;

/// Answers calls, of a path and with a message.
pub fn serve(
    listener: TcpListener,
    tls: Arc<Mutual>,
    answers: impl Fn(&str, Bytes) -> Played + Clone + Send + Sync + 'static,
) {
    let connections = listen::tls(listener, move || tls.server(), Limits::of_certificates());
    let answers = move |path: String, message| std::future::ready(answers(&path, message));
    tokio::spawn(serve_on(connections, answers));
}

/// The same on connections that are made elsewhere, until there are no more.
pub async fn serve_on<C, A>(
    connections: impl Stream<Item = io::Result<C>>,
    answers: impl Fn(String, Bytes) -> A + Clone + Send + Sync + 'static,
) where
    C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    A: Future<Output = Played> + Send + 'static,
{
    let served = axum::Router::new().fallback(move |request: axum::extract::Request| {
        let answers = answers.clone();
        async move {
            let path = request.uri().path().to_owned();
            // A router gives up the nodes that it has asked ahead when a page is full.
            let answer = match request.into_body().collect().await {
                Ok(body) => answers(path, unframe_bytes(body.to_bytes()).expect("a message")).await,
                Err(_) => Err(Status::cancelled("the request is given up")),
            };
            answer.map_or_else(Status::into_http, whole).map(axum::body::Body::new)
        }
    });
    let server = tonic::transport::Server::builder().add_routes(tonic::service::Routes::from(served));
    server.serve_with_incoming(connections).await.expect("serve");
}

fn whole(messages: Vec<Bytes>) -> Response<Body> {
    let trailers =
        HeaderMap::from_iter([("grpc-status".parse().expect("a name"), HeaderValue::from_static("0"))]);
    let data = messages.into_iter().map(http_body::Frame::data);
    let frames = data.chain([http_body::Frame::trailers(trailers)]).map(Ok::<_, Infallible>);
    let mut response = Response::new(Body::new(StreamBody::new(stream::iter(frames))));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}
