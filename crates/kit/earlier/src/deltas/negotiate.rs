//! Content negotiation as Kubernetes clients expect it: JSON and YAML both ways, and nothing else. Pure.

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use crate::refusal::Refusal;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Json,
    Yaml,
}

/// What the server writes and reads, in its words.
const KNOWN: &str = "application/json, application/yaml";
/// Discovery of all groups in one document.
const DISCOVERY: [(&str, &str); 3] =
    [("as", "APIGroupDiscoveryList"), ("g", "apidiscovery.k8s.io"), ("v", "v2")];

/// One alternative of an `Accept` header.
struct MediaRange<'a> {
    media: String,
    parameters: Vec<(&'a str, &'a str)>,
    /// In thousandths.
    quality: u16,
}

fn ranges(headers: &HeaderMap) -> Vec<MediaRange<'_>> {
    let texts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut ranges: Vec<_> = texts
        .flat_map(|text| text.split(','))
        .filter(|text| !text.trim().is_empty())
        .map(|text| {
            let mut parts = text.split(';').map(str::trim);
            let media = parts.next().unwrap_or_default().to_ascii_lowercase();
            let parameters: Vec<_> = parts.filter_map(|part| part.split_once('=')).collect();
            let quality = parameters.iter().find(|(name, _)| *name == "q");
            let quality = quality.and_then(|(_, value)| value.parse::<f32>().ok()).unwrap_or(1.0);
            MediaRange { media, parameters, quality: (quality.clamp(0.0, 1.0) * 1000.0) as u16 }
        })
        .filter(|range| range.quality > 0)
        .collect();
    ranges.sort_by_key(|range| std::cmp::Reverse(range.quality));
    ranges
}

impl Format {
    fn of(media: &str) -> Option<Self> {
        match media {
            "application/json" | "application/*" | "*/*" => Some(Format::Json),
            "application/yaml" => Some(Format::Yaml),
            _ => None,
        }
    }

    pub fn accepted(headers: &HeaderMap) -> Result<Self, Refusal> {
        if !headers.contains_key(header::ACCEPT) {
            return Ok(Format::Json);
        }
        // Another form of the object, such as a table, is not served; clients name the object itself as well.
        let is_whole = |range: &&MediaRange<'_>| {
            !range.parameters.iter().any(|(name, _)| ["as", "stream"].contains(name))
        };
        let found = ranges(headers).iter().filter(is_whole).find_map(|range| Format::of(&range.media));
        found.ok_or_else(|| {
            let message = format!("only the following media types are accepted: {KNOWN}");
            Refusal::new(StatusCode::NOT_ACCEPTABLE, "NotAcceptable", message)
        })
    }

    pub fn sent(headers: &HeaderMap) -> Result<Self, Refusal> {
        let Some(given) = headers.get(header::CONTENT_TYPE) else { return Ok(Format::Json) };
        let media = given.to_str().unwrap_or_default().split(';').next().unwrap_or_default();
        let media = media.trim().to_ascii_lowercase();
        Format::of(&media).filter(|_| !media.contains('*')).ok_or_else(|| {
            let message = format!(
                "the body of the request was in an unknown format - accepted media types include: {KNOWN}"
            );
            Refusal::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaType", message)
        })
    }

    pub fn read(self, body: &[u8]) -> Result<Value, Refusal> {
        let read = match self {
            Format::Json => serde_json::from_slice(body).map_err(|error| error.to_string()),
            Format::Yaml => serde_saphyr::from_slice(body).map_err(|error| error.to_string()),
        };
        read.map_err(|error| Refusal::bad_request(format!("the body of the request cannot be read: {error}")))
    }

    pub fn write(self, code: StatusCode, object: &Value) -> Response {
        let (media, body) = match self {
            Format::Json => ("application/json", object.to_string()),
            Format::Yaml => match serde_saphyr::to_string(object) {
                Ok(text) => ("application/yaml", text),
                Err(error) => {
                    tracing::error!(%error, "write YAML");
                    ("application/json", object.to_string())
                }
            },
        };
        (code, [(header::CONTENT_TYPE, media), (header::CACHE_CONTROL, "no-store")], body).into_response()
    }

    pub fn refuse(self, refusal: &Refusal) -> Response {
        let mut response = self.write(refusal.code, &refusal.status());
        if let Some((name, value)) = refusal.header() {
            response.headers_mut().insert(name, value);
        }
        response
    }
}

