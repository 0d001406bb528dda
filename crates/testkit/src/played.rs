//! Nodes that are played: they have certificates of the cluster, and answer calls as a test says.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use prost::bytes::Bytes;
use serve::identity::Role;
use serve::listen::{self, Limits};
use serve::mutual::{Files, Mutual};
use serve::relay::unframe_bytes;
use tokio::net::TcpListener;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Response};

/// TLS with the files of this name, which [`Authority::issue`](crate::cluster::Authority::issue) has written.
pub fn tls(dir: &Path, name: &str, role: Role) -> Arc<Mutual> {
    let file = |end| dir.join(format!("{name}.{end}"));
    let files = Files { certificate: file("crt"), key: file("key"), authorities: file("ca") };
    let tls = Mutual::new(files, role);
    tls.load().expect("certificates");
    tls
}

/// Answers calls, of a path and with a message, by these messages with their prefixes.
pub fn serve(
    listener: TcpListener,
    tls: Arc<Mutual>,
    answers: impl Fn(&str, Bytes) -> Result<Vec<Bytes>, Status> + Clone + Send + Sync + 'static,
) {
    let served = axum::Router::new().fallback(move |request: axum::extract::Request| {
        let answers = answers.clone();
        async move {
            let path = request.uri().path().to_owned();
            // A router gives up the nodes that it has asked ahead when a page is full.
            let answer = match request.into_body().collect().await {
                Ok(body) => answers(&path, unframe_bytes(body.to_bytes()).expect("a message")),
                Err(_) => Err(Status::cancelled("the request is given up")),
            };
            answer.map_or_else(Status::into_http, whole).map(axum::body::Body::new)
        }
    });
    let connections = listen::tls(listener, move || tls.server(), Limits::of_certificates());
    let server = tonic::transport::Server::builder().add_routes(tonic::service::Routes::from(served));
    tokio::spawn(async move { server.serve_with_incoming(connections).await.expect("serve") });
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
