//! `cbt-lab conformance --kubernetes`: the same cases through a SnapshotMetadata service in a cluster, and those that are about
//! tokens, rights, namespaces, the SnapshotMetadataService object and TLS. It knows the Kubernetes API, and nothing of any
//! service or driver.
//!
//! - `table.rs` is the table of cases; `access.rs` and `front.rs` hold the tests that only this side has.
//! - `found.rs` finds two snapshots and the service in front of their driver.
//! - `cluster.rs` is what they ask: that service, in the names of callers with different rights.
//! - `api.rs` calls the API server, and takes away again what was made there.
//!
//! The content of the snapshots is not known, since they are the user's. So an answer is compared with the first one. Every object
//! in the cluster is listed by its path before the call that makes it, and deleted by that list.

mod access;
mod api;
mod cluster;
mod found;
mod front;
mod table;
mod tls;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;

use super::case::Case;
use super::compare::Before;
use super::report::{Choice, KUBERNETES, Report};
use super::run::run as run_all;
use super::signals;
use crate::{Done, Output};
use api::Api;
use cluster::Cluster;
use found::Found;

/// Where the cluster is and what is asked about.
#[derive(Debug, Args)]
pub(super) struct InCluster {
    /// Test a SnapshotMetadata service in a cluster instead of a driver's socket. It is found as backup tools find it: by
    /// two VolumeSnapshots and the SnapshotMetadataService of their driver. Makes a namespace with accounts, and roles for
    /// them, and takes them away. Needs no root.
    #[arg(
        long,
        conflicts_with_all = ["controller_endpoint", "parameter", "snapshot_parameter", "secrets", "staging_dir", "target_dir", "jobs"]
    )]
    pub kubernetes: bool,
    /// Credentials for the cluster: a kubeconfig with the rights of an administrator. Default: as kubectl finds it, or in a pod
    /// its service account.
    #[arg(long, value_name = "FILE", requires = "kubernetes")]
    kubeconfig: Option<PathBuf>,
    /// Namespace of the VolumeSnapshots. Default: the kubeconfig's.
    #[arg(long, value_name = "NAME", requires = "kubernetes")]
    namespace: Option<String>,
    /// VolumeSnapshot; given twice, for two of one volume, with changes between them. Default: the newest two of one claim that
    /// are ready.
    #[arg(long, value_name = "NAME", requires = "kubernetes")]
    snapshot: Vec<String>,
    /// File with a token for the service that has expired, for the case about it: none can be made that expires within ten
    /// minutes.
    #[arg(long, value_name = "FILE", requires = "kubernetes")]
    expired_token: Option<PathBuf>,
}

pub(super) fn run(arguments: &super::Arguments) -> Done {
    super::run_cases(arguments, &table::cases(), test)
}

/// Runs the cases. An error: they could not be.
async fn test(all: &super::Arguments, cases: &[&Case<Cluster>]) -> Result<Done, String> {
    let arguments = &all.kubernetes;
    if cases.is_empty() {
        return Err("no case is chosen: --list prints their names".into());
    }
    let before = all.compare.as_deref().map(Before::read).transpose()?;
    let expired = arguments.expired_token.as_ref().map(|path| {
        std::fs::read_to_string(path).map_err(|error| format!("--expired-token {}: {error}", path.display()))
    });
    let expired = expired.transpose()?.map(|token| token.trim().to_owned());
    let given = match &arguments.snapshot[..] {
        [] => None,
        [one, two] if one != two => Some([one.as_str(), two.as_str()]),
        _ => return Err("--snapshot names two different VolumeSnapshots: give it twice".into()),
    };
    let mut signals = signals().map_err(|error| format!("listen to signals: {error}"))?;
    let started = Instant::now();
    let (api, default_namespace) = Api::connect(arguments.kubeconfig.as_deref()).await?;
    let namespace = arguments.namespace.clone().unwrap_or(default_namespace);
    let found = tokio::select! {
        found = tokio::time::timeout(all.timeout, Found::find(&api, &namespace, given)) => {
            found.map_err(|_| format!("no VolumeSnapshots were found within {} s", all.timeout.as_secs_f64()))??
        }
        _ = signals.wait_for(|count| *count > 0) => return Ok(Ok(ExitCode::from(shell::INTERRUPTED))),
    };
    let choice = Choice { level: all.level, by_name: all.focus.is_some() || all.skip.is_some() };
    let place = format!("{} ({}, {})", found.front.address, found.base.name, found.target.name);
    let driver = found.base.driver.clone();
    let mut cluster = Cluster::new(api, namespace, found, expired);
    let prepared = tokio::select! {
        prepared = tokio::time::timeout(all.timeout, cluster.make()) => {
            prepared.unwrap_or_else(|_| Err(format!("no end within {} s", all.timeout.as_secs_f64())))
        }
        _ = signals.wait_for(|count| *count > 0) => Err("interrupted".into()),
    };
    if let Err(error) = prepared {
        let left = cluster.api.delete_all(all.timeout).await;
        let left = left.iter().map(|left| format!("\ncbt-lab: left behind: {left}")).collect::<String>();
        return match *signals.borrow() > 0 && left.is_empty() {
            true => Ok(Ok(ExitCode::from(shell::INTERRUPTED))),
            false => Err(format!("prepare accounts in the cluster: {error}{left}")),
        };
    }
    let live = all.output == Output::Text;
    let mut report = Report::new(KUBERNETES, place, driver, String::new(), choice, live);
    tokio::select! {
        () = cluster.look(all.timeout) => {}
        _ = { let mut signals = signals.clone(); async move { signals.wait_for(|count| *count > 0).await.map(drop) } } => {}
    }
    run_all(Arc::new(cluster), cases, None, (1, all.timeout), &mut report, signals).await;
    Ok(super::end(all, report, before.as_ref(), started))
}
