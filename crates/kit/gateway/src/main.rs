//! `deltapath-gateway`: the Kubernetes SnapshotMetadata API (KEP-3314) in front of any CSI driver. Flags are here, the two
//! calls in `service`.
//!
//! - A call whose reviews are cached sends no request to the API server. Otherwise it makes two reviews, and one more if the
//!   base of a delta is a VolumeSnapshot that still exists.
//! - If the watch says that a snapshot is not usable, the API server is asked before the client is refused: a watch may lag.
//! - The driver's frames are relayed unchanged. Both contracts have the same fields in these messages
//!   (`tests/suite/csi_contract.rs` of the driver), so this is correct.
// They panic where the output is closed: `shell` does not.
#![warn(clippy::print_stdout, clippy::print_stderr)]
#![forbid(unsafe_code)]

mod certificates;
mod driver;
mod health;
mod objects;
mod record;
mod resolve;
mod server;
mod service;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use base::Endpoint;
use clap::Parser;
use serve::program::{LogFormat, host_and_port, review_cache, streams};

/// Thousands of connections come and go, of different sizes: glibc keeps more of their memory.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The Kubernetes SnapshotMetadata API (KEP-3314) in front of any CSI driver.
///
/// Backup applications ask it which blocks of a VolumeSnapshot hold data and which changed since another. It checks who they
/// are and what they may read, and passes the CSI driver's answer on as it is. It writes one audit line (JSON) a call to
/// standard output and its log to standard error.
///
/// On SIGTERM, SIGINT and SIGHUP it takes no new calls, lets streams end for up to --drain, and exits with 0. Exit codes: 0 stopped,
/// 1 failed (the reason is on standard error), 2 wrong usage.
#[derive(Debug, Parser)]
#[command(name = "deltapath-gateway", version, max_term_width = 100, args_override_self = true)]
struct Arguments {
    /// Socket of the CSI driver, which may come and go.
    #[arg(long, value_name = "ENDPOINT", default_value = "/run/csi/socket")]
    csi_address: Endpoint,
    /// Port for the API, over TLS.
    #[arg(long, default_value_t = 50051)]
    port: u16,
    /// IP address to listen on.
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    bind_address: IpAddr,
    /// Address for HTTP: Prometheus metrics at /metrics, and /healthz and /readyz. `:PORT` means all addresses.
    #[arg(long, value_name = "[ADDRESS]:PORT", default_value = ":8080", value_parser = shell::http_endpoint)]
    http_endpoint: SocketAddr,
    /// Kubeconfig file. Default: the pod's service account, or what kubectl would take.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Audience that tokens must be for. Default: the one in the driver's SnapshotMetadataService, which is watched.
    #[arg(long, value_name = "NAME", required_if_eq("manage_certificates", "true"))]
    audience: Option<String>,

