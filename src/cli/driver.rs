//! `deltapath driver`: serves CSI on a socket until a signal stops it.

use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use shell::Signals;

use super::{Done, PoolFlag};
use crate::csi;
use crate::driver::{Config, Driver, HashingThread, Retention};
use crate::http::Server;
use crate::store::TupleStyle;
use crate::sys;
use base::Endpoint;
use base::Quantity;
use files::Context;

/// How long calls under way may take to end after SIGTERM.
const DRAIN: Duration = Duration::from_secs(20);
/// How long threads at work may take to end after that.
const STOP_PATIENCE: Duration = Duration::from_secs(5);
/// How long a thread without work stays: each holds memory that a busy moment left in it.
const IDLE_THREAD: Duration = Duration::from_secs(1);

/// Serve the CSI services on a UNIX socket.
///
/// Needs root, to attach loop devices and to mount. On SIGTERM, SIGINT and SIGHUP it finishes the calls under way, for up to
/// 20 seconds, and exits with 0.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub(super) struct Arguments {
    /// Socket to serve on. A stale socket is replaced; if another process listens on it, the driver does not start.
    #[arg(
        long,
        env = "CSI_ENDPOINT",
        value_name = "unix:///PATH",
        default_value = "unix:///run/deltapath/csi.sock"
    )]
    endpoint: Endpoint,
    /// Name of this node, as Kubernetes knows it.
    #[arg(long, value_name = "NODE", value_parser = node_id)]
    node_id: String,
    /// Data directory. Only one driver may use it at a time.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/deltapath")]
    data_dir: PathBuf,
    /// Name of the driver, as in its CSIDriver object and in the topology key `topology.NAME/node`.
    #[arg(long, value_name = "NAME", default_value = "deltapath.csi.dev", value_parser = driver_name)]
    driver_name: String,
    /// Storage of volumes and snapshots. Chosen when the data directory is created, and kept.
    #[arg(long, value_name = "POOL", default_value = "auto", value_parser = PoolFlag::parser())]
    pool: PoolFlag,
    /// Size of a pool image, such as 100Gi. The image is sparse. Default: nine tenths of the free space in the
    /// filesystem of the data directory.
    #[arg(long, value_name = "SIZE", value_parser = above_zero)]
    pool_size: Option<Quantity>,
    /// Type of block metadata, unless the VolumeSnapshotClass names one.
    #[arg(long, value_enum, default_value_t = TupleFlag::Variable)]
    block_metadata_type: TupleFlag,
    /// Maximum size of a volume.
    #[arg(long, value_name = "SIZE", default_value = "64Ti", value_parser = above_zero)]
    max_volume_size: Quantity,
    /// Maximum ratio of provisioned capacity to pool size, such as 2.5. Default: no limit; volumes are thin.
    #[arg(long, value_name = "RATIO", value_parser = ratio)]
    overcommit: Option<f64>,
    /// How many deleted snapshots of each volume are kept as a base for deltas, and for how long: COUNT or COUNT:AGE,
    /// such as 8:30d. Their maps are kept, their data is freed. 0: none; then a backup tool that deletes each snapshot
    /// after its backup, such as Velero, makes a whole backup each time.
    #[arg(long, value_name = "COUNT[:AGE]", default_value_t = Retention::default())]
    retain_deleted: Retention,
    /// Serve ControllerPublishVolume and ControllerUnpublishVolume, for clusters with attachments.
    #[arg(long)]
    enable_attach: bool,
    /// Maximum number of volumes attached to this node at once. 0: no limit.
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    max_volumes_per_node: u32,
    /// Address for HTTP: Prometheus metrics at /metrics, and /healthz and /readyz. An IP address and port, such as
    /// 127.0.0.1:9810, or :9810. Default: not served.
    #[arg(long, value_name = "[ADDRESS]:PORT", value_parser = shell::http_endpoint)]
    http_endpoint: Option<SocketAddr>,
    /// Address for deltapath-router, over mutual TLS: CSI without the Node service. An IP address and port, such as
    /// 0.0.0.0:9811. Default: not served.
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        value_parser = address,
        requires_all = ["router_tls_cert", "router_tls_key", "router_tls_ca"]
    )]
    router_listen: Option<SocketAddr>,
    /// Certificate chain for --router-listen, in PEM, with the URI SAN spiffe://CLUSTER/deltapath/node/KEY. KEY is the key of
    /// the data directory, in its deltapath.json. A file that is missing is waited for, and a new one is used without a
    /// restart.
    #[arg(long, value_name = "FILE", requires = "router_listen")]
    router_tls_cert: Option<PathBuf>,
    /// Its key, in PEM.
    #[arg(long, value_name = "FILE", requires = "router_listen")]
    router_tls_key: Option<PathBuf>,
    /// CA certificates that may sign the certificates of the router and of other nodes, in PEM. The router's has the URI SAN
    /// spiffe://CLUSTER/deltapath/router, with the same CLUSTER.
    #[arg(long, value_name = "FILE", requires = "router_listen")]
    router_tls_ca: Option<PathBuf>,
    /// How many bytes a second all transfers from other nodes to this one may take together, such as 100Mi. Default: no limit.
    #[arg(long, value_name = "SIZE", requires = "router_listen", value_parser = transfer_rate)]
    transfer_rate: Option<Quantity>,
    /// The process of the demo that this driver is for. The driver makes the directory of the demo; should the demo be killed, the
    /// driver ends too, and takes it away.
    #[arg(long, hide = true, value_name = "PID", requires = "data_dir")]
    demo: Option<i32>,
}

