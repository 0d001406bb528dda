//! Networks of a test's own, so that nothing of the machine's is touched: namespaces, made and linked with `ip`, that end with
//! the test. A test that runs in one sees the loopback device and the links that it makes.

use std::future::Future;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use nix::sched::{CloneFlags, unshare};

/// Runs a test in a network of its own. The threads that it starts are in there too, and the programs. Its hosts reach each other
/// through it.
pub fn alone<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    let in_there = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace");
        ip(&["link", "set", "lo", "up"]);
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("a network that forwards");
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
        runtime.block_on(test());
    });
    if let Err(panic) = in_there.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Gives the loopback device one more address: one that is not a loopback address, and leads nowhere else.
pub fn add_local_address(address: &str) {
    ip(&["address", "add", &format!("{address}/32"), "dev", "lo"]);
}

pub fn ip(arguments: &[&str]) {
    let done =
        Command::new("ip").args(arguments).stdin(Stdio::null()).output().expect("ip (Debian: iproute2)");
    assert!(done.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Another host: a namespace that a link leads to. It is removed when this is dropped and its programs have ended.
pub struct Host {
    holder: Child,
    link: String,
    /// Its own address, and the one that this side has for it.
    pub address: String,
    number: u8,
}

impl Host {
    /// One that is linked to the network that the caller is in, [`alone`].
    pub fn new(number: u8) -> Self {
        let mut holder = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo ready; exec sleep infinity"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare");
        let mut line = String::new();
        let stdout = holder.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("read");
        assert_eq!(line, "ready\n", "no namespace");
        let host =
            Host { holder, link: format!("host{number}"), address: format!("10.99.{number}.2"), number };
        let pid = host.holder.id().to_string();
        ip(&["link", "add", &host.link, "type", "veth", "peer", "name", "eth0", "netns", &pid]);
        ip(&["address", "add", &format!("10.99.{number}.1/30"), "dev", &host.link]);
        ip(&["link", "set", &host.link, "up"]);
        host.ip(&["link", "set", "lo", "up"]);
        host.ip(&["address", "add", &format!("{}/30", host.address), "dev", "eth0"]);
        host.mend();
        host
    }

    fn ip(&self, arguments: &[&str]) {
        let net = format!("--net=/proc/{}/ns/net", self.holder.id());
        let done = Command::new("nsenter").arg(net).arg("ip").args(arguments).output().expect("nsenter");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "ip {arguments:?} on host {}: {said}", self.number);
    }

    /// What a command line begins with that is to run there.
    pub fn enter(&self) -> Vec<String> {
        vec!["nsenter".to_owned(), format!("--net=/proc/{}/ns/net", self.holder.id()), "--".to_owned()]
    }

    /// Cuts the link: what is sent is lost, on connections that are there too.
    pub fn cut(&self) {
        self.ip(&["link", "set", "eth0", "down"]);
    }

    /// Mends it. The way to the other hosts went with the link.
    pub fn mend(&self) {
        self.ip(&["link", "set", "eth0", "up"]);
        self.ip(&["route", "replace", "default", "via", &format!("10.99.{}.1", self.number)]);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
