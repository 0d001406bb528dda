//! From the class of a snapshot to the secret that the driver is given: pure decisions, no API call.

use tonic::Status;

use crate::objects::{Class, SnapshotName};

/// Where the secrets of a class are, if it names any.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretName {
    pub namespace: String,
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
