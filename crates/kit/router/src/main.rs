//! `deltapath-router`: one CSI controller for many nodes. Flags are here, the calls in `calls`.
//!
//! - The key of a data directory is the first eight digits of every id in it. So an id says where its object is, and the router
//!   stores nothing.
//! - Only the key identifies a node. Each connection is checked against the key in the node's certificate: an address that now
//!   belongs to another node would answer `OK` to a DeleteVolume for an object that it does not know.
//! - Messages stay bytes. A field or a call that CSI adds needs at most a line in the table of `calls/methods.rs`.
//! - Calls to all nodes, or to any, carry no secrets. Only the node of an object gets them.
//! - A status with a source in Rust comes from the transport and not from the node. It becomes `UNAVAILABLE`.
//! - A CreateVolume with an unknown outcome is not repeated on another node. The router and the arbiter of the name remember the
//!   node that did not answer, in memory. If that memory is lost, `calls/twice.rs` finds a second volume of the name.
//! - If an address no longer has its node, the node is departed. Its objects still exist, so complete lists need it.
// They panic where the output is closed: `shell` does not.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![forbid(unsafe_code)]

mod calls;
mod certificates;
mod delete;
mod forget;
mod node;
mod nodes;
mod pages;
mod passthrough;
mod placement;
mod record;
mod server;
mod service;
#[cfg(test)]
mod simulation;
mod slices;

use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use base::{DataDirKey, Endpoint};
use clap::{Parser, Subcommand};
use serve::program::{LogFormat, Stop, host_and_port, streams};
use serve::snapshots::{NAME_MAX, NAMESPACE_MAX, is_object_name};

/// Messages come and go, of different sizes: glibc keeps more of their memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// One CSI controller for many nodes.
///
/// Serves CSI Identity, Controller, GroupController and SnapshotMetadata on a UNIX socket, and routes each call to the node
/// whose driver (deltapath driver --router-listen) has the object. It keeps no state and needs no privileges; several may
/// run at once.
///
/// On SIGTERM, SIGINT and SIGHUP it takes no new calls, lets those under way end for up to --drain, and exits with 0. Exit codes:
/// 0 stopped or done, 1 failed (the reason is on standard error), 2 wrong usage.
#[derive(Debug, Parser)]
#[command(
    name = "deltapath-router",
    version,
    max_term_width = 100,
    subcommand_negates_reqs = true,
    args_conflicts_with_subcommands = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    serve: Option<Serve>,
}