    /// Certificate chain, in PEM. The file is watched: a new one is used without a restart.
    #[arg(
        long,
        env = "TLS_CERT_PATH",
        value_name = "FILE",
        requires = "tls_key",
        required_unless_present = "manage_certificates"
    )]
    tls_cert: Option<PathBuf>,
    /// Its key, in PEM.
    #[arg(long, env = "TLS_KEY_PATH", value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Make a CA and certificates, keep them in a Secret, renew them, and keep the driver's SnapshotMetadataService up to
    /// date. One elected replica does it, all of them use the certificates.
    #[arg(long, conflicts_with_all = ["tls_cert", "tls_key"], requires_all = ["service_address", "namespace"])]
    manage_certificates: bool,
    /// Host and port at which clients reach this API: `address` of the SnapshotMetadataService.
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    service_address: Option<String>,
    /// `requireBaseSnapshotForDelta` of the SnapshotMetadataService: whether clients must keep a base snapshot until they
    /// have asked for the delta. `false` is for drivers that keep deleted snapshots as a base.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    require_base_snapshot: bool,
    /// Namespace of the Secret and of the Lease.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME")]
    namespace: Option<String>,
    /// Name of this replica in the election. Default: the host's name.
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pod_name: Option<String>,
    /// Secret in which certificates are kept.
    #[arg(long, value_name = "NAME", default_value = "deltapath-snapshot-metadata-tls")]
    certificate_secret: String,
    /// Lease of the elected replica.
    #[arg(long, value_name = "NAME", default_value = "deltapath-gateway")]
    lease: String,
    /// How long a CA is valid, such as 3650d. The next one comes after two thirds of it.
    #[arg(long, value_name = "AGE", default_value = "3650d", value_parser = shell::age)]
    ca_lifetime: Duration,
    /// How long a serving certificate is valid. The next one comes after two thirds of it.
    #[arg(long, value_name = "AGE", default_value = "90d", value_parser = shell::age)]
    certificate_lifetime: Duration,
    /// How long a new CA is published before it signs, and an old one after.
    #[arg(long, value_name = "AGE", default_value = "1h", value_parser = shell::age)]
    ca_overlap: Duration,

    /// Maximum number of streams at once.
    #[arg(long, value_name = "COUNT", default_value_t = 1024, value_parser = streams())]
    max_streams: usize,
    /// Maximum number of streams of one user at once.
    #[arg(long, value_name = "COUNT", default_value_t = 256, value_parser = streams())]
    max_streams_per_client: usize,
    /// How long a client may leave a stream unread before it is ended. A stream that is read may last as long as it needs.
    #[arg(long, value_name = "AGE", default_value = "10m", value_parser = shell::age)]
    idle_timeout: Duration,
    /// How long a positive review of a token or a right is used, at most 10s. 0s: not at all.
    #[arg(long, value_name = "AGE", default_value = "10s", value_parser = review_cache)]
    review_cache: Duration,
    /// How long streams may continue after SIGTERM.
    #[arg(long, value_name = "AGE", default_value = "30s", value_parser = shell::age)]
    drain: Duration,
    /// Format of the log on standard error. RUST_LOG sets the level (default: info).
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

fn main() -> ExitCode {
    let arguments = shell::parse::<Arguments>();
    arguments.log_format.start();
    serve::program::allow_open_files();
    serve::program::run("deltapath-gateway", server::run(arguments))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use testkit::pages::assert_names_every_flag;

    #[test]
    fn flags_fit_together() {
        Arguments::command().debug_assert();
        let parse = |line: &str| Arguments::try_parse_from(line.split(' ')).is_ok();
        assert!(parse("gateway --tls-cert c --tls-key k"));
        assert!(parse(
            "gateway --manage-certificates --audience a --namespace n --service-address a.svc:6443"
        ));
        for wrong in [
            "gateway",
            "gateway --tls-cert c",
            "gateway --manage-certificates --namespace n --service-address a.svc:6443",
            "gateway --manage-certificates --audience a --namespace n --service-address a.svc",
            "gateway --tls-cert c --tls-key k --review-cache 11s",
            "gateway --tls-cert c --tls-key k --idle-timeout 0s",
            "gateway --tls-cert c --tls-key k --csi-address csi.sock",
            "gateway --tls-cert c --tls-key k --ca-lifetime 99999999d",
            "gateway --tls-cert c --tls-key k --certificate-lifetime 36501d",
            "gateway --tls-cert c --tls-key k --max-streams 0",
            "gateway --tls-cert c --tls-key k --max-streams 1000001",
            "gateway --tls-cert c --tls-key k --max-streams-per-client 0",
            "gateway --tls-cert c --tls-key k --max-streams-per-client 18446744073709551615",
        ] {
            assert!(!parse(wrong), "{wrong}");
        }
    }

    /// The page with all flags (docs/reference.md) names all of them, and no other.
    #[test]
    fn the_reference_has_every_flag() {
        let command = Arguments::command();
        let flags = command.get_arguments().filter_map(|argument| argument.get_long());
        assert_names_every_flag("deltapath-gateway", flags);
    }
}
