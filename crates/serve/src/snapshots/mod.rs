//! VolumeSnapshots and their contents, with the few fields that servers here use, and what follows from them: whether a
//! driver can be asked about a snapshot. Pure decisions, and one read of the API server.

use kube::{Api, Client};
use tonic::Status;

use crate::questions::ask;
pub use wire::{ApiContent, ApiSnapshot, keep_content, keep_snapshot};

mod wire;

/// The API group of snapshots.
pub const SNAPSHOTS: &str = "snapshot.storage.k8s.io";
/// The longest name of a namespace, and of a VolumeSnapshot, in bytes.
pub const NAMESPACE_MAX: usize = 63;
/// See [`NAMESPACE_MAX`].
pub const NAME_MAX: usize = 253;

/// Whether it is a DNS name in lower case (RFC 1123) of at most `max` bytes, as names of objects are. Names that clients send
/// become parts of paths of the Kubernetes API: others are refused first.
pub fn is_object_name(name: &str, max: usize) -> bool {
    let edge = |c: Option<u8>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    name.len() <= max
        && name.bytes().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, b'-' | b'.'))
        && edge(name.bytes().next())
        && edge(name.bytes().last())
}

/// A VolumeSnapshot's place.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SnapshotName {
    /// Its namespace.
    pub namespace: String,
    /// Its name there.
    pub name: String,
}

/// A VolumeSnapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// `metadata.uid`.
    pub uid: String,
    /// `spec.volumeSnapshotClassName`.
    pub class: Option<String>,
    /// `status.boundVolumeSnapshotContentName`.
    pub content: Option<String>,
    /// `status.readyToUse`.
    pub is_ready: bool,
}

/// A VolumeSnapshotContent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// `spec.driver`.
    pub driver: String,
    /// `spec.volumeSnapshotClassName`.
    pub class: Option<String>,
    /// `spec.volumeSnapshotRef`, without the uid.
    pub snapshot: SnapshotName,
    /// The uid in it; none before the two are bound.
    pub snapshot_uid: Option<String>,
    /// `spec.source.volumeHandle`; none where the snapshot was there before its content.
    pub volume: Option<String>,
    /// `status.snapshotHandle`, or `spec.source.snapshotHandle` while there is no status. So the handle belongs to the
    /// content's VolumeSnapshot before it is ready.
    pub handle: Option<String>,
    /// `status.readyToUse`.
    pub is_ready: bool,
    /// `status.creationTime`, in nanoseconds since 1970.
    pub created: Option<i64>,
}

/// A snapshot that the driver can be asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usable {
    /// Its CSI handle.
    pub handle: String,
    /// Its content's name.
    pub content: String,
    /// Its class, if it has one.
    pub class: Option<String>,
    /// Its volume's handle, if the objects tell.
    pub volume: Option<String>,
    /// When it was taken, if the objects tell: nanoseconds since 1970.
    pub created: Option<i64>,
}

/// Why a snapshot cannot be used. In all cases but the last the watch may only lag behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No such VolumeSnapshot.
    Missing,
    /// Bound to no content, or not ready.
    NotReady(&'static str),
    /// Its content does not exist.
    NoContent,
    /// Its content belongs to another VolumeSnapshot.
    BoundToAnother,
    /// It is another driver's.
    OtherDriver,
}

impl Refusal {
    /// The answer to the caller, who may read the VolumeSnapshot itself and perhaps nothing else.
    pub fn status(&self, name: &SnapshotName, driver: &str) -> Status {
        let SnapshotName { namespace, name } = name;
        match self {
            Refusal::Missing => {
                Status::not_found(format!("VolumeSnapshot {namespace}/{name} does not exist"))
            }
            Refusal::NotReady(why) => {
                Status::unavailable(format!("VolumeSnapshot {namespace}/{name} {why}: try again later"))
            }
            Refusal::NoContent => Status::not_found(format!(
                "the VolumeSnapshotContent of VolumeSnapshot {namespace}/{name} does not exist"
            )),
            Refusal::BoundToAnother => Status::failed_precondition(format!(
                "VolumeSnapshot {namespace}/{name} and its VolumeSnapshotContent are not bound to each other"
            )),
            Refusal::OtherDriver => Status::invalid_argument(format!(
                "VolumeSnapshot {namespace}/{name} was not taken by the CSI driver {driver}"
            )),
        }
    }
}

