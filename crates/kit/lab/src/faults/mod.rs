//! `cbt-lab faults`: a proxy in front of any CSI driver's socket, or a gateway's address. It passes every call on, and gets
//! wrong what it is asked to.
//!
//! - `catalog.rs` is the one table of faults, `spec.rs` how one is written, `active.rs` which are on and whom they meet,
//!   `control.rs` the HTTP API that changes that.
//! - `caller.rs` is who asks a gateway.
//! - `proxy.rs` passes a call on; `request.rs` reads what it asks, `seen.rs` remembers what happened, `change.rs` changes the
//!   messages of a stream and `play.rs` sends them.
//! - `address.rs`, `listen.rs` and `upstream.rs` are the two sides of the connection.
//!
//! gRPC is relayed as bytes. Only the streams, the markers and the few calls that show what happened are decoded, so later versions
//! of CSI pass unchanged.

mod active;
mod address;
mod caller;
mod catalog;
mod change;
mod control;
mod listen;
mod play;
mod proxy;
mod request;
mod seen;
mod spec;
mod upstream;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde::Serialize;
use shell::Usage;
use tokio::net::TcpListener;

use super::{Done, Output};
use active::{Active, Row};
pub(crate) use address::Address;
pub(crate) use caller::Caller;
use listen::CERTIFICATES;
pub(crate) use listen::{Listener, Tls};
pub(crate) use play::{answer, response, trailers};
pub(crate) use proxy::Proxy;
pub(crate) use request::Stream;
use spec::{Spec, parse_all, parse_some};
pub(crate) use upstream::{Local, Upstream};

/// Proxy a CSI driver's socket or a gateway's address, and inject faults.
///
/// Every call is handed on. Those that meet a fault are refused, delayed, cut or answered wrongly, always in the same way for
/// a seed. A fault is written name:key=value,... and is named with --fault or in a file, or turned on and off over HTTP
/// (--control). A request can also name one: in its gRPC metadata cbt-lab-fault, or in the parameter cbt-lab.fault of
/// CreateSnapshot (so of a VolumeSnapshotClass). The latter is for all calls about that snapshot.
///
/// Exit codes: 0 after a signal, 1 it could not start, 2 wrong usage.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Where clients connect: unix:///path, http://host:port, or https://host:port.
    #[arg(long, value_name = "ADDRESS", required_unless_present = "list")]
    listen: Option<Address>,
    /// What calls are handed on to: unix:///path of a driver, http://host:port or https://host:port of a gateway.
    #[arg(long, value_name = "ADDRESS", required_unless_present = "list")]
    upstream: Option<Address>,
    /// Authority of the upstream's certificate, in PEM; needed for https://.
    #[arg(long, value_name = "FILE")]
    upstream_ca: Option<PathBuf>,
    #[command(flatten)]
    faults: Faults,
    #[command(flatten)]
    tls: TlsArguments,
    /// Print the faults and what they take, and start nothing.
    #[arg(long)]
    list: bool,
    /// What is printed on standard output when it is ready, or for --list.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

/// Which faults are on at the start, and how that is changed.
#[derive(Debug, Args)]
pub(crate) struct Faults {
    /// A fault that is on from the start, as in cut:after=3,code=OK; may be given several times.
    #[arg(long, value_name = "FAULT")]
    fault: Vec<String>,
    /// File of faults, one a line; # starts a comment.
    #[arg(long, value_name = "FILE")]
    faults_file: Option<PathBuf>,
    /// What decides where a fault leaves it to chance.
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = shell::within::<u64>(0..=u64::MAX))]
    pub seed: u64,
    /// Address of the HTTP API that turns faults on and off, as in 127.0.0.1:9900; port 0 takes a free one. It
    /// has no access control.
    #[arg(long, value_name = "HOST:PORT", value_parser = control_address)]
    control: Option<String>,
}

/// What an https:// address shows.
#[derive(Debug, Args)]
pub(crate) struct TlsArguments {
    /// Certificate for https://, in PEM. Default: one of an authority made for this run.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Its key, in PEM.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// File that the authority made for this run is written to, in PEM.
    #[arg(long, value_name = "FILE", conflicts_with = "tls_cert")]
    ca_file: Option<PathBuf>,
}

fn control_address(text: &str) -> Result<String, String> {
    let port =
        text.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
    match port {
        Some(Ok(_)) => Ok(text.to_owned()),
        _ => Err("an address is a host and a port, such as 127.0.0.1:9900".into()),
    }
}

impl Faults {
    /// All that are on at the start.
    fn specs(&self) -> Result<Vec<Spec>, Box<dyn Error>> {
        let mut specs = Vec::new();
        if let Some(path) = &self.faults_file {
            let text =
                std::fs::read_to_string(path).map_err(|error| format!("read {}: {error}", path.display()))?;
            specs.extend(parse_all(&text).map_err(|error| Usage(format!("{}: {error}", path.display())))?);
        }
        for text in &self.fault {
            specs.extend(parse_some(text).map_err(|error| Usage(format!("--fault: {error}")))?);
        }
        Ok(specs)
    }
}

