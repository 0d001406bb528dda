//! The VolumeSnapshotDelta as the third design writes it: read, checked, and answered. Pure.

use axum::http::StatusCode;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use serve::snapshots::{NAME_MAX, is_object_name};

use super::wire::Block;
use crate::refusal::Refusal;

pub const GROUP: &str = "cbt.storage.k8s.io";
pub const VERSION: &str = "v1alpha1";
pub const KIND: &str = "VolumeSnapshotDelta";
pub const PLURAL: &str = "volumesnapshotdeltas";

/// What a user sends.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Delta {
    #[serde(default)]
    pub api_version: String,
    #[serde(default)]
    pub kind: String,
    #[serde(default)]
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub spec: Spec,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    /// Without it, all that the target holds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base_volume_snapshot_name: Option<String>,
    pub target_volume_snapshot_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// For the driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume_snapshot_delta_secret_ref: Option<SecretRef>,
    /// Maximum number of entries; 0 is the server's own maximum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Index of the first block that counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SecretRef {
    pub name: String,
    pub namespace: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    pub state: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub limit: u64,
    pub offset: u64,
    /// Index of the block to continue from.
    #[serde(rename = "continue", skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
    pub changed_blocks: Vec<Entry>,
}

/// Everything is listed.
pub const COMPLETED: u8 = 0;
/// There is more.
pub const CONTINUE: u8 = 1;
/// `error` says why there is no answer.
pub const FAILED: u8 = 2;

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// Its index: the byte where it begins, divided by its size.
    offset: u64,
    block_size_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_token: Option<DataToken>,
}

/// By which the block's data is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct DataToken {
    token: String,
    issuance_time: String,
    ttl: String,
}

impl Entry {
    /// `None` where the block is not valid: it does not begin at a multiple of its size.
    pub fn of(block: Block) -> Option<Self> {
        let Block { offset, block_size_bytes, token } = block;
        let offset =
            offset.checked_div(block_size_bytes).filter(|index| index * block_size_bytes == offset)?;
        let data_token = token.map(|token| DataToken {
            token: token.token,
            issuance_time: token.issuance_time,
            ttl: go_duration(token.ttl_seconds.unsigned_abs()),
        });
        Some(Entry { offset, block_size_bytes, data_token })
    }
}

/// A length of time as Go writes it, such as `3h0m0s`.
fn go_duration(seconds: u32) -> String {
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes) {
        (0, 0) => format!("{seconds}s"),
        (0, _) => format!("{minutes}m{seconds}s"),
        _ => format!("{hours}h{minutes}m{seconds}s"),
    }
}

/// Reads an object that was sent to a namespace, and the names of fields that it has and the kind has not.
pub fn read(object: Value, namespace: &str) -> Result<(Delta, Vec<String>), Refusal> {
    let unknown = unknown_fields(&object);
    let delta: Delta = serde_json::from_value(object).map_err(|error| {
        Refusal::bad_request(format!(
            "{KIND} in version \"{VERSION}\" cannot be handled as a {KIND}: {error}"
        ))
    })?;
    let (group_version, kind) = (format!("{GROUP}/{VERSION}"), &delta.kind);
    if delta.api_version != group_version || kind != KIND {
        return Err(Refusal::bad_request(format!(
            "the object is a {kind:?} of {:?}: send a {KIND} of {group_version}",
            delta.api_version
        )));
    }
    if delta.metadata.namespace.as_deref().is_some_and(|given| given != namespace) {
        return Err(Refusal::bad_request(
            "the namespace of the provided object does not match the namespace sent on the request",
        ));
    }
    let causes = check(&delta);
    match causes.is_empty() {
        true => Ok((delta, unknown)),
        false => Err(invalid(&delta.metadata, causes)),
    }
}

/// What is wrong with a field: the field, the reason in Kubernetes' words, and the message.
pub type Cause = (&'static str, &'static str, String);

