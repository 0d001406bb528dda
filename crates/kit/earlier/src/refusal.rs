//! Answers that say no, as the Kubernetes API writes them: a code, a reason and a message in a `Status` object.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tonic::{Code, Status};

#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    pub code: StatusCode,
    /// The reason that clients go by.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// `details` of the Status; null where there are none.
    pub details: Value,
}

impl Refusal {
    pub fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Refusal { code, reason, message: message.into(), details: Value::Null }
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Refusal::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    pub fn status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code.as_u16(),
        });
        if !self.details.is_null() {
            status["details"] = self.details.clone();
        }
        status
    }

    /// The header that clients expect with this code, if any.
    pub fn header(&self) -> Option<(header::HeaderName, HeaderValue)> {
        match self.code {
            StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                Some((header::RETRY_AFTER, HeaderValue::from_static("1")))
            }
            _ => None,
        }
    }
}

impl From<Status> for Refusal {
    fn from(status: Status) -> Self {
        let (code, reason) = match status.code() {
            Code::InvalidArgument | Code::OutOfRange => (StatusCode::BAD_REQUEST, "BadRequest"),
            Code::Unauthenticated => (StatusCode::UNAUTHORIZED, "Unauthorized"),
            Code::PermissionDenied => (StatusCode::FORBIDDEN, "Forbidden"),
            Code::NotFound => (StatusCode::NOT_FOUND, "NotFound"),
            Code::FailedPrecondition | Code::Aborted | Code::AlreadyExists => {
                (StatusCode::CONFLICT, "Conflict")
            }
            Code::ResourceExhausted => (StatusCode::TOO_MANY_REQUESTS, "TooManyRequests"),
            Code::Unimplemented => (StatusCode::NOT_IMPLEMENTED, "NotImplemented"),
            Code::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable"),
            Code::DeadlineExceeded => (StatusCode::GATEWAY_TIMEOUT, "Timeout"),
            Code::Ok | Code::Cancelled | Code::Unknown | Code::Internal | Code::DataLoss => {
                (StatusCode::INTERNAL_SERVER_ERROR, "InternalError")
            }
        };
        Refusal::new(code, reason, status.message())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = (self.code, Json(self.status())).into_response();
        if let Some((name, value)) = self.header() {
            response.headers_mut().insert(name, value);
        }
        response
    }
}