#[derive(Debug, clap::Args)]
struct Serve {
    /// Socket to serve on. A stale socket is replaced; if another process listens on it, the router does not start.
    #[arg(
        long,
        env = "CSI_ENDPOINT",
        value_name = "unix:///PATH",
        default_value = "unix:///run/deltapath/router.sock"
    )]
    endpoint: Endpoint,
    /// Addresses of the nodes' drivers (their --router-listen), separated by commas. An IP address or a name, and a port.
    #[arg(
        long,
        value_name = "HOST:PORT,...",
        value_delimiter = ',',
        required_unless_present = "node_service",
        value_parser = host_and_port
    )]
    node_endpoints: Vec<String>,
    /// Instead: the headless Kubernetes Service of the nodes' drivers. Their addresses are those in its EndpointSlices, which
    /// are watched, ready or not; their port is the one named `router`, or the only one. If a volume exists twice, the
    /// PersistentVolumes are listed, and the one that none of them has is deleted.
    #[arg(long, value_name = "NAMESPACE/NAME", conflicts_with = "node_endpoints")]
    node_service: Option<NodeService>,
    /// Kubeconfig file for --node-service. Default: the pod's service account, or what kubectl would take.
    #[arg(long, value_name = "FILE", requires = "node_service", conflicts_with = "node_endpoints")]
    kubeconfig: Option<PathBuf>,
    /// Certificate chain, in PEM, with the URI SAN spiffe://CLUSTER/deltapath/router. This file and the next two are
    /// watched: new ones are used without a restart.
    #[arg(long, value_name = "FILE", required = true)]
    tls_cert: PathBuf,
    /// Its key, in PEM.
    #[arg(long, value_name = "FILE", required = true)]
    tls_key: PathBuf,
    /// CA certificates that may sign the nodes' certificates, in PEM. A node's has the URI SAN
    /// spiffe://CLUSTER/deltapath/node/KEY, with the same CLUSTER and the key of its data directory.
    #[arg(long, value_name = "FILE", required = true)]
    tls_ca: PathBuf,
    /// File with the keys of data directories that are gone for good, one a line. It is watched. `deltapath-router forget`
    /// adds to it.
    #[arg(long, value_name = "FILE")]
    forgotten: Option<PathBuf>,
    /// Name of the nodes' CSI driver, as in their --driver-name. Nodes with another are not used. Default: the name that most
    /// nodes have.
    #[arg(long, value_name = "NAME")]
    driver_name: Option<String>,
    /// How long a node may take to accept a connection, and to say who it is, before it counts as unreachable.
    #[arg(long, value_name = "AGE", default_value = "5s", value_parser = shell::age)]
    node_timeout: Duration,
    /// Address for HTTP: Prometheus metrics at /metrics, and /healthz and /readyz. `:PORT` means all addresses.
    #[arg(long, value_name = "[ADDRESS]:PORT", default_value = ":8080", value_parser = shell::http_endpoint)]
    http_endpoint: SocketAddr,
    /// Maximum number of metadata streams at once.
    #[arg(long, value_name = "COUNT", default_value_t = 2048, value_parser = streams())]
    max_streams: usize,
    /// How long a client may leave a stream unread before it is ended.
    #[arg(long, value_name = "AGE", default_value = "10m", value_parser = shell::age)]
    idle_timeout: Duration,
    /// How long calls may continue after SIGTERM.
    #[arg(long, value_name = "AGE", default_value = "30s", value_parser = shell::age)]
    drain: Duration,
    /// Format of the log on standard error. RUST_LOG sets the level (default: info).
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Say that a node is gone for good, by the key of its data directory.
    ///
    /// Routers that run with the same --forgotten then take its volumes and snapshots as deleted: deletions succeed, all
    /// other calls answer NOT_FOUND, and lists miss nothing. Its data is not touched; should the node come back, it is not
    /// used until its line is removed from the file. The key is in the ids of its objects, behind the dash: the first eight
    /// digits.
    Forget {
        /// Key of the data directory, such as 0123abcd.
        key: DataDirKey,
        /// The file that routers watch.
        #[arg(long, value_name = "FILE")]
        forgotten: PathBuf,
    },
    /// Delete one volume by its id, through a router: for a volume that exists twice.
    ///
    /// A volume that is in use is not deleted. Check first that nothing else uses the id: in Kubernetes, no
    /// PersistentVolume may have it as its spec.csi.volumeHandle.
    DeleteVolume {
        /// Id of the volume, such as vol-0123abcd...
        volume_id: String,
        /// The router's socket.
        #[arg(
            long,
            env = "CSI_ENDPOINT",
            value_name = "unix:///PATH",
            default_value = "unix:///run/deltapath/router.sock"
        )]
        endpoint: Endpoint,
    },
    Certificates(certificates::Certificates),
    NodeCertificate(certificates::NodeCertificate),
}

#[derive(Clone, Debug)]
struct NodeService {
    namespace: String,
    name: String,
}

impl std::str::FromStr for NodeService {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (namespace, name) = text.split_once('/').unwrap_or_default();
        match is_object_name(namespace, NAMESPACE_MAX) && is_object_name(name, NAME_MAX) {
            true => Ok(NodeService { namespace: namespace.to_owned(), name: name.to_owned() }),
            false => Err("a Service is a namespace and a name, such as deltapath/deltapath-nodes"),
        }
    }
}