/// The refusal of an object with these faults.
pub fn invalid(metadata: &ObjectMeta, causes: Vec<Cause>) -> Refusal {
    let name = metadata.name.as_deref().unwrap_or_default();
    let all: Vec<_> = causes.iter().map(|(field, _, message)| format!("{field}: {message}")).collect();
    let causes: Vec<_> = causes
        .iter()
        .map(|(field, reason, message)| json!({"reason": reason, "message": message, "field": field}))
        .collect();
    Refusal {
        details: json!({"group": GROUP, "kind": KIND, "name": name, "causes": causes}),
        ..Refusal::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "Invalid",
            format!("{KIND}.{GROUP} {name:?} is invalid: {}", all.join(", ")),
        )
    }
}

fn check(delta: &Delta) -> Vec<Cause> {
    let mut causes = Vec::new();
    let mut name = |field, name: Option<&str>, is_required: bool| match name {
        None | Some("") if is_required => {
            causes.push((field, "FieldValueRequired", "Required value".to_owned()));
        }
        Some(name) if !is_object_name(name, NAME_MAX) => {
            let message = format!("Invalid value: {name:?}: must be a DNS name in lower case (RFC 1123)");
            causes.push((field, "FieldValueInvalid", message));
        }
        _ => {}
    };
    let spec = &delta.spec;
    name("metadata.name", delta.metadata.name.as_deref(), false);
    name("spec.targetVolumeSnapshotName", Some(&spec.target_volume_snapshot_name), true);
    name("spec.baseVolumeSnapshotName", spec.base_volume_snapshot_name.as_deref(), false);
    if let Some(secret) = &spec.volume_snapshot_delta_secret_ref {
        name("spec.volumeSnapshotDeltaSecretRef.name", Some(&secret.name), true);
        name("spec.volumeSnapshotDeltaSecretRef.namespace", Some(&secret.namespace), true);
    }
    if let Some(mode) = spec.mode.as_deref().filter(|mode| *mode != "block") {
        let message = format!("Unsupported value: {mode:?}: supported values: \"block\"");
        causes.push(("spec.mode", "FieldValueNotSupported", message));
    }
    causes
}

/// Fields that the kind does not have. Those of the metadata are the cluster's business.
fn unknown_fields(object: &Value) -> Vec<String> {
    let known: [(&str, &[&str]); 3] = [
        ("", &["apiVersion", "kind", "metadata", "spec", "status"]),
        (
            "/spec",
            &[
                "baseVolumeSnapshotName",
                "targetVolumeSnapshotName",
                "mode",
                "volumeSnapshotDeltaSecretRef",
                "limit",
                "offset",
            ],
        ),
        ("/spec/volumeSnapshotDeltaSecretRef", &["name", "namespace"]),
    ];
    let mut unknown = Vec::new();
    for (at, known) in known {
        let Some(fields) = object.pointer(at).and_then(Value::as_object) else { continue };
        let path = at.trim_start_matches('/').replace('/', ".");
        let dot = if path.is_empty() { "" } else { "." };
        let fields = fields.keys().filter(|field| !known.contains(&field.as_str()));
        unknown.extend(fields.map(|field| format!("unknown field \"{path}{dot}{field}\"")));
    }
    unknown
}

