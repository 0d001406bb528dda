//! The network of the simulation: hosts, connections between them whose bytes take time, and what can happen to both. Like TCP it
//! loses no bytes: what a link drops comes later, and what is sent to a host without power never arrives.

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::node::{Dial, Dialling, Wire};

/// What a connection holds that is not read yet, in bytes.
const WINDOW: usize = 64 << 10;

/// A router or a node.
pub type HostId = usize;

#[derive(Clone)]
pub struct Network {
    state: Arc<Mutex<State>>,
    /// Wakes those who wait in their order, which `watch` does not.
    changes: Arc<Notify>,
}

struct State {
    random: fastrand::Rng,
    hosts: Vec<Host>,
    by_address: BTreeMap<String, HostId>,
    /// Pairs of hosts whose link is cut, the lower number first.
    cut: BTreeSet<(HostId, HostId)>,
}

#[derive(Default)]
struct Host {
    /// It has no power.
    is_silent: bool,
    /// Its process is stopped. The kernel still takes connections.
    is_frozen: bool,
    /// When that ended last.
    thawed: Option<Instant>,
    is_lossy: bool,
    listener: Option<mpsc::UnboundedSender<DuplexStream>>,
    /// Ends its connections.
    connections: CancellationToken,
}

impl State {
    fn is_carried(&self, one: HostId, other: HostId) -> bool {
        let stops = |host: &Host| host.is_silent || host.is_frozen;
        !self.cut.contains(&pair(one, other)) && !stops(&self.hosts[one]) && !stops(&self.hosts[other])
    }

    fn takes_connections(&self, from: HostId, to: HostId) -> bool {
        !self.cut.contains(&pair(from, to)) && !self.hosts[to].is_silent && !self.hosts[from].is_frozen
    }

    fn latency(&mut self, one: HostId, other: HostId) -> Duration {
        let is_lossy = self.hosts[one].is_lossy || self.hosts[other].is_lossy;
        let again = if is_lossy && self.random.u8(..) < 64 { self.random.u64(200..3000) } else { 0 };
        Duration::from_micros(self.random.u64(100..2000)) + Duration::from_millis(again)
    }
}

fn pair(one: HostId, other: HostId) -> (HostId, HostId) {
    (one.min(other), one.max(other))
}

impl Network {
    pub fn new(seed: u64, hosts: usize) -> Self {
        let state = State {
            random: fastrand::Rng::with_seed(seed),
            hosts: (0..hosts).map(|_| Host::default()).collect(),
            by_address: BTreeMap::new(),
            cut: BTreeSet::new(),
        };
        Network { state: Arc::new(Mutex::new(state)), changes: Arc::default() }
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let done = change(&mut self.state.lock());
        self.changes.notify_waiters();
        done
    }

    async fn until(&self, holds: impl Fn(&State) -> bool) {
        loop {
            let changed = self.changes.notified();
            if holds(&self.state.lock()) {
                return;
            }
            changed.await;
        }
    }

    /// From now on `address` leads to this host.
    pub fn lead(&self, address: &str, to: HostId) {
        self.change(|state| state.by_address.insert(address.to_owned(), to));
    }

    pub fn host_at(&self, address: &str) -> Option<HostId> {
        self.state.lock().by_address.get(address).copied()
    }

    pub fn cut(&self, one: HostId, other: HostId, is_cut: bool) {
        self.change(|state| match is_cut {
            true => state.cut.insert(pair(one, other)),
            false => state.cut.remove(&pair(one, other)),
        });
    }

    pub fn freeze(&self, host: HostId, is_frozen: bool) {
        self.change(|state| {
            state.hosts[host].is_frozen = is_frozen;
            state.hosts[host].thawed = Some(Instant::now()).filter(|_| !is_frozen);
        });
    }

    pub fn lose(&self, host: HostId, is_lossy: bool) {
        self.change(|state| state.hosts[host].is_lossy = is_lossy);
    }

    /// The process listens; what comes in.
    pub fn listen(&self, host: HostId) -> mpsc::UnboundedReceiver<DuplexStream> {
        let (listener, incoming) = mpsc::unbounded_channel();
        self.change(|state| state.hosts[host].listener = Some(listener));
        incoming
    }

