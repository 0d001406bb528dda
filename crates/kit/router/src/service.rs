//! The CSI services as gRPC sees them: which path is which call, a request read and an answer written. Messages stay bytes:
//! fields that this router does not know reach the node. What a call does is decided in `calls`.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use serve::relay::{deadline, frame_bytes, unframe_bytes};
use serve::streams::{Call, Record as _, within};
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Request, Response, header};
use tonic::server::NamedService;
use tonic::{Code, Status};
use tower::Service;

use crate::calls::{Method, Router};
use crate::record::Record;

/// Longest request, in bytes: as long as gRPC lets messages be.
const MAX_REQUEST: usize = 4 << 20;
const REQUEST_TIME: Duration = Duration::from_secs(10);

macro_rules! services {
    ($($name:ident = $path:literal,)*) => {$(
        #[derive(Clone)]
        pub struct $name(pub Arc<Router>);

        impl NamedService for $name {
            const NAME: &'static str = $path;
        }

        impl Service<Request<Body>> for $name {
            type Response = Response<Body>;
            type Error = Infallible;
            type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

            fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
                Poll::Ready(Ok(()))
            }

            fn call(&mut self, request: Request<Body>) -> Self::Future {
                let router = self.0.clone();
                Box::pin(async move { Ok(answer(router, request).await) })
            }
        }
    )*};
}

services! {
    Identity = "csi.v1.Identity",
    Controller = "csi.v1.Controller",
    GroupController = "csi.v1.GroupController",
    SnapshotMetadata = "csi.v1.SnapshotMetadata",
}

async fn answer(router: Arc<Router>, request: Request<Body>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let Some(method) = Method::at(head.uri.path()) else {
        return Status::unimplemented("the service has no such call").into_http();
    };
    let deadline = deadline(&head.headers);
    let mut record = Record::new(method.name());
    if method.is_stream() {
        let opened = async {
            let permit = router.streams.enter("")?;
            let message = read(body).await?;
            Ok((permit, router.open(method, message, deadline, &mut record).await?))
        };
        return match within(deadline, opened).await {
            Ok((permit, answer)) => {
                let call = Call { record, deadline, on_connection: None, permit: Some(permit) };
                router.streams.pass_on(answer, call)
            }
            Err(status) => {
                record.end(&status);
                status.into_http()
            }
        };
    }
    let called = async {
        let message = read(body).await?;
        router.call(method, message, deadline, &mut record).await
    };
    match within(deadline, called).await {
        Ok(message) => {
            record.done(Code::Ok, None);
            whole(&message)
        }
        Err(status) => {
            record.end(&status);
            status.into_http()
        }
    }
}

/// The request's message, if it comes whole and in time.
async fn read(body: Body) -> Result<Bytes, Status> {
    let collected = tokio::time::timeout(REQUEST_TIME, Limited::new(body, MAX_REQUEST).collect()).await;
    match collected {
        Ok(Ok(body)) => unframe_bytes(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(Status::resource_exhausted(format!("the request is larger than {MAX_REQUEST} bytes")))
        }
        Ok(Err(error)) => Err(Status::cancelled(format!("the request did not arrive: {error}"))),
        Err(_) => Err(Status::deadline_exceeded("the request did not arrive in time")),
    }
}

fn whole(message: &[u8]) -> Response<Body> {
    let trailers = async {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        Some(Ok(trailers))
    };
    let mut response = Response::new(Body::new(Full::new(frame_bytes(message)).with_trailers(trailers)));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}