/// Whether the snapshot can be used: bound to its content and the content to it, of this driver, and ready.
pub fn usable(
    name: &SnapshotName,
    snapshot: Option<Snapshot>,
    content: Option<Content>,
    driver: &str,
) -> Result<Usable, Refusal> {
    let snapshot = snapshot.ok_or(Refusal::Missing)?;
    let content_name =
        snapshot.content.ok_or(Refusal::NotReady("is not bound to a VolumeSnapshotContent yet"))?;
    let content = content.ok_or(Refusal::NoContent)?;
    let is_its_own = content.snapshot == *name && content.snapshot_uid.is_none_or(|uid| uid == snapshot.uid);
    if !is_its_own {
        return Err(Refusal::BoundToAnother);
    }
    if content.driver != driver {
        return Err(Refusal::OtherDriver);
    }
    if !snapshot.is_ready || !content.is_ready {
        return Err(Refusal::NotReady("is not ready to use yet"));
    }
    let handle = content.handle.ok_or(Refusal::NotReady("has no snapshot handle yet"))?;
    Ok(Usable {
        handle,
        content: content_name,
        class: snapshot.class.or(content.class),
        volume: content.volume,
        created: content.created,
    })
}

/// Whether base and target are of one volume and in order, as far as their objects tell. The driver has the last word.
pub fn in_order(base: &Content, target: &Usable) -> Result<(), Status> {
    if let (Some(base), Some(target)) = (&base.volume, &target.volume)
        && base != target
    {
        return Err(Status::invalid_argument("base and target are snapshots of different volumes"));
    }
    if let (Some(base), Some(target)) = (base.created, target.created)
        && base > target
    {
        return Err(Status::invalid_argument("the base is newer than the target: exchange them"));
    }
    Ok(())
}

