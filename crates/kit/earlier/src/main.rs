//! `cbt-earlier`: the earlier designs of KEP-3314, each a subcommand, in front of any CSI driver with a SnapshotMetadata
//! service. Flags are here, each design in a module of its own.
// They panic where the output is closed: `shell` does not.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![cfg_attr(test, allow(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

mod deltas;
mod differential;
mod driver;
mod page_token;
mod refusal;
mod request;
mod server;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use base::{Endpoint, Quantity};
use clap::{Parser, Subcommand};
use serve::program::{LogFormat, host_and_port, review_cache};
use serve::snapshots::{NAME_MAX, NAMESPACE_MAX, is_object_name};

/// The designs of changed block tracking in Kubernetes (KEP-3314) that came before the stream, in front of any CSI driver.
///
/// They are for comparison and for tools that were written for them. New tools use the SnapshotMetadata API, which
/// deltapath-gateway serves.
#[derive(Debug, Parser)]
#[command(name = "cbt-earlier", version, max_term_width = 100, args_override_self = true)]
struct Arguments {
    /// Format of the log on standard error. RUST_LOG sets the level (default: info).
    #[arg(long, value_enum, default_value_t = LogFormat::Text, global = true)]
    log_format: LogFormat,
    #[command(subcommand)]
    design: Design,
}

#[derive(Debug, Subcommand)]
enum Design {
    Differential(Differential),
    Aggregated(Aggregated),
    CbtHttp(CbtHttp),
}

/// DifferentialSnapshot: a resource that gets a callback URL, at which the changed blocks are asked for in pages.
///
/// A user creates a DifferentialSnapshot that names two VolumeSnapshots, waits for status.state `url-ready`, and asks
/// status.callbackURL with a bearer token: GET URL?maxEntries=1000, and again with startOffset=NextOffset until NextOffset is
/// empty. The token is for the audience of --audience; its user must be allowed to get the DifferentialSnapshot and both
/// VolumeSnapshots.
///
/// One replica, which is elected, writes the status; the others answer /readyz with 503. On SIGTERM, SIGINT and SIGHUP it takes no
/// new requests, ends those under way, and exits with 0. Exit codes: 0 stopped, 1 failed (the reason is on standard error),
/// 2 wrong usage.
#[derive(Debug, clap::Args)]
struct Differential {
    /// Socket of the CSI driver, which may come and go.
    #[arg(long, value_name = "ENDPOINT", default_value = "/run/csi/socket")]
    csi_address: Endpoint,
    /// Socket on which the gRPC service DifferentialSnapshot is served. The listener asks there too.
    #[arg(long, value_name = "ENDPOINT", default_value = "/run/cbt-earlier/differential.sock")]
    socket: Endpoint,
    /// Host and port at which users reach the callback listener: the beginning of status.callbackURL.
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    service_address: String,
    /// Audience that tokens must be for.
    #[arg(long, value_name = "NAME", default_value = "cbt-earlier")]
    audience: String,
    /// Lease of the elected replica.
    #[arg(long, value_name = "NAME", default_value = "cbt-earlier-differential")]
    lease: String,
    /// How long the VolumeSnapshots may take to be ready before the DifferentialSnapshot is `failed`, such as 5m. It still
    /// becomes `url-ready` when they are.
    #[arg(long, value_name = "AGE", default_value = "5m", value_parser = shell::age)]
    ready_timeout: Duration,
    /// How long a page may take, and then its user to take it.
    #[arg(long, value_name = "AGE", default_value = "60s", value_parser = shell::age)]
    page_timeout: Duration,
    /// Blocks in a page at most, and where a request does not say how many.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_entries: u32,
    #[command(flatten)]
    common: Common,
}