/// `--block-metadata-type`.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum TupleFlag {
    /// Adjacent blocks joined into extents (`VARIABLE_LENGTH`).
    Variable,
    /// Every block on its own (`FIXED_LENGTH`).
    Fixed,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "it must be an IP address and a port, such as 0.0.0.0:9811".into())
}

fn transfer_rate(text: &str) -> Result<Quantity, String> {
    match text.parse::<Quantity>() {
        Ok(rate) if rate.0 > 0 => Ok(rate),
        Ok(_) => Err("must be greater than 0; omit the flag for no limit".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if ratio.is_finite() && ratio > 0.0 => Ok(ratio),
        _ => Err("must be a number greater than 0, such as 2.5".into()),
    }
}

/// Whether a text has 1 to 63 letters, digits and characters of `also`, with a letter or digit at both ends.
fn is_label(text: &str, also: &[char]) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let inner = |c: char| c.is_ascii_alphanumeric() || also.contains(&c);
    text.len() <= 63 && text.chars().all(inner) && edge(text.chars().next()) && edge(text.chars().last())
}

/// A driver name as the CSI spec wants it (GetPluginInfo): a domain name of at most 63 characters.
fn driver_name(text: &str) -> Result<String, String> {
    let want = "must have at most 63 letters, digits, '-' and '.', with a letter or digit at both ends";
    is_label(text, &['-', '.']).then(|| text.to_owned()).ok_or(want.into())
}

/// A node's name is the value of a topology segment, which the CSI spec bounds (Topology).
fn node_id(text: &str) -> Result<String, String> {
    let want = "must have at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends";
    is_label(text, &['-', '_', '.']).then(|| text.to_owned()).ok_or(want.into())
}

fn above_zero(text: &str) -> Result<Quantity, String> {
    let size: Quantity = text.parse().map_err(|error| format!("{error}"))?;
    (size.0 > 0).then_some(size).ok_or("must be above 0".into())
}

pub(super) fn run(arguments: Arguments) -> Done {
    let demo = arguments.demo.zip(arguments.data_dir.parent().map(Path::to_owned));
    let done = run_to_the_end(arguments);
    // The thread whose end stops the driver ends a moment before the rest of a demo that is killed.
    let is_gone = |demo| {
        (0..50).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            Pid::parent().as_raw() != demo
        })
    };
    if let Some((demo, dir)) = demo
        && is_gone(demo)
    {
        super::demo::take_away(&dir);
    }
    done
}

