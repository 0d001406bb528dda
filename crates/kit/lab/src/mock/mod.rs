//! `cbt-lab mock`: a CSI driver in memory, without devices and without root, and the Kubernetes SnapshotMetadata service in
//! front of it, with the faults of `cbt-lab faults` in the same process.
//!
//! - `data.rs` computes what volumes hold and what snapshots changed.
//! - `driver.rs` is the driver, `state.rs` what it remembers; `stream.rs` answers what changed, `publish.rs` makes the files of
//!   published volumes.
//! - `service.rs` reads requests and encodes answers.

mod data;
mod driver;
mod publish;
mod service;
mod state;
mod stream;

use std::sync::Arc;

use base::{BlockSize, Quantity};
use clap::{Args, ValueEnum};
use proto::{CapacityRange, CreateSnapshotRequest, CreateVolumeRequest};

use super::faults::{Address, Faults, Listener, TlsArguments, Upstream, serve, until_stopped};
use super::{Done, Output};
use driver::{Driver, Settings};
use service::Mock;

/// Serve a CSI driver that is in memory, for unit tests: no devices, no root.
///
/// Identity, Controller, GroupController, Node and SnapshotMetadata, for volumes of any size with any number of changes. Ids
/// are names. Each snapshot changes --changes blocks, or what the parameters of CreateSnapshot say: changes=N, or
/// ranges="OFFSET+SIZE OFFSET+SIZE". The same seed and the same calls give the same answers. A published Block volume is a
/// file with the volume's data. All faults of `cbt-lab faults` are there.
///
/// Exit codes: 0 after a signal, 1 it could not start, 2 wrong usage.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Where the driver listens: unix:///path, or http://host:port.
    #[arg(long, value_name = "ADDRESS")]
    listen: Address,
    /// Where the Kubernetes SnapshotMetadata service listens: https://host:port, or http://host:port. Snapshots are named by
    /// their id, in any namespace.
    #[arg(long, value_name = "ADDRESS")]
    kubernetes: Option<Address>,
    /// Token that the Kubernetes service takes. Default: any.
    #[arg(long, value_name = "TOKEN", requires = "kubernetes")]
    token: Option<String>,
    /// Volume that is there from the start, as in disk=1Ti; may be given several times.
    #[arg(long, value_name = "NAME=SIZE", value_parser = volume)]
    volume: Vec<(String, u64)>,
    /// Snapshots that each of these volumes has: NAME-1, NAME-2 and so on.
    #[arg(long, value_name = "NUMBER", default_value_t = 0, value_parser = shell::within::<u64>(0..=10_000))]
    snapshots: u64,
    /// Blocks that change before each snapshot, where its parameters do not say it.
    #[arg(long, value_name = "NUMBER", default_value_t = 1000, value_parser = shell::within::<u64>(0..=u64::MAX))]
    changes: u64,
    /// Bytes of a block: a power of two from 512 to 64Mi.
    #[arg(long, value_name = "SIZE", default_value = "4Ki", value_parser = block_size)]
    block_size: u64,
    /// How ranges are listed.
    #[arg(long, value_enum, default_value_t = Style::Variable)]
    block_metadata_type: Style,
    /// Tuples of a message where max_results is 0.
    #[arg(long, value_name = "NUMBER", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    tuples_per_message: u32,
    /// Answer deltas from deleted bases as if they were there; else they are NOT_FOUND.
    #[arg(long)]
    keep_bases: bool,
    /// What GetPluginInfo says.
    #[arg(long, value_name = "NAME", default_value = "mock.cbt-lab.example.com")]
    driver_name: String,
    #[command(flatten)]
    faults: Faults,
    #[command(flatten)]
    tls: TlsArguments,
    /// What is printed on standard output when it is ready.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

/// How ranges are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Style {
    /// FIXED_LENGTH: one tuple for each block.
    Fixed,
    /// VARIABLE_LENGTH: one tuple for each run of blocks.
    Variable,
}

fn volume(text: &str) -> Result<(String, u64), String> {
    let wanted = || format!("{text:?} is not a volume: write NAME=SIZE, as in disk=1Ti");
    let (name, size) = text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or_else(wanted)?;
    let size: Quantity = size.parse().map_err(|_| wanted())?;
    match size.0 {
        size if (1..=i64::MAX as u64 / 2).contains(&size) => Ok((name.to_owned(), size)),
        _ => Err(wanted()),
    }
}

fn block_size(text: &str) -> Result<u64, String> {
    let size = text.parse::<Quantity>().map_err(|error| error.to_string())?.0;
    match size.is_power_of_two() && (512..=64 << 20).contains(&size) {
        true => Ok(size),
        false => Err(format!(
            "{text} is not a power of two from 512 to 64Mi (a device's is {})",
            BlockSize::MIN.bytes()
        )),
    }
}

pub(super) fn run(arguments: Arguments) -> Done {
    until_stopped(async {
        let driver = Driver::new(Settings {
            name: arguments.driver_name.clone(),
            seed: arguments.faults.seed,
            block_size: arguments.block_size,
            fixed: arguments.block_metadata_type == Style::Fixed,
            tuples_per_message: arguments.tuples_per_message as usize,
            changes: arguments.changes,
            keeps_bases: arguments.keep_bases,
        });
        fill(&driver, &arguments).map_err(|status| status.message().to_owned())?;
        let mut listeners = Vec::new();
        for address in [Some(&arguments.listen), arguments.kubernetes.as_ref()].into_iter().flatten() {
            let is_tls = matches!(address, Address::Tcp { tls: true, .. });
            let tls = if is_tls { arguments.tls.tls(address)? } else { None };
            listeners.push(Listener::bind(address, tls).await?);
        }
        let mock = Mock {
            driver,
            serves_kubernetes: arguments.kubernetes.is_some(),
            token: arguments.token.clone(),
        };
        serve(Upstream::Here(Arc::new(mock)), listeners, &arguments.faults, None, arguments.output).await
    })
}

/// Makes the volumes and snapshots that are there from the start.
fn fill(driver: &Driver, arguments: &Arguments) -> Result<(), tonic::Status> {
    for (name, size) in &arguments.volume {
        driver.create_volume(CreateVolumeRequest {
            name: name.clone(),
            capacity_range: Some(CapacityRange { required_bytes: *size as i64, limit_bytes: 0 }),
            volume_capabilities: vec![csi_client::block_capability()],
            ..Default::default()
        })?;
        for number in 1..=arguments.snapshots {
            driver.create_snapshot(&CreateSnapshotRequest {
                name: format!("{name}-{number}"),
                source_volume_id: name.clone(),
                ..Default::default()
            })?;
        }
    }
    Ok(())
}
