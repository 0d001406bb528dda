//! What there is in the cluster to be tested: two VolumeSnapshots of one volume, and the SnapshotMetadataService of their
//! driver.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::api::{Api, SNAPSHOTS, is_name};
use super::front::Front;

/// A VolumeSnapshot and what its content says.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub name: String,
    /// Its CSI id.
    pub handle: String,
    pub driver: String,
    volume: Option<String>,
    created: Option<i64>,
}

/// What is there in the cluster to be tested.
pub(super) struct Found {
    pub base: Snapshot,
    pub target: Snapshot,
    pub front: Front,
}

fn text(object: &Value, at: &str) -> Option<String> {
    object.pointer(at).and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
}

impl Found {
    /// Two snapshots, and the service of their driver.
    pub async fn find(api: &Api, namespace: &str, given: Option<[&str; 2]>) -> Result<Self, String> {
        if !is_name(namespace) {
            return Err(format!("{namespace:?} is not the name of a namespace"));
        }
        let names = match given {
            Some(names) => names.map(str::to_owned),
            None => newest(api, namespace).await?,
        };
        let one = Snapshot::read(api, namespace, &names[0]).await?;
        let two = Snapshot::read(api, namespace, &names[1]).await?;
        if one.driver != two.driver {
            return Err(format!(
                "{} is of the driver {}, and {} of {}",
                one.name, one.driver, two.name, two.driver
            ));
        }
        if let (Some(a), Some(b)) = (&one.volume, &two.volume)
            && a != b
        {
            return Err(format!(
                "{} and {} are snapshots of two volumes: name two of one",
                one.name, two.name
            ));
        }
        let is_turned = matches!((one.created, two.created), (Some(one), Some(two)) if one > two);
        let (base, target) = if is_turned { (two, one) } else { (one, two) };
        let driver = &base.driver;
        if !is_name(driver) {
            return Err(format!("{driver:?} is not the name of a driver"));
        }
        let path = format!("/apis/cbt.storage.k8s.io/v1beta1/snapshotmetadataservices/{driver}");
        let object = api.find(&path).await?.ok_or_else(|| {
            format!("there is no SnapshotMetadataService {driver}, by which clients find the service of the driver {driver}")
        })?;
        Ok(Found { base, target, front: Front::of(&object) })
    }
}

/// The newest two of one claim that are ready: of the claim that has the newest.
async fn newest(api: &Api, namespace: &str) -> Result<[String; 2], String> {
    let list = api.get(&format!("{SNAPSHOTS}/namespaces/{namespace}/volumesnapshots")).await?;
    let mut of_claims: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for snapshot in list["items"].as_array().into_iter().flatten() {
        let claim = text(snapshot, "/spec/source/persistentVolumeClaimName");
        let is_ready = snapshot.pointer("/status/readyToUse") == Some(&json!(true));
        let created =
            text(snapshot, "/status/creationTime").or_else(|| text(snapshot, "/metadata/creationTimestamp"));
        if let (Some(claim), true, Some(created), Some(name)) =
            (claim, is_ready, created, text(snapshot, "/metadata/name"))
        {
            of_claims.entry(claim).or_default().push((created, name));
        }
    }
    for snapshots in of_claims.values_mut() {
        snapshots.sort();
    }
    let newest = of_claims
        .into_values()
        .filter(|snapshots| snapshots.len() > 1)
        .max_by(|a, b| a.last().cmp(&b.last()));
    match newest.as_deref() {
        Some([.., (_, one), (_, two)]) => Ok([one.clone(), two.clone()]),
        _ => Err(format!(
            "the namespace {namespace} has no two VolumeSnapshots of one claim that are ready: make them, with changes \
             between them, or name another --namespace or two of them with --snapshot"
        )),
    }
}

impl Snapshot {
    async fn read(api: &Api, namespace: &str, name: &str) -> Result<Self, String> {
        let title = format!("VolumeSnapshot {namespace}/{name}");
        if !is_name(name) {
            return Err(format!("{name:?} is not the name of a VolumeSnapshot"));
        }
        let snapshot =
            api.find(&format!("{SNAPSHOTS}/namespaces/{namespace}/volumesnapshots/{name}")).await?;
        let snapshot = snapshot.ok_or_else(|| format!("{title} does not exist"))?;
        let content =
            text(&snapshot, "/status/boundVolumeSnapshotContentName").filter(|content| is_name(content));
        let content = content.ok_or_else(|| format!("{title} is not bound to a VolumeSnapshotContent"))?;
        if snapshot.pointer("/status/readyToUse") != Some(&json!(true)) {
            return Err(format!("{title} is not ready to use"));
        }
        let content = api.find(&format!("{SNAPSHOTS}/volumesnapshotcontents/{content}")).await?;
        let content =
            content.ok_or_else(|| format!("the VolumeSnapshotContent of {title} does not exist"))?;
        let missing = |field: &str| format!("the VolumeSnapshotContent of {title} has no {field}");
        Ok(Snapshot {
            name: name.to_owned(),
            handle: text(&content, "/status/snapshotHandle")
                .ok_or_else(|| missing("status.snapshotHandle"))?,
            driver: text(&content, "/spec/driver").ok_or_else(|| missing("spec.driver"))?,
            volume: text(&content, "/spec/source/volumeHandle"),
            created: content.pointer("/status/creationTime").and_then(Value::as_i64),
        })
    }
}