fn run_to_the_end(arguments: Arguments) -> Done {
    if !sys::is_root() {
        return Err("the driver needs root: it attaches loop devices and mounts filesystems".into());
    }
    super::check_data_dir(&arguments.data_dir)?;
    sys::raise_open_files()?;
    sys::memory::return_large_buffers();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().thread_keep_alive(IDLE_THREAD).build()?;
    // From here on a signal never leaves a mounted pool behind: one that comes while the driver starts ends it afterwards.
    let signals = {
        let _entered = runtime.enter();
        Signals::watch()?
    };
    if let Some((demo, dir)) = arguments.demo.zip(arguments.data_dir.parent()) {
        nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?;
        if Pid::parent().as_raw() != demo {
            return Err("the demo is gone".into());
        }
        // Not by the demo: if it is killed before there is a driver, no process would remove the directory.
        #[expect(clippy::disallowed_methods, reason = "a demo need not outlive the power")]
        std::fs::DirBuilder::new().mode(0o700).create(dir).context("create", dir)?;
    }
    let data_dir = arguments.data_dir.clone();
    let driver = Driver::open(Config {
        driver_name: arguments.driver_name,
        node_id: arguments.node_id,
        data_dir: arguments.data_dir,
        pool: arguments.pool.request(arguments.pool_size),
        tuple_style: match arguments.block_metadata_type {
            TupleFlag::Variable => TupleStyle::Variable,
            TupleFlag::Fixed => TupleStyle::Fixed,
        },
        max_volume_size: arguments.max_volume_size,
        overcommit: arguments.overcommit,
        attach: arguments.enable_attach,
        max_volumes: arguments.max_volumes_per_node,
        retain: arguments.retain_deleted,
        transfer_rate: arguments.transfer_rate,
    });
    let driver = Arc::new(driver.map_err(|error| error.explain(&data_dir))?);
    let hashing = HashingThread::start(driver.hashing.clone())?;
    let router = match (
        arguments.router_listen,
        arguments.router_tls_cert,
        arguments.router_tls_key,
        arguments.router_tls_ca,
    ) {
        (Some(address), Some(certificate), Some(key), Some(authorities)) => {
            Some((address, csi::RouterFiles { certificate, key, authorities }))
        }
        // Clap has seen to it that it is all of them or none.
        _ => None,
    };
    let served = runtime.block_on(serve(
        driver.clone(),
        &arguments.endpoint,
        arguments.http_endpoint,
        router,
        signals,
        arguments.demo.is_some(),
    ));
    // While their runtime is there.
    driver.transfers.stop();
    driver.sources.clear();
    // Threads still at work hold the driver; they get a last moment to end.
    runtime.shutdown_timeout(STOP_PATIENCE);
    drop(hashing);
    driver.close()?;
    match served? {
        Ended::Stopped => {
            tracing::info!("stopped");
            Ok(ExitCode::SUCCESS)
        }
        Ended::ToStartAgain => {
            serve::log::flush();
            Err(format!("start again: {}", sys::program::start_again()).into())
        }
    }
}

/// Why a driver stopped serving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// A signal has come.
    Stopped,
    /// To mount the pool again.
    ToStartAgain,
}

/// Ends when the pool has turned read-only and only a start mends it. Looks each second, but not in the first ones, so that a disk that
/// stays full does not keep the driver starting.
async fn pool_must_be_remounted(driver: Arc<Driver>) {
    let mut look = tokio::time::interval_at(
        tokio::time::Instant::now() + Duration::from_secs(5),
        Duration::from_secs(1),
    );
    loop {
        look.tick().await;
        let driver = driver.clone();
        if tokio::task::spawn_blocking(move || driver.must_start_again()).await.unwrap_or(false) {
            return;
        }
    }
}

async fn serve(
    driver: Arc<Driver>,
    endpoint: &Endpoint,
    metrics: Option<SocketAddr>,
    router: Option<(SocketAddr, csi::RouterFiles)>,
    mut signals: Signals,
    is_demo: bool,
) -> Result<Ended, Box<dyn std::error::Error>> {
    if let Some(address) = metrics {
        let server = Server::bind(address)?;
        tokio::spawn(server.serve(driver.clone()));
    }
    let router = match router {
        Some((address, files)) => Some(csi::RouterListener::bind(&driver, address, files)?),
        None => None,
    };
    let (stopping, stopped) = tokio::sync::watch::channel(None);
    let watched = driver.clone();
    let shutdown = async move {
        let ended = tokio::select! {
            _ = signals.next() => Ended::Stopped,
            () = pool_must_be_remounted(watched), if !is_demo => {
                tracing::error!("the pool turned read-only, and no volume on it is in use: the driver starts again to mount it");
                Ended::ToStartAgain
            }
        };
        tracing::info!("draining");
        let _ = stopping.send(Some(ended));
    };
    let mut asked = stopped.clone();
    let overdue = async move {
        // Ends with the server where no signal ever comes.
        let _ = asked.wait_for(Option::is_some).await;
        tokio::time::sleep(DRAIN).await;
    };
    tokio::select! {
        served = csi::serve(driver, endpoint, router, shutdown) => served?,
        () = overdue => tracing::warn!("calls are still in progress, ending without them"),
    }
    let ended = *stopped.borrow();
    Ok(ended.unwrap_or(Ended::Stopped))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_names_are_domain_names() {
        for good in ["deltapath.csi.dev", "a", "x1.y-2"] {
            assert!(driver_name(good).is_ok(), "{good}");
        }
        for bad in ["", ".a", "a.", "a b", "a_b", "a/b", &"x".repeat(64)] {
            assert!(driver_name(bad).is_err(), "{bad}");
        }
    }
}