/// VolumeSnapshotDelta: an aggregated API server, which answers a create with the changed blocks and stores nothing.
///
/// A user creates a VolumeSnapshotDelta (cbt.storage.k8s.io/v1alpha1) that names two VolumeSnapshots and finds the changed
/// blocks in the status of the answer; status.continue is spec.offset of the next one. The user must be allowed to create
/// it and to get both VolumeSnapshots, and to create volumesnapshotdeltas/data for tokens by which data is read. The
/// blocks come from the cbt-http of the driver, which a DriverDiscovery names.
///
/// Every replica serves. On SIGTERM, SIGINT and SIGHUP it takes no new requests, ends those under way, and exits with 0. Exit codes:
/// 0 stopped, 1 failed (the reason is on standard error), 2 wrong usage.
#[derive(Debug, clap::Args)]
struct Aggregated {
    /// Token for cbt-http, with its audience. The file is read with each request.
    #[arg(long, value_name = "FILE", default_value = "/var/run/secrets/cbt-http/token")]
    token_file: PathBuf,
    /// Lease of the replica that keeps the status of DriverDiscoveries. Serving needs no election.
    #[arg(long, value_name = "NAME", default_value = "cbt-earlier-aggregated")]
    lease: String,
    /// Entries in an answer at most, and where a request does not say how many.
    #[arg(long, value_name = "COUNT", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_entries: u32,
    /// Creates of one user in a second, over time. Further ones are answered with 429.
    #[arg(long, value_name = "COUNT", default_value = "20", value_parser = shell::within::<NonZeroU32>(1..=u32::MAX.into()))]
    client_qps: NonZeroU32,
    /// Creates of one user at once, after a pause.
    #[arg(long, value_name = "COUNT", default_value = "40", value_parser = shell::within::<NonZeroU32>(1..=u32::MAX.into()))]
    client_burst: NonZeroU32,
    /// How long an answer may take, and then its user to take it.
    #[arg(long, value_name = "AGE", default_value = "30s", value_parser = shell::age)]
    page_timeout: Duration,
    #[command(flatten)]
    common: Common,
}

/// VolumeSnapshotDelta: the sidecar of a CSI driver, which the aggregated API server asks for changed blocks.
///
/// It writes the DriverDiscovery of its driver, serves the gRPC call ListSnapshotDeltas on a socket, and answers JSON over
/// HTTPS from there, for users who may create driverdiscoveries/deltas. With --snapshot-data each block comes with a token,
/// which is all that a reader of the block's bytes needs: GET ADDRESS/data, with the token as a bearer token.
///
/// One replica, which is elected, is ready; the others answer /readyz with 503. On SIGTERM, SIGINT and SIGHUP it takes no new
/// requests, ends those under way, and exits with 0. Exit codes: 0 stopped, 1 failed (the reason is on standard error), 2 wrong
/// usage.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("place").required(true).args(["service", "url"]))]
struct CbtHttp {
    /// Socket of the CSI driver, which may come and go.
    #[arg(long, value_name = "ENDPOINT", default_value = "/run/csi/socket")]
    csi_address: Endpoint,
    /// Socket on which ListSnapshotDeltas is served. The HTTPS side asks there too.
    #[arg(long, value_name = "ENDPOINT", default_value = "/run/cbt-earlier/deltas.sock")]
    socket: Endpoint,
    /// Service by which it is reached, for the DriverDiscovery.
    #[arg(long, value_name = "NAMESPACE/NAME[:PORT]", value_parser = service)]
    service: Option<Service>,
    /// URL by which it is reached, in the place of a Service: https, and the path /v1alpha1/deltas.
    #[arg(long, value_name = "URL", value_parser = https_url)]
    url: Option<String>,
    /// CA of the certificate, in PEM, for the DriverDiscovery. Default: the file of --tls-cert.
    #[arg(long, value_name = "FILE")]
    ca_bundle: Option<PathBuf>,
    /// Audience that tokens of the aggregated API server must be for.
    #[arg(long, value_name = "NAME", default_value = "cbt-http")]
    audience: String,
    /// Lease of the elected replica. Default: cbt-http- and the driver's name.
    #[arg(long, value_name = "NAME")]
    lease: Option<String>,
    /// Bytes in a block where the driver lists ranges of any length: a power of two from 512. What changed is cut into such
    /// blocks. A driver whose blocks have one length keeps its own.
    #[arg(long, value_name = "BYTES", default_value = "4Ki", value_parser = block_size)]
    block_size: u64,
    /// File or device with the bytes of a snapshot; {snapshot} is replaced by its CSI handle. May be repeated: the first that is
    /// there is read. Without it no data is served and blocks have no tokens.
    #[arg(long, value_name = "PATH", requires = "data_token_key", value_parser = snapshot_data)]
    snapshot_data: Vec<String>,
    /// File with the key that signs data tokens: 32 random bytes or more, the same for all replicas.
    #[arg(long, value_name = "FILE", requires = "snapshot_data")]
    data_token_key: Option<PathBuf>,
    /// How long a data token is good for, at most 1d.
    #[arg(long, value_name = "AGE", default_value = "5m", value_parser = data_token_ttl)]
    data_token_ttl: Duration,
    /// How long a page may take, and then its reader to take it.
    #[arg(long, value_name = "AGE", default_value = "25s", value_parser = shell::age)]
    page_timeout: Duration,
    #[command(flatten)]
    common: Common,
}

