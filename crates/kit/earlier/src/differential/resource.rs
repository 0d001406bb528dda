//! The DifferentialSnapshot object, and from its names to the driver's handles.

use std::collections::BTreeMap;

use k8s_openapi::NamespaceResourceScope;
use kube::Client;
use serde::Deserialize;
use serve::object;
use serve::snapshots::{self, Refusal, SnapshotName};
use tonic::{Code, Status};

use crate::server::METRICS;

pub const GROUP: &str = "differential.cbt.storage.k8s.io";
pub const VERSION: &str = "v1alpha1";
pub const PLURAL: &str = "differentialsnapshots";

object!(DifferentialSnapshot, "DifferentialSnapshot", PLURAL, VERSION, GROUP, NamespaceResourceScope, {
    spec: Spec,
    status: Option<State>,
});

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    /// Without it, all that the target holds.
    pub base_volume_snapshot_name: Option<String>,
    pub target_volume_snapshot_name: String,
    pub mode: Option<String>,
    pub start_offset: Option<String>,
    /// For the driver.
    pub parameters: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct State {
    /// `url-ready` or `failed`; none while that is open.
    pub state: Option<String>,
    pub error: Option<String>,
    #[serde(rename = "callbackURL")]
    pub callback_url: Option<String>,
}

impl Spec {
    pub fn base(&self) -> Option<&str> {
        self.base_volume_snapshot_name.as_deref().filter(|name| !name.is_empty())
    }

    /// Both VolumeSnapshots, where there are two.
    pub fn snapshots(&self, namespace: &str) -> impl Iterator<Item = SnapshotName> {
        let names = self.base().into_iter().chain([self.target_volume_snapshot_name.as_str()]);
        let name = |name: &str| SnapshotName { namespace: namespace.to_owned(), name: name.to_owned() };
        names.map(name).collect::<Vec<_>>().into_iter()
    }
}

/// The driver's handles of base and target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    pub base: Option<String>,
    pub target: String,
}

/// Why there are none.
#[derive(Debug)]
pub enum Unresolved {
    /// The target was taken by another driver, whose controller sees to it.
    NotOurs(Status),
    /// That may change by itself.
    NotYet(Status),
    /// A person has to change something.
    Never(Status),
    /// The API server has not answered.
    Unknown(kube::Error),
}

pub async fn resolve(
    client: &Client,
    driver: &str,
    namespace: &str,
    spec: &Spec,
) -> Result<Pair, Unresolved> {
    if spec.target_volume_snapshot_name.is_empty() {
        return Err(Unresolved::Never(Status::not_found("targetVolumeSnapshotName is empty")));
    }
    let find = async |name: &str| {
        let name = SnapshotName { namespace: namespace.to_owned(), name: name.to_owned() };
        let found = snapshots::fetch(METRICS.seconds, client, &name).await.map_err(Unresolved::Unknown)?;
        let (snapshot, content) = found;
        let usable = snapshots::usable(&name, snapshot, content.clone(), driver);
        Ok::<_, Unresolved>((usable.map_err(|refusal| (refusal.status(&name, driver), refusal)), content))
    };
    let (target, _) = find(&spec.target_volume_snapshot_name).await?;
    let target = match target {
        Ok(target) => target,
        Err((status, Refusal::OtherDriver)) => return Err(Unresolved::NotOurs(status)),
        Err((status, _)) => return Err(refused(status)),
    };
    let base = match spec.base() {
        None => None,
        Some(name) => {
            let (base, content) = find(name).await?;
            let base = base.map_err(|(status, _)| refused(status))?;
            if let Some(content) = &content {
                snapshots::in_order(content, &target).map_err(Unresolved::Never)?;
            }
            Some(base.handle)
        }
    };
    Ok(Pair { base, target: target.handle })
}

fn refused(status: Status) -> Unresolved {
    match status.code() {
        Code::Unavailable => Unresolved::NotYet(status),
        _ => Unresolved::Never(status),
    }
}