    /// Its connections end, as when its process has ended. It listens no more if `is_dead`.
    pub fn reset(&self, host: HostId, is_dead: bool) {
        self.change(|state| {
            let host = &mut state.hosts[host];
            std::mem::take(&mut host.connections).cancel();
            if is_dead {
                host.listener = None;
            }
        });
    }

    /// The host loses its power, or has it again: then the others learn that their connections are gone.
    pub fn power(&self, host: HostId, is_on: bool) {
        self.change(|state| {
            state.hosts[host].is_silent = !is_on;
            state.hosts[host].listener = None;
        });
        if is_on {
            self.reset(host, true);
        }
    }

    /// Does the work of a host, except while the host is frozen.
    pub async fn unless_frozen<T>(&self, host: HostId, work: impl Future<Output = T>) -> T {
        let (mut work, mut thawed) = (pin!(work), None);
        poll_fn(|context| {
            while self.state.lock().hosts[host].is_frozen {
                let network = self.clone();
                let thawed =
                    thawed.get_or_insert_with(|| Box::pin(async move { network.thawed(host).await }));
                std::task::ready!(thawed.as_mut().poll(context));
            }
            thawed = None;
            work.as_mut().poll(context)
        })
        .await
    }

    /// Whether it is frozen, or was at a time since then.
    pub fn was_frozen(&self, host: HostId, since: Instant) -> bool {
        let host = &self.state.lock().hosts[host];
        host.is_frozen || host.thawed > Some(since)
    }

    pub async fn thawed(&self, host: HostId) {
        self.until(|state| !state.hosts[host].is_frozen).await;
    }

    /// Whether bytes get from one host to the other now.
    pub fn reaches(&self, one: HostId, other: HostId) -> bool {
        let state = self.state.lock();
        state.is_carried(one, other) && state.hosts[other].listener.is_some()
    }

    async fn pause(&self, from: HostId, to: HostId) {
        let latency = self.state.lock().latency(from, to);
        sleep(latency).await;
    }

    async fn connect(&self, from: HostId, address: &str) -> io::Result<Box<dyn Wire>> {
        let mut to = self.host_at(address);
        let to = loop {
            let Some(host) = to else { return Err(io::ErrorKind::HostUnreachable.into()) };
            self.pause(from, host).await;
            self.until(|state| state.takes_connections(from, host)).await;
            // Another may have the address by now.
            to = self.host_at(address);
            if to == Some(host) {
                break host;
            }
        };
        let (near, one) = duplex(WINDOW);
        let (two, far) = duplex(WINDOW);
        let ends = {
            let state = self.state.lock();
            let listener = state.hosts[to].listener.as_ref().ok_or(io::ErrorKind::ConnectionRefused)?;
            listener.send(far).map_err(|_| io::ErrorKind::ConnectionRefused)?;
            [from, to].map(|host| state.hosts[host].connections.clone())
        };
        let network = self.clone();
        tokio::spawn(async move {
            let ((one_in, one_out), (two_in, two_out)) = (split(one), split(two));
            tokio::select! {
                biased;
                () = ends[0].cancelled() => {}
                () = ends[1].cancelled() => {}
                _ = async { tokio::join!(network.carry(from, to, one_in, two_out), network.carry(to, from, two_in, one_out)) } => {}
            }
        });
        Ok(Box::new(near))
    }

    async fn carry(
        &self,
        from: HostId,
        to: HostId,
        mut source: ReadHalf<DuplexStream>,
        mut target: WriteHalf<DuplexStream>,
    ) -> io::Result<()> {
        let mut bytes = vec![0; WINDOW];
        loop {
            let read = source.read(&mut bytes).await?;
            self.pause(from, to).await;
            self.until(|state| state.is_carried(from, to)).await;
            if read == 0 {
                return target.shutdown().await;
            }
            target.write_all(&bytes[..read]).await?;
        }
    }
}

/// The network as one host has it.
pub struct From(pub HostId, pub Network);

impl Dial for From {
    fn dial<'d>(&'d self, address: &'d str) -> Dialling<'d> {
        Box::pin(self.1.connect(self.0, address))
    }
}