/// A snapshot and its content from the API server itself. `seconds` is the histogram of [`ask`].
pub async fn fetch(
    seconds: &'static str,
    client: &Client,
    name: &SnapshotName,
) -> kube::Result<(Option<Snapshot>, Option<Content>)> {
    let fetch = async {
        let snapshots: Api<ApiSnapshot> = Api::namespaced(client.clone(), &name.namespace);
        let snapshot = snapshots.get_opt(&name.name).await?.map(|snapshot| keep_snapshot(snapshot).1);
        let content = match snapshot.as_ref().and_then(|snapshot| snapshot.content.as_ref()) {
            None => None,
            Some(content) => {
                let contents: Api<ApiContent> = Api::all(client.clone());
                contents.get_opt(content).await?.map(|content| keep_content(content).1)
            }
        };
        Ok((snapshot, content))
    };
    ask(seconds, "VolumeSnapshot", fetch).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    fn name() -> SnapshotName {
        SnapshotName { namespace: "shop".into(), name: "monday".into() }
    }

    fn snapshot() -> Snapshot {
        Snapshot { uid: "u1".into(), class: Some("fast".into()), content: Some("c1".into()), is_ready: true }
    }

    fn content() -> Content {
        Content {
            driver: "ours".into(),
            class: None,
            snapshot: name(),
            snapshot_uid: Some("u1".into()),
            volume: Some("v1".into()),
            handle: Some("h1".into()),
            is_ready: true,
            created: Some(5),
        }
    }

    #[test]
    fn names_of_objects_are_dns_names() {
        for good in ["a", "0", "a-b.c", "monday"] {
            assert!(is_object_name(good, NAME_MAX), "{good}");
        }
        for bad in ["", "A", "-a", "a-", ".a", "a.", "a/b", "a b", "ä", "a%2f", "..", "a\0"] {
            assert!(!is_object_name(bad, NAME_MAX), "{bad:?}");
        }
        assert!(is_object_name(&"a".repeat(NAMESPACE_MAX), NAMESPACE_MAX));
        assert!(!is_object_name(&"a".repeat(NAMESPACE_MAX + 1), NAMESPACE_MAX));
    }

    #[test]
    fn a_snapshot_is_used_only_where_everything_fits() {
        let judge = |change: fn(&mut Snapshot, &mut Content)| {
            let (mut snapshot, mut content) = (snapshot(), content());
            change(&mut snapshot, &mut content);
            usable(&name(), Some(snapshot), Some(content), "ours").map(|usable| usable.handle)
        };
        assert_eq!(judge(|_, _| {}), Ok("h1".into()));
        assert_eq!(judge(|_, content| content.snapshot_uid = None), Ok("h1".into()));
        let not_ready = |result: Result<String, Refusal>| matches!(result, Err(Refusal::NotReady(_)));
        assert!(not_ready(judge(|snapshot, _| snapshot.content = None)));
        assert!(not_ready(judge(|snapshot, _| snapshot.is_ready = false)));
        assert!(not_ready(judge(|_, content| content.is_ready = false)));
        assert!(not_ready(judge(|_, content| content.handle = None)));
        for change in [
            |_: &mut Snapshot, content: &mut Content| content.snapshot.name = "other".into(),
            |_: &mut Snapshot, content: &mut Content| content.snapshot.namespace = "other".into(),
            |_: &mut Snapshot, content: &mut Content| content.snapshot_uid = Some("u2".into()),
        ] {
            assert_eq!(judge(change), Err(Refusal::BoundToAnother));
        }
        assert_eq!(judge(|_, content| content.driver = "theirs".into()), Err(Refusal::OtherDriver));
        assert_eq!(usable(&name(), None, None, "ours"), Err(Refusal::Missing));
        assert_eq!(usable(&name(), Some(snapshot()), None, "ours"), Err(Refusal::NoContent));
    }

    #[test]
    fn base_and_target_are_compared_where_both_tell() {
        let target = usable(&name(), Some(snapshot()), Some(content()), "ours").expect("usable");
        let base =
            |volume: Option<&str>, created| Content { volume: volume.map(Into::into), created, ..content() };
        for (volume, created, fits) in [
            (Some("v1"), Some(5), true),
            (Some("v1"), Some(4), true),
            (Some("v1"), Some(6), false),
            (Some("v2"), Some(4), false),
            (None, Some(4), true),
            (Some("v1"), None, true),
            (None, Some(6), false),
        ] {
            let answer = in_order(&base(volume, created), &target);
            assert_eq!(answer.is_ok(), fits, "{volume:?} {created:?}");
            assert!(answer.is_ok() || answer.unwrap_err().code() == Code::InvalidArgument);
        }
    }

    #[test]
    fn objects_without_a_status_are_neither_ready_nor_bound() {
        let object = serde_json::json!({"metadata": {"name": "s", "namespace": "n", "uid": "u"}, "spec": {"source": {}}});
        let (name, snapshot) = keep_snapshot(serde_json::from_value(object).expect("a snapshot"));
        assert_eq!(name, SnapshotName { namespace: "n".into(), name: "s".into() });
        assert_eq!(snapshot, Snapshot { uid: "u".into(), ..Snapshot::default() });
        let object = serde_json::json!({
            "metadata": {"name": "c"},
            "spec": {"driver": "d", "volumeSnapshotRef": {"name": "s", "namespace": "n"}, "source": {"volumeHandle": "v"}},
        });
        let (_, content) = keep_content(serde_json::from_value(object).expect("a content"));
        assert_eq!((content.handle, content.is_ready, content.volume.as_deref()), (None, false, Some("v")));
        let object = serde_json::json!({
            "metadata": {"name": "c"},
            "spec": {"driver": "d", "volumeSnapshotRef": {"name": "s", "namespace": "n"}, "source": {"snapshotHandle": "h"}},
        });
        let (_, content) = keep_content(serde_json::from_value(object).expect("a content"));
        assert_eq!((content.handle.as_deref(), content.is_ready, content.volume), (Some("h"), false, None));
    }
}