fn main() -> ExitCode {
    use serve::program::run;
    const NAME: &str = "deltapath-router";
    let Arguments { command, serve: flags } = shell::parse();
    let Some(command) = command else {
        let flags = flags.expect("clap asks for them where there is no command");
        flags.log_format.start();
        serve::program::allow_open_files();
        return run(NAME, server::run(flags));
    };
    match command {
        Command::Forget { key, forgotten } => run(NAME, async move {
            done(match forget::add(&forgotten, key)? {
                true => format!(
                    "{key} is forgotten: routers that watch {} know within seconds",
                    forgotten.display()
                ),
                false => format!("{key} was forgotten before"),
            })
        }),
        Command::DeleteVolume { volume_id, endpoint } => run(NAME, async move {
            delete::volume(endpoint.path(), volume_id.clone()).await?;
            done(format!("{volume_id} is deleted"))
        }),
        Command::Certificates(flags) => run(NAME, until_stopped(certificates::run(flags))),
        Command::NodeCertificate(flags) => run(NAME, until_stopped(certificates::request(flags))),
    }
}

fn done(what: String) -> Result<(), Box<dyn Error>> {
    shell::told("deltapath-router", shell::print(&(what + "\n")));
    Ok(())
}

/// Runs what ends by a signal alone.
async fn until_stopped(work: impl Future<Output = Result<(), Box<dyn Error>>>) -> Result<(), Box<dyn Error>> {
    LogFormat::Text.start();
    let stop = Stop::watch()?;
    tokio::select! {
        done = work => done,
        () = stop.asked() => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use testkit::pages::assert_names_every_flag;

    const TLS: &str = "--tls-cert c --tls-key k --tls-ca a";

    #[test]
    fn flags_fit_together() {
        Arguments::command().debug_assert();
        let parse = |line: &str| Arguments::try_parse_from(line.split(' '));
        let serve = parse(&format!("router --node-endpoints a:1,10.0.0.1:2,[::1]:3 {TLS}")).expect("flags");
        assert_eq!(serve.serve.expect("flags").node_endpoints, ["a:1", "10.0.0.1:2", "[::1]:3"]);
        let serve = parse(&format!("router --node-service a/b-1 --kubeconfig k {TLS}")).expect("flags");
        let service = serve.serve.and_then(|serve| serve.node_service).expect("a service");
        assert_eq!((service.namespace.as_str(), service.name.as_str()), ("a", "b-1"));
        parse("router forget 0123abcd --forgotten f").expect("a command");
        for wrong in [
            "router",
            "router --node-endpoints a:1",
            &format!("router {TLS}"),
            &format!("router --node-service b {TLS}"),
            &format!("router --node-service a/ {TLS}"),
            &format!("router --node-service a/b/c {TLS}"),
            &format!("router --node-service a/b --node-endpoints a:1 {TLS}"),
            &format!("router --node-endpoints a:1 --kubeconfig k {TLS}"),
            &format!("router --node-endpoints a {TLS}"),
            &format!("router --node-endpoints a:0 {TLS}"),
            &format!("router --node-endpoints a:1 {TLS} --endpoint tcp://1.2.3.4:5"),
            &format!("router --node-endpoints a:1 {TLS} --drain 0s"),
            &format!("router --node-endpoints a:1 {TLS} --max-streams 0"),
            &format!("router --node-endpoints a:1 {TLS} --max-streams 18446744073709551615"),
            "router certificates --cluster c --namespace n --ca-lifetime 99999999d",
            "router forget 0123abcd",
            "router forget node-1 --forgotten f",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    /// The page with all flags (docs/reference.md) names all of them, and no other.
    #[test]
    fn the_reference_has_every_flag() {
        let command = Arguments::command();
        let flags = |command: &clap::Command| -> Vec<String> {
            command.get_arguments().filter_map(|argument| argument.get_long()).map(str::to_owned).collect()
        };
        assert_names_every_flag("deltapath-router", flags(&command).iter().map(String::as_str));
        for name in ["certificates", "node-certificate"] {
            let command = command.find_subcommand(name).expect("a command");
            let title = format!("deltapath-router {name}");
            assert_names_every_flag(&title, flags(command).iter().map(String::as_str));
        }
    }
}