impl TlsArguments {
    /// What a server at that address shows, if it is one over TLS.
    pub fn tls(&self, address: &Address) -> Result<Option<Tls>, Box<dyn Error>> {
        let Address::Tcp { host, tls: true, .. } = address else {
            return match self.tls_cert.as_ref().or(self.ca_file.as_ref()) {
                Some(_) => {
                    Err(Usage(format!("{address} is not https://, so it needs no certificate")).into())
                }
                None => Ok(None),
            };
        };
        if let (Some(chain), Some(key)) = (&self.tls_cert, &self.tls_key) {
            return Ok(Some(Tls::of(chain, key)?));
        }
        let Some(file) = &self.ca_file else {
            let why = "needs --ca-file, or --tls-cert and --tls-key: clients have to know whom to trust";
            return Err(Usage(format!("{address} {why}")).into());
        };
        let (tls, ca) = Tls::made(host)?;
        std::fs::write(file, ca).map_err(|error| format!("write {}: {error}", file.display()))?;
        Ok(Some(tls))
    }
}

/// What is printed when it is ready.
#[derive(Serialize)]
struct Ready {
    /// Where clients connect.
    listen: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upstream: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    control: Option<String>,
    faults: Vec<Row>,
}

pub(super) fn run(arguments: Arguments) -> Done {
    if arguments.list {
        shell::show(arguments.output == Output::Json, &catalog::all(), catalog::text)?;
        return Ok(ExitCode::SUCCESS);
    }
    until_stopped(async {
        let (Some(listen), Some(upstream)) = (&arguments.listen, &arguments.upstream) else {
            return Err("it needs --listen and --upstream".into());
        };
        if listen == upstream {
            let why = "clients connect to one, and the driver answers at the other";
            return Err(Usage(format!("--listen and --upstream are both {listen}: {why}")).into());
        }
        let behind = Upstream::at(upstream, arguments.upstream_ca.as_deref())?;
        let tls = arguments.tls.tls(listen)?;
        let listener = Listener::bind(listen, tls).await?;
        serve(behind, vec![listener], &arguments.faults, Some(upstream.to_string()), arguments.output).await
    })
}

/// Runs a server until a signal ends it. An error: it could not start.
pub(crate) fn until_stopped(server: impl Future<Output = Result<(), Box<dyn Error>>>) -> Done {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let mut signals = shell::Signals::watch()?;
        tokio::select! {
            ended = server => ended,
            () = signals.next() => Ok(()),
        }
    });
    runtime.shutdown_background();
    serve::log::flush();
    ended.map(|()| ExitCode::SUCCESS)
}

/// Serves what is behind, with faults, and tells when it is ready.
pub(crate) async fn serve(
    behind: Upstream,
    listeners: Vec<Listener>,
    faults: &Faults,
    upstream: Option<String>,
    output: Output,
) -> Result<(), Box<dyn Error>> {
    let specs = faults.specs()?;
    if let Some(spec) = specs.iter().find(|spec| CERTIFICATES.contains(&spec.entry.kind))
        && !listeners.iter().any(Listener::has_certificates)
    {
        let why =
            format!("{spec} needs an https:// address with --ca-file: it shows a certificate of its own");
        return Err(Usage(why).into());
    }
    let proxy = Proxy::new(behind, Active::new(faults.seed, specs), faults.seed);
    let mut ready = Ready {
        listen: listeners.iter().map(|listener| listener.address.to_string()).collect(),
        upstream,
        control: None,
        faults: proxy.active.rows(),
    };
    let mut tasks = tokio::task::JoinSet::new();
    if let Some(address) = &faults.control {
        let failed = |error: std::io::Error| format!("--control {address}: {error}");
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        ready.control = Some(format!("http://{}", listener.local_addr().map_err(failed)?));
        tasks.spawn(serve::http::serve(listener, control::router(proxy.clone())));
    }
    for listener in listeners {
        tasks.spawn(listener.serve(Arc::clone(&proxy)));
    }
    // A program that reads the first line alone and closes the pipe must not stop the server.
    if let Err(error) = announce(&ready, output) {
        shell::say!("cbt-lab: {error}");
    }
    while tasks.join_next().await.is_some() {}
    Ok(())
}

/// JSON is one line.
fn announce(ready: &Ready, output: Output) -> std::io::Result<()> {
    if output == Output::Json {
        return shell::print(&(serde_json::to_string(ready)? + "\n"));
    }
    let before = ready.upstream.as_ref().map_or(String::new(), |upstream| format!(", before {upstream}"));
    let mut text = format!("serving at {}{before}\n", ready.listen.join(" and "));
    if let Some(control) = &ready.control {
        text += &format!("faults are turned on and off at {control}/faults\n");
    }
    ready.faults.iter().for_each(|row| text += &format!("on: {}\n", row.fault));
    shell::print(&text)
}