/// The media type of discovery in one document, where that is what the client wants most.
pub fn wants_aggregated(headers: &HeaderMap) -> Option<&'static str> {
    let first = ranges(headers).into_iter().next()?;
    let is_it =
        first.media == "application/json" && DISCOVERY.iter().all(|part| first.parameters.contains(part));
    is_it.then_some("application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
}

pub fn warning(text: &str) -> Option<(HeaderName, HeaderValue)> {
    let quoted = text.replace('\\', "\\\\").replace('"', "\\\"");
    HeaderValue::from_str(&format!("299 - \"{quoted}\"")).ok().map(|value| (header::WARNING, value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use Format::{Json, Yaml};

    fn headers(name: HeaderName, text: Option<&'static str>) -> HeaderMap {
        text.map(|text| (name, HeaderValue::from_static(text))).into_iter().collect()
    }

    #[test]
    fn answers_are_in_what_the_client_accepts() {
        for (text, expected) in [
            (None, Some(Json)),
            (Some("*/*"), Some(Json)),
            (Some("application/*"), Some(Json)),
            (Some("application/json"), Some(Json)),
            (Some("Application/JSON; charset=utf-8"), Some(Json)),
            (Some("application/yaml"), Some(Yaml)),
            (Some("application/json;q=0.5, application/yaml"), Some(Yaml)),
            (Some("application/vnd.kubernetes.protobuf, application/json"), Some(Json)),
            (Some("application/json;as=Table;v=v1;g=meta.k8s.io,application/json"), Some(Json)),
            (Some("application/json;as=Table;v=v1;g=meta.k8s.io"), None),
            (Some("application/json;stream=watch"), None),
            (Some("application/vnd.kubernetes.protobuf"), None),
            (Some("application/cbor"), None),
            (Some("text/html"), None),
            (Some("application/json;q=0"), None),
            (Some(""), None),
        ] {
            let found = Format::accepted(&headers(header::ACCEPT, text));
            assert_eq!(found.clone().ok(), expected, "{text:?}");
            assert!(found.is_ok() || found.is_err_and(|refusal| refusal.code == 406), "{text:?}");
        }
    }

    #[test]
    fn bodies_are_in_what_the_server_reads() {
        for (text, expected) in [
            (None, Some(Json)),
            (Some("application/json"), Some(Json)),
            (Some("application/json; charset=utf-8"), Some(Json)),
            (Some("application/yaml"), Some(Yaml)),
            (Some("application/vnd.kubernetes.protobuf"), None),
            (Some("application/cbor"), None),
            (Some("*/*"), None),
            (Some("text/plain"), None),
        ] {
            let found = Format::sent(&headers(header::CONTENT_TYPE, text));
            assert_eq!(found.clone().ok(), expected, "{text:?}");
            assert!(found.is_ok() || found.is_err_and(|refusal| refusal.code == 415), "{text:?}");
        }
        let both = [(Json, "{\"a\": [1, \"2\"]}"), (Yaml, "a:\n- 1\n- \"2\"\n")];
        for (format, text) in both {
            let object = format.read(text.as_bytes()).expect("an object");
            assert_eq!(object, serde_json::json!({"a": [1, "2"]}), "{format:?}");
            assert_eq!(format.read(b"{").map_err(|refusal| refusal.code.as_u16()), Err(400), "{format:?}");
        }
    }

    #[test]
    fn one_document_of_discovery_is_for_those_who_ask_first_for_it() {
        for (text, is_wanted) in [
            ("application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json", true),
            ("application/json;as=APIGroupDiscoveryList;v=v2;g=apidiscovery.k8s.io", true),
            ("application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList", false),
            ("application/json,application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList", false),
            ("*/*", false),
        ] {
            assert_eq!(wants_aggregated(&headers(header::ACCEPT, Some(text))).is_some(), is_wanted, "{text}");
        }
    }
}