pub fn answer(delta: Delta, namespace: &str, state: &State) -> Value {
    let mut metadata = delta.metadata;
    metadata.namespace = Some(namespace.to_owned());
    let mut spec = delta.spec;
    spec.mode.get_or_insert_with(|| "block".into());
    json!({
        "apiVersion": format!("{GROUP}/{VERSION}"), "kind": KIND, "metadata": metadata, "spec": spec,
        "status": state,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deltas::wire::Token;

    fn object() -> Value {
        json!({
            "apiVersion": "cbt.storage.k8s.io/v1alpha1", "kind": "VolumeSnapshotDelta",
            "metadata": {"name": "walk"},
            "spec": {"baseVolumeSnapshotName": "a", "targetVolumeSnapshotName": "b", "mode": "block", "limit": 7, "offset": 3},
        })
    }

    #[test]
    fn objects_are_checked() {
        let read = |at: &str, value: Value| {
            let mut object = object();
            let (parent, field) = at.rsplit_once('/').expect("a path");
            object.pointer_mut(parent).expect("a parent")[field] = value;
            super::read(object, "shop").map(|(_, unknown)| unknown)
        };
        for (at, value) in [
            ("/metadata/namespace", json!("shop")),
            ("/metadata/name", json!(null)),
            ("/spec/baseVolumeSnapshotName", json!(null)),
            ("/spec/mode", json!(null)),
            ("/spec/limit", json!(u64::MAX)),
            ("/spec/volumeSnapshotDeltaSecretRef", json!({"name": "s", "namespace": "shop"})),
            ("/status", json!({"state": 7})),
        ] {
            assert_eq!(read(at, value.clone()), Ok(vec![]), "{at} {value}");
        }
        for (at, value, code, named) in [
            ("/apiVersion", json!("cbt.storage.k8s.io/v1beta1"), 400, "v1beta1"),
            ("/kind", json!("Pod"), 400, "\"Pod\""),
            ("/metadata/namespace", json!("other"), 400, "does not match"),
            ("/metadata/name", json!("A"), 422, "metadata.name"),
            (
                "/spec/targetVolumeSnapshotName",
                json!(""),
                422,
                "spec.targetVolumeSnapshotName: Required value",
            ),
            ("/spec/targetVolumeSnapshotName", json!("../x"), 422, "\"../x\""),
            ("/spec/targetVolumeSnapshotName", json!(7), 400, "7"),
            ("/spec/baseVolumeSnapshotName", json!("X"), 422, "spec.baseVolumeSnapshotName"),
            ("/spec/mode", json!("file"), 422, "supported values: \"block\""),
            ("/spec/limit", json!(-1), 400, "-1"),
            ("/spec/offset", json!("1"), 400, "\"1\""),
            ("/spec/volumeSnapshotDeltaSecretRef", json!({"name": "s"}), 422, "SecretRef.namespace"),
        ] {
            let refused = read(at, value.clone()).expect_err(at);
            assert_eq!(refused.code.as_u16(), code, "{at} {value}: {}", refused.message);
            assert!(refused.message.contains(named), "{at} {value}: {}", refused.message);
        }
        assert_eq!(read("/spec/speed", json!(1)), Ok(vec!["unknown field \"spec.speed\"".into()]));
        assert_eq!(read("/extra", json!(1)), Ok(vec!["unknown field \"extra\"".into()]));
    }

    #[test]
    fn an_answer_has_the_designs_names() {
        let (delta, _) = read(object(), "shop").expect("an object");
        let token =
            Token { token: "t".into(), issuance_time: "2026-01-02T03:04:05Z".into(), ttl_seconds: 10_800 };
        let block = |offset, token| Block { offset, block_size_bytes: 4096, token };
        let state = State {
            state: CONTINUE,
            limit: 7,
            offset: 3,
            next: Some(9),
            changed_blocks: [block(12_288, Some(token)), block(16_384, None)]
                .into_iter()
                .filter_map(Entry::of)
                .collect(),
            ..State::default()
        };
        let answer = answer(delta, "shop", &state);
        assert_eq!(answer["metadata"], json!({"name": "walk", "namespace": "shop"}));
        assert_eq!(answer["spec"], object()["spec"]);
        let expected = json!({
            "state": 1, "limit": 7, "offset": 3, "continue": 9,
            "changedBlocks": [
                {"offset": 3, "blockSizeBytes": 4096, "dataToken": {
                    "token": "t", "issuanceTime": "2026-01-02T03:04:05Z", "ttl": "3h0m0s",
                }},
                {"offset": 4, "blockSizeBytes": 4096},
            ],
        });
        assert_eq!(answer["status"], expected);
        for wrong in [Block { offset: 1, ..block(0, None) }, Block { block_size_bytes: 0, ..block(0, None) }]
        {
            assert_eq!(Entry::of(wrong), None);
        }
    }

    #[test]
    fn durations_are_gos() {
        for (seconds, text) in [(0, "0s"), (59, "59s"), (300, "5m0s"), (3600, "1h0m0s"), (90_061, "25h1m1s")]
        {
            assert_eq!(go_duration(seconds), text);
        }
    }
}
