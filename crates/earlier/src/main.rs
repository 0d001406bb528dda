//! `cbt-earlier`: the earlier designs of KEP-3314, each a subcommand, in front of any CSI driver with a SnapshotMetadata
//! service. Flags are here, each design in a module of its own.
#![forbid(unsafe_code)]

mod differential;
mod driver;

use std::io::IsTerminal;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use base::Endpoint;
use clap::{Parser, Subcommand, ValueEnum};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt, registry};

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
}

/// DifferentialSnapshot: a resource that gets a callback URL, at which the changed blocks are asked for in pages.
///
/// A user creates a DifferentialSnapshot that names two VolumeSnapshots, waits for status.state `url-ready`, and asks
/// status.callbackURL with a bearer token: GET URL?maxEntries=1000, and again with startOffset=NextOffset until NextOffset is
/// empty. The token is for the audience of --audience; its user must be allowed to get the DifferentialSnapshot and both
/// VolumeSnapshots.
///
/// One replica, which is elected, writes the status; the others answer /readyz with 503. On SIGTERM and SIGINT it takes no
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
    /// Port of the callback listener, over TLS.
    #[arg(long, default_value_t = 6443)]
    port: u16,
    /// IP address on which the callback listener listens.
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    bind_address: IpAddr,
    /// Address for HTTP: Prometheus metrics at /metrics, and /healthz and /readyz. `:PORT` means all addresses.
    #[arg(long, value_name = "[ADDRESS]:PORT", default_value = ":8080", value_parser = http_endpoint)]
    http_endpoint: SocketAddr,
    /// Host and port at which users reach the callback listener: the begin of status.callbackURL.
    #[arg(long, value_name = "HOST:PORT", value_parser = service_address)]
    service_address: String,
    /// Certificate chain of the callback listener, in PEM. The file is watched: a new one is used without a restart.
    #[arg(long, value_name = "FILE")]
    tls_cert: PathBuf,
    /// Its key, in PEM.
    #[arg(long, value_name = "FILE")]
    tls_key: PathBuf,
    /// Audience that tokens must be for.
    #[arg(long, value_name = "NAME", default_value = "cbt-earlier")]
    audience: String,
    /// Kubeconfig file. Default: the pod's service account, or what kubectl would take.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Namespace of the Lease.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME")]
    namespace: String,
    /// Name of this replica in the election.
    #[arg(long, env = "POD_NAME", value_name = "NAME", default_value_t = host_name())]
    pod_name: String,
    /// Lease of the elected replica.
    #[arg(long, value_name = "NAME", default_value = "cbt-earlier-differential")]
    lease: String,
    /// How long the VolumeSnapshots may take to be ready before the DifferentialSnapshot is `failed`, such as 5m. It still
    /// becomes `url-ready` when they are.
    #[arg(long, value_name = "AGE", default_value = "5m", value_parser = age)]
    ready_timeout: Duration,
    /// How long a page may take.
    #[arg(long, value_name = "AGE", default_value = "60s", value_parser = age)]
    page_timeout: Duration,
    /// Blocks in a page at most, and where a request does not say how many.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    max_entries: u32,
    /// Requests to the callback listener at once. Further ones are answered with 429.
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    max_requests: u16,
    /// How long a positive review of a token or a right is believed, at most 10s. 0s: not at all.
    #[arg(long, value_name = "AGE", default_value = "10s", value_parser = review_cache)]
    review_cache: Duration,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormat {
    /// A readable line an event.
    Text,
    /// A JSON object an event.
    Json,
}

fn http_endpoint(text: &str) -> Result<SocketAddr, String> {
    let text = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text.to_owned() };
    text.parse()
        .map_err(|_| "an endpoint is an IP address and a port, such as 127.0.0.1:8080, or :8080".into())
}

fn service_address(text: &str) -> Result<String, String> {
    let (host, port) = text.rsplit_once(':').unwrap_or_default();
    let is_host = !host.is_empty() && !host.contains(['/', '@', '?', '#', ' ']);
    match is_host && port.parse::<u16>().is_ok_and(|port| port > 0) {
        true => Ok(text.to_owned()),
        false => Err("an address is a host and a port, such as cbt-earlier.backup.svc:6443".into()),
    }
}

fn age(text: &str) -> Result<Duration, String> {
    match base::age::parse(text) {
        Some(age) if !age.is_zero() => Ok(age),
        _ => Err("a length of time is a number above 0 and a unit (s, m, h, d), such as 5m".into()),
    }
}

fn review_cache(text: &str) -> Result<Duration, String> {
    let age = base::age::parse(text).filter(|age| *age <= Duration::from_secs(10));
    age.ok_or_else(|| "reviews are believed for 0s to 10s".into())
}

fn host_name() -> String {
    let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| "cbt-earlier".into())
}

fn start_tracing(format: LogFormat) {
    let asked = std::env::var("RUST_LOG").ok().and_then(|levels| levels.parse::<Targets>().ok());
    let levels = asked.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let log = fmt::layer().with_writer(std::io::stderr);
    let log = match format {
        LogFormat::Text => log.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => log.json().boxed(),
    };
    registry().with(log.with_filter(levels)).init();
}

fn main() -> ExitCode {
    let Arguments { log_format, design } = Arguments::parse();
    start_tracing(log_format);
    let served = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(Box::<dyn std::error::Error>::from)
        .and_then(|runtime| match design {
            Design::Differential(arguments) => runtime.block_on(differential::run(arguments)),
        });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cbt-earlier: {}", base::report(&*error));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn flags_fit_together() {
        Arguments::command().debug_assert();
        let parse = |more: &str| {
            let whole = "cbt-earlier differential --tls-cert c --tls-key k --namespace n --service-address a.svc:6443 ";
            Arguments::try_parse_from(format!("{whole}{more}").split_whitespace()).is_ok()
        };
        assert!(parse(""));
        assert!(parse(
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
            assert!(!parse(wrong), "{wrong}");
        }
        assert!(Arguments::try_parse_from(["cbt-earlier"]).is_err());
        assert!(Arguments::try_parse_from(["cbt-earlier", "differential"]).is_err());
    }

    /// The page with all flags (docs/reference.md) names all of them, and no other.
    #[test]
    fn the_reference_has_every_flag() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference.md");
        let page = std::fs::read_to_string(page).expect("the reference");
        let command = Arguments::command();
        for design in command.get_subcommands() {
            let title = format!("Flags of `cbt-earlier {}`", design.get_name());
            let section = page.split("\n## ").find(|section| section.starts_with(&title));
            let section = section.unwrap_or_else(|| panic!("no section {title}"));
            let arguments = design.get_arguments().chain(command.get_arguments());
            let flags: Vec<_> = arguments.filter_map(|argument| argument.get_long()).collect();
            for flag in flags.iter().filter(|flag| !["help", "version"].contains(flag)) {
                assert!(section.contains(&format!("`--{flag}`")), "--{flag} is not in the reference");
            }
            for named in section.split("`--").skip(1) {
                let named: String =
                    named.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
                assert!(flags.contains(&named.as_str()), "the reference names --{named}, which is no flag");
            }
        }
    }
}
