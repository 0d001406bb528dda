//! What the programs of servers have in common: flags that mean the same in each, the log, sockets to listen on, and the end
//! at a signal. What a program serves is its own.

use std::error::Error;
use std::io::IsTerminal;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt, registry};

/// `--log-format`.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum LogFormat {
    /// One readable line for each event.
    Text,
    /// One JSON object for each event.
    Json,
}

impl LogFormat {
    /// Sends the log to standard error, at the levels of RUST_LOG, or from info on.
    pub fn start(self) {
        let asked = std::env::var("RUST_LOG").ok().and_then(|levels| levels.parse::<Targets>().ok());
        let levels = asked.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
        let log = fmt::layer().with_writer(crate::log::stderr);
        let log = match self {
            LogFormat::Text => log.with_ansi(std::io::stderr().is_terminal()).boxed(),
            LogFormat::Json => log.json().boxed(),
        };
        registry().with(log.with_filter(levels)).init();
    }
}

/// A host and a port at which others reach a server.
pub fn host_and_port(text: &str) -> Result<String, String> {
    let (host, port) = text.rsplit_once(':').unwrap_or_default();
    let is_host = !host.is_empty() && !host.contains(['/', '@', '?', '#', ' ']);
    match is_host && port.parse::<u16>().is_ok_and(|port| port > 0) {
        true => Ok(text.to_owned()),
        false => Err("an address is a host and a port, such as snapshot-metadata.backup.svc:6443".into()),
    }
}

/// The value of `--review-cache`.
pub fn review_cache(text: &str) -> Result<Duration, String> {
    let age = base::age::read(text).filter(|age| *age <= Duration::from_secs(10));
    age.ok_or_else(|| "an answer may be kept for 0s to 10s".into())
}

/// The values of flags that bound a number of streams.
pub fn streams() -> impl Fn(&str) -> Result<usize, String> + Clone + Send + Sync {
    shell::within(1..=1_000_000)
}

/// The name of this machine, which in a pod is the pod's.
pub fn host_name() -> String {
    let name = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    name.unwrap_or_else(|| "localhost".into())
}

/// Lets the process open as many files as the machine allows. A stream is two descriptors; what is beyond the limit is
/// refused anyway.
pub fn allow_open_files() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// A listener for probes and metrics (`--http-endpoint`).
pub fn bind_http(address: SocketAddr) -> Result<TcpListener, String> {
    let bound = crate::slots::bind(address);
    bound.map_err(|error| format!("listen on {address} (--http-endpoint): {error}"))
}

/// A listener for what is served (`--bind-address`, `--port`).
pub fn bind(address: IpAddr, port: u16) -> Result<TcpListener, String> {
    let bound = crate::slots::bind((address, port).into());
    bound.map_err(|error| format!("listen on {address}:{port} (--port): {error}"))
}

/// Whether a signal has come that ends the program.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<bool>);

impl Stop {
    /// Watches from now on.
    pub fn watch() -> std::io::Result<Self> {
        let mut signals = shell::Signals::watch()?;
        let (stop, stopped) = watch::channel(false);
        tokio::spawn(async move {
            signals.next().await;
            // It is there for later readers, too.
            stop.send_replace(true);
            stop.closed().await;
        });
        Ok(Stop(stopped))
    }

    /// Whether one has come.
    pub fn is_asked(&self) -> bool {
        *self.0.borrow()
    }

    /// Ends when one has come, at once if it was before.
    pub async fn asked(&self) {
        let _ = self.0.clone().wait_for(|is_asked| *is_asked).await;
    }
}

/// Tells gRPC health of these services, and the log, what the server waits for; for ever.
pub async fn follow_readiness(
    health: HealthReporter,
    services: &[&'static str],
    missing: impl Fn() -> Option<&'static str>,
) {
    let mut was_missing = Some("it is starting");
    loop {
        let missing = missing();
        if missing != was_missing {
            match missing {
                None => tracing::info!("ready"),
                Some(reason) => tracing::warn!(reason, "not ready"),
            }
            was_missing = missing;
        }
        let status = match missing {
            None => ServingStatus::Serving,
            Some(_) => ServingStatus::NotServing,
        };
        for service in services {
            health.set_service_status(service, status).await;
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// The most threads that serve. Each keeps memory of its own for what it frees: the gateway has 256 MiB in its pod, on any machine.
const THREADS: usize = 4;

/// Runs a server to its end, and says on standard error why it failed.
pub fn run(program: &str, serve: impl Future<Output = Result<(), Box<dyn Error>>>) -> ExitCode {
    let threads = std::thread::available_parallelism().map_or(THREADS, |cores| THREADS.min(cores.get()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    let served = runtime.map_err(Box::<dyn Error>::from).and_then(|runtime| runtime.block_on(serve));
    crate::log::end(program, served.map(|()| ExitCode::SUCCESS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_a_port() {
        for good in ["a:1", "a.svc:6443", "10.0.0.1:2", "[::1]:3"] {
            assert_eq!(host_and_port(good).as_deref(), Ok(good));
        }
        for bad in ["", "a", ":1", "a:0", "a:65536", "https://a:1", "a/b:1", "u@a:1", "a b:1"] {
            assert!(host_and_port(bad).is_err(), "{bad}");
        }
    }
}
