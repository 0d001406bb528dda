//! `grpc.health.v1.Health` for anyone, without a token: `Check` alone, counted and bounded as calls of unknown callers are. A `Watch`
//! would last for as long as its client likes.

use std::convert::Infallible;
use std::task::{Context, Poll};

use http_body_util::{BodyExt, Full};
use serve::listen::Calls;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tower::Service;

use crate::service::{Answering, no_connection, read_body, refuse};

const CHECK: &str = "/grpc.health.v1.Health/Check";

/// The service that knows the answers, bounded.
#[derive(Clone)]
pub struct Health<S>(pub S);

impl<S: NamedService> NamedService for Health<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Health<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let held = match request.uri().path() {
            CHECK => request.extensions().get::<Calls>().ok_or_else(no_connection).and_then(Calls::hold),
            _ => Err(Status::unimplemented("Watch is not served: call Check from time to time")),
        };
        let mut held = match held {
            Ok(held) => held,
            Err(status) => return refuse(status.into_http()),
        };
        let (body, mut service) = (request.into_body(), self.0.clone());
        Box::pin(async move {
            // First of all: a call of which nothing comes costs little.
            let asked = match read_body(body, &mut held).await {
                Ok(bytes) => Request::post(CHECK).body(Body::new(Full::new(bytes))),
                Err(status) => return Ok(status.into_http()),
            };
            let answer = Box::pin(service.call(asked.expect("CHECK is a path"))).await?;
            // A client that takes nothing holds the answer.
            Ok(answer.map(|body| {
                Body::new(body.map_frame(move |frame| {
                    let _ = &held;
                    frame
                }))
            }))
        })
    }
}
