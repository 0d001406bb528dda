//! Lists of many nodes as one, in pages. Pure.
//!
//! The nodes follow each other by key. A token is that of a node, which is an id and holds the node's key, or `after-KEY`
//! where a page ends with a node's last entry. So a token keeps its place when nodes come and go, its own among them.
//!
//! Entries are not decoded: all lists of CSI have theirs in field 1 and the token in field 2.

use base::DataDirKey;
use bytes::{Bytes, BytesMut};
use prost::Message;
use tonic::Status;

/// Entries of a page at most: as many as a node's own pages have.
pub const MAX_PAGE: usize = 5000;

/// What a token before the key says.
const AFTER: &str = "after-";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    Begin,
    /// With this node, which knows the token, and then with those behind it.
    Within(DataDirKey, String),
    /// With the first node behind this one.
    After(DataDirKey),
}

impl Start {
    pub fn parse(token: &str) -> Result<Self, Status> {
        if token.is_empty() {
            return Ok(Start::Begin);
        }
        if let Some(key) = token.strip_prefix(AFTER).and_then(|key| key.parse().ok()) {
            return Ok(Start::After(key));
        }
        match DataDirKey::of(token) {
            Some(key) => Ok(Start::Within(key, token.to_owned())),
            None => {
                let token: String = token.chars().take(128).collect();
                Err(Status::aborted(format!(
                    "starting_token {token:?} was not issued by this router: list again without a token"
                )))
            }
        }
    }

    /// The token for the node with this key; none where the list is past it.
    pub fn at(&self, key: DataDirKey) -> Option<&str> {
        match self {
            Start::Within(at, token) if *at == key => Some(token),
            Start::Within(at, _) | Start::After(at) if key <= *at => None,
            _ => Some(""),
        }
    }
}

/// The token behind all entries of a node.
pub fn after(key: DataDirKey) -> String {
    format!("{AFTER}{key}")
}

/// The fields that all requests for lists have.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Asked {
    /// The most entries of a page; 0 where the caller sets no limit.
    #[prost(int32, tag = "1")]
    pub max_entries: i32,
    #[prost(string, tag = "2")]
    pub starting_token: String,
}

impl Asked {
    /// The same request as in `body` with these fields instead of its own: of a field that comes twice the last one counts.
    pub fn instead_of_those_in(&self, body: &Bytes) -> Bytes {
        let mut request = BytesMut::from(&body[..]);
        // Field by field: a message that is encoded as a whole leaves out fields that are 0 or empty.
        prost::encoding::int32::encode(1, &self.max_entries, &mut request);
        prost::encoding::string::encode(2, &self.starting_token, &mut request);
        request.freeze()
    }
}

/// The fields that all answers with lists have.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Page {
    /// Messages, as they came.
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub entries: Vec<Bytes>,
    /// Empty when there is no more.
    #[prost(string, tag = "2")]
    pub next_token: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u32) -> DataDirKey {
        format!("{number:08x}").parse().expect("a key")
    }

    #[test]
    fn a_token_keeps_its_place_while_nodes_come_and_go() {
        let id = format!("vol-00000005{}", "0".repeat(24));
        let within = Start::parse(&id).expect("an id");
        let after = Start::parse(&after(key(5))).expect("a token");
        let begin = Start::parse("").expect("none");
        for (number, at_within, at_after) in [
            (4, None, None),
            (5, Some(id.as_str()), None),
            // The node of the token may be gone, or be there: those behind it are listed from their begin.
            (6, Some(""), Some("")),
        ] {
            assert_eq!(within.at(key(number)), at_within);
            assert_eq!(after.at(key(number)), at_after);
            assert_eq!(begin.at(key(number)), Some(""));
        }
        for bad in ["0", "4294967295", "after-", "after-5", "vol-1", "after-0000000G", "\0"] {
            let status = Start::parse(bad).expect_err("no token");
            assert_eq!(status.code(), tonic::Code::Aborted, "{bad:?}");
        }
    }

    #[test]
    fn fields_are_replaced_and_all_others_kept() {
        let body = proto::ListSnapshotsRequest {
            max_entries: 7,
            starting_token: "x".into(),
            source_volume_id: "v".into(),
            ..Default::default()
        };
        for (max_entries, starting_token) in [(0, ""), (3, "y")] {
            let asked = Asked { max_entries, starting_token: starting_token.into() };
            let request = asked.instead_of_those_in(&body.encode_to_vec().into());
            let request = proto::ListSnapshotsRequest::decode(request).expect("a request");
            let expected = proto::ListSnapshotsRequest {
                max_entries,
                starting_token: starting_token.into(),
                ..body.clone()
            };
            assert_eq!(request, expected);
        }
    }

    #[test]
    fn entries_pass_undecoded() {
        let entry = |id: &str| proto::list_volumes_response::Entry {
            volume: Some(proto::Volume { volume_id: id.into(), ..Default::default() }),
            status: None,
        };
        let list = proto::ListVolumesResponse {
            entries: vec![entry("a"), entry(""), entry("c")],
            next_token: "t".into(),
        };
        let page = Page::decode(&list.encode_to_vec()[..]).expect("a page");
        assert_eq!((page.entries.len(), page.next_token.as_str()), (3, "t"));
        let again = proto::ListVolumesResponse::decode(&page.encode_to_vec()[..]).expect("a list");
        assert_eq!(again, list);
    }
}