// No doc comment: clap would show it as the design's own.
#[derive(Debug, clap::Args)]
struct Common {
    /// Port on which it is served, over TLS.
    #[arg(long, default_value_t = 6443)]
    port: u16,
    /// IP address on which it is served.
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    bind_address: IpAddr,
    /// Address for HTTP: Prometheus metrics at /metrics, and /healthz and /readyz. `:PORT` means all addresses.
    #[arg(long, value_name = "[ADDRESS]:PORT", default_value = ":8080", value_parser = shell::http_endpoint)]
    http_endpoint: SocketAddr,
    /// Certificate chain, in PEM. The file is watched: a new one is used without a restart.
    #[arg(long, value_name = "FILE")]
    tls_cert: PathBuf,
    /// Its key, in PEM.
    #[arg(long, value_name = "FILE")]
    tls_key: PathBuf,
    /// Kubeconfig file. Default: the pod's service account, or what kubectl would take.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Namespace of the Lease.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME")]
    namespace: String,
    /// Name of this replica in the election. Default: the host's name.
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pod_name: Option<String>,
    /// Requests at once. Further ones are answered with 429.
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    max_requests: u16,
    /// How long a positive review of a token or a right is used, at most 10s. 0s: not at all.
    #[arg(long, value_name = "AGE", default_value = "10s", value_parser = review_cache)]
    review_cache: Duration,
}

/// A Service, and its port where that is not 443.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Service {
    namespace: String,
    name: String,
    port: Option<u16>,
}

impl Service {
    fn json(&self) -> serde_json::Value {
        let Service { namespace, name, port } = self;
        let path = deltas::sidecar::PATH;
        serde_json::json!({"namespace": namespace, "name": name, "path": path, "port": port.unwrap_or(443)})
    }
}

fn service(text: &str) -> Result<Service, String> {
    let (namespace, rest) = text.split_once('/').unwrap_or_default();
    let (name, port) = match rest.split_once(':') {
        None => (rest, None),
        Some((name, port)) => (name, Some(port.parse::<u16>().ok().filter(|port| *port > 0))),
    };
    match port {
        Some(None) => Err("a Service's port is a number from 1 to 65535".into()),
        _ if !is_object_name(namespace, NAMESPACE_MAX) || !is_object_name(name, NAME_MAX) => {
            Err("a Service is a namespace and a name, such as backup/cbt-http or backup/cbt-http:6443".into())
        }
        port => Ok(Service { namespace: namespace.into(), name: name.into(), port: port.flatten() }),
    }
}

fn https_url(text: &str) -> Result<String, String> {
    match reqwest::Url::parse(text) {
        Ok(url) if url.scheme() == "https" && url.path() == deltas::sidecar::PATH => Ok(text.to_owned()),
        _ => Err(format!("a URL with https and the path {}", deltas::sidecar::PATH)),
    }
}

fn block_size(text: &str) -> Result<u64, String> {
    let size = text.parse::<Quantity>().ok().map(|size| size.0);
    let size = size.filter(|size| size.is_power_of_two() && (512..=1 << 30).contains(size));
    size.ok_or_else(|| "a block has a power of two of bytes, from 512 to 1Gi".into())
}

