//! From the objects of a snapshot to what the driver is asked: pure decisions, no API call.

use tonic::Status;

use crate::objects::{Class, Content, Snapshot, SnapshotName};

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

/// Where the secrets of a class are, if it names any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretName {
    /// Its namespace.
    pub namespace: String,
    /// Its name there.
    pub name: String,
}

/// The parameters that name a snapshotter's secret, as external-snapshotter reads them.
const SECRET_NAME: &str = "csi.storage.k8s.io/snapshotter-secret-name";
const SECRET_NAMESPACE: &str = "csi.storage.k8s.io/snapshotter-secret-namespace";

/// The secret that a class names for a snapshot; `None` where it names none.
pub fn secret_of(
    class: &Class,
    snapshot: &SnapshotName,
    content: &str,
) -> Result<Option<SecretName>, Status> {
    let (name, namespace) = match (class.get(SECRET_NAME), class.get(SECRET_NAMESPACE)) {
        (None, None) => return Ok(None),
        (Some(name), Some(namespace)) => (name, namespace),
        _ => {
            return Err(Status::failed_precondition(format!(
                "the VolumeSnapshotClass must have both {SECRET_NAME} and {SECRET_NAMESPACE}, or neither"
            )));
        }
    };
    let known = [
        ("${volumesnapshotcontent.name}", content),
        ("${volumesnapshot.namespace}", &snapshot.namespace),
        ("${volumesnapshot.name}", &snapshot.name),
    ];
    Ok(Some(SecretName {
        // The namespace must not depend on a name that a tenant chooses freely.
        namespace: fill(namespace, &known[..2], SECRET_NAMESPACE)?,
        name: fill(name, &known, SECRET_NAME)?,
    }))
}

/// Replaces what stands in `${}`, once: what is put in is not looked through again.
fn fill(template: &str, known: &[(&str, &str)], parameter: &str) -> Result<String, Status> {
    let mut filled = String::new();
    let mut rest = template;
    while let Some(at) = rest.find("${") {
        filled.push_str(&rest[..at]);
        let Some((token, value)) = known.iter().find(|(token, _)| rest[at..].starts_with(token)) else {
            return Err(Status::failed_precondition(format!(
                "{parameter} of the VolumeSnapshotClass holds a template that is not known"
            )));
        };
        filled.push_str(value);
        rest = &rest[at + token.len()..];
    }
    filled.push_str(rest);
    Ok(filled)
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
    fn secrets_are_named_by_templates() {
        let secret = |name: Option<&str>, namespace: Option<&str>| {
            let mut class = Class::new();
            name.map(|name| class.insert(SECRET_NAME.into(), name.into()));
            namespace.map(|namespace| class.insert(SECRET_NAMESPACE.into(), namespace.into()));
            secret_of(&class, &super::tests::name(), "c1")
                .map(|secret| secret.map(|secret| format!("{}/{}", secret.namespace, secret.name)))
                .map_err(|status| status.code())
        };
        assert_eq!(secret(None, None), Ok(None));
        assert_eq!(secret(Some("s"), Some("n")), Ok(Some("n/s".into())));
        let all = "a-${volumesnapshot.name}-${volumesnapshotcontent.name}-${volumesnapshot.namespace}";
        assert_eq!(
            secret(Some(all), Some("${volumesnapshot.namespace}")),
            Ok(Some("shop/a-monday-c1-shop".into()))
        );
        for (name, namespace) in [
            (Some("s"), None),
            (None, Some("n")),
            (Some("s"), Some("${volumesnapshot.name}")),
            (Some("${pvc.name}"), Some("n")),
            (Some("${volumesnapshot.name"), Some("n")),
        ] {
            assert_eq!(secret(name, namespace), Err(Code::FailedPrecondition), "{name:?} {namespace:?}");
        }
    }
}