fn snapshot_data(text: &str) -> Result<String, String> {
    match text.starts_with('/') && text.contains(deltas::PLACEHOLDER) {
        true => Ok(text.to_owned()),
        false => Err(format!("an absolute path with {} in it", deltas::PLACEHOLDER)),
    }
}

fn data_token_ttl(text: &str) -> Result<Duration, String> {
    let longest = Duration::from_secs(24 * 60 * 60);
    shell::age(text)
        .ok()
        .filter(|ttl| *ttl <= longest)
        .ok_or_else(|| "data tokens are good for 1s to 1d".into())
}

fn main() -> ExitCode {
    let Arguments { log_format, design } = shell::parse();
    log_format.start();
    serve::program::run("cbt-earlier", async {
        match design {
            Design::Differential(arguments) => differential::run(arguments).await,
            Design::Aggregated(arguments) => deltas::aggregated::run(arguments).await,
            Design::CbtHttp(arguments) => deltas::sidecar::run(arguments).await,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use testkit::pages::assert_names_every_flag;

    #[test]
    fn flags_fit_together() {
        Arguments::command().debug_assert();
        let parse_first = |more: &str| {
            let whole = "cbt-earlier differential --tls-cert c --tls-key k --namespace n --service-address a.svc:6443 ";
            Arguments::try_parse_from(format!("{whole}{more}").split_whitespace()).is_ok()
        };
        assert!(parse_first(""));
        assert!(parse_first(
            "--csi-address unix:///csi/csi.sock --max-entries 1 --review-cache 0s --log-format json"
        ));
        for wrong in [
            "--service-address a.svc",
            "--service-address https://a.svc:6443",
            "--max-entries 0",
            "--max-entries 100001",
            "--max-requests 0",
            "--ready-timeout 0s",
            "--page-timeout soon",
            "--review-cache 11s",
            "--csi-address csi.sock",
        ] {
            assert!(!parse_first(wrong), "{wrong}");
        }
        let parse = |design: &str, more: &str| {
            let whole = format!("cbt-earlier {design} --tls-cert c --tls-key k --namespace n {more}");
            Arguments::try_parse_from(whole.split_whitespace()).is_ok()
        };
        assert!(parse("aggregated", "--client-qps 1 --client-burst 1 --max-entries 4096"));
        for wrong in ["--client-qps 0", "--client-burst 0", "--max-entries 0", "--max-entries 4097"] {
            assert!(!parse("aggregated", wrong), "{wrong}");
        }
        let url = "--url https://a.test/v1alpha1/deltas";
        assert!(parse("cbt-http", url));
        assert!(parse("cbt-http", "--service a/b:6443 --block-size 65536"));
        assert!(parse("cbt-http", "--service a/b --snapshot-data /a/{snapshot} --data-token-key k"));
        for wrong in [
            "",
            "--service b",
            "--service a/b:0",
            "--service a/B",
            "--url http://a.test/v1alpha1/deltas",
            "--url https://a.test/",
            "--service a/b --url https://a.test/v1alpha1/deltas",
            "--service a/b --block-size 4095",
            "--service a/b --block-size 256",
            "--service a/b --data-token-ttl 25h",
            "--service a/b --data-token-key k",
            "--service a/b --snapshot-data /a/{snapshot}",
            "--service a/b --snapshot-data /a --data-token-key k",
            "--service a/b --snapshot-data a/{snapshot} --data-token-key k",
        ] {
            assert!(!parse("cbt-http", wrong), "{wrong}");
        }
        assert!(Arguments::try_parse_from(["cbt-earlier"]).is_err());
        assert!(Arguments::try_parse_from(["cbt-earlier", "differential"]).is_err());
    }

    /// The page with all flags (docs/reference.md) names all of them, and no other.
    #[test]
    fn the_reference_has_every_flag() {
        let command = Arguments::command();
        for design in command.get_subcommands() {
            let flags = design.get_arguments().chain(command.get_arguments());
            let flags = flags.filter_map(|argument| argument.get_long());
            assert_names_every_flag(&format!("cbt-earlier {}", design.get_name()), flags);
        }
    }
}
