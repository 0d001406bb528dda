//! A relay before an S3 server, which gets one thing wrong on demand.

use std::io::{BufRead, BufReader, Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// What goes wrong with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is done, and the answer says that it is not.
    LoseAnswer,
    /// It is refused with this status, and not done.
    Refuse(u16),
    /// It is done, and the connection breaks in the middle of the answer.
    Cut,
    /// It waits, as all that come after it, until the relay is opened again.
    Hold,
}

#[derive(Default)]
struct State {
    /// The method, a part of the path, and what goes wrong with the next such request.
    script: Vec<(&'static str, &'static str, Fault)>,
    is_held: bool,
    /// Bytes a second of what is sent.
    rate: Option<usize>,
    /// What each answer takes.
    delay: Duration,
    /// Requests that came, and those that wait.
    seen: usize,
    waiting: usize,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

pub struct Proxy {
    pub port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Relays to a port of this host.
    pub fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::<Shared>::default();
        let of = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let of = of.clone();
                std::thread::spawn(move || of.relay(client, to));
            }
        });
        Proxy { port, shared }
    }

    /// What goes wrong with the next request of this method with this in its path.
    pub fn next(&self, method: &'static str, part: &'static str, fault: Fault) {
        self.shared.state.lock().unwrap().script.push((method, part, fault));
    }

    /// Nothing goes wrong any more.
    pub fn forget(&self) {
        self.shared.state.lock().unwrap().script.clear();
    }

    pub fn limit(&self, rate: usize) {
        self.shared.state.lock().unwrap().rate = Some(rate);
    }

    pub fn delay(&self, delay: Duration) {
        self.shared.state.lock().unwrap().delay = delay;
    }

    /// How many requests came.
    pub fn seen(&self) -> usize {
        self.shared.state.lock().unwrap().seen
    }

    /// Waits until a request is held.
    pub fn wait_held(&self) {
        self.wait_waiting(1);
    }

    /// Waits until so many requests are held at once.
    pub fn wait_waiting(&self, requests: usize) {
        let state = self.shared.state.lock().unwrap();
        let few = |state: &mut State| !state.is_held || state.waiting < requests;
        let held = self.shared.changed.wait_timeout_while(state, testkit::PATIENCE, few).unwrap();
        assert!(!held.1.timed_out(), "{} of {requests} requests are held", held.0.waiting);
    }

    pub fn open(&self) {
        self.shared.state.lock().unwrap().is_held = false;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// The fault of a request, which waits while all are held.
    fn pass(&self, method: &str, path: &str) -> (Option<Fault>, Option<usize>) {
        let mut state = self.state.lock().unwrap();
        let place = state.script.iter().position(|(of, part, _)| *of == method && path.contains(part));
        let fault = place.map(|place| state.script.remove(place).2);
        state.seen += 1;
        state.is_held |= fault == Some(Fault::Hold);
        state.waiting += 1;
        self.changed.notify_all();
        let mut state = self.changed.wait_while(state, |state| state.is_held).unwrap();
        state.waiting -= 1;
        (fault, state.rate)
    }

    fn relay(&self, mut client: TcpStream, to: u16) -> Result<()> {
        let mut server = TcpStream::connect(("127.0.0.1", to))?;
        let (mut requests, mut answers) =
            (BufReader::new(client.try_clone()?), BufReader::new(server.try_clone()?));
        loop {
            let head = head(&mut requests)?;
            let mut words = head.split(' ');
            let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
            if method.is_empty() {
                return Ok(());
            }
            let (fault, rate) = self.pass(method, path);
            let delay = self.state.lock().unwrap().delay;
            std::thread::sleep(delay);
            let refused = match fault {
                Some(Fault::LoseAnswer) => Some(500),
                Some(Fault::Refuse(code)) => Some(code),
                Some(Fault::Hold | Fault::Cut) | None => None,
            };
            let mut body = (&mut requests).take(length(&head));
            if matches!(fault, Some(Fault::Refuse(_))) {
                std::io::copy(&mut body, &mut std::io::sink())?;
            } else {
                server.write_all(head.as_bytes())?;
                send(&mut body, &mut server, rate)?;
                let answer = self::head(&mut answers)?;
                let mut content = vec![0; if method == "HEAD" { 0 } else { length(&answer) as usize }];
                answers.read_exact(&mut content)?;
                if fault == Some(Fault::Cut) {
                    client.write_all(answer.as_bytes())?;
                    return client.write_all(&content[..content.len() / 2]);
                }
                if refused.is_none() {
                    client.write_all(answer.as_bytes())?;
                    client.write_all(&content)?;
                }
            }
            if let Some(code) = refused {
                // As servers do it, over several lines, and with what a terminal must not get.
                let xml = "<?xml version=\"1.0\"?>\n<Error>\n  <Code>\x1b[31mNo</Code>\n</Error>\n";
                let length = xml.len();
                client.write_all(
                    format!("HTTP/1.1 {code} no\r\ncontent-length: {length}\r\n\r\n{xml}").as_bytes(),
                )?;
            }
        }
    }
}

/// Up to the empty line; empty where there is no more.
pub fn head(from: &mut impl BufRead) -> Result<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if from.read_line(&mut head)? == 0 {
            return Ok(String::new());
        }
    }
    Ok(head)
}

fn length(head: &str) -> u64 {
    let head = head.to_ascii_lowercase();
    assert!(!head.contains("transfer-encoding"), "{head}");
    let lengths = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    lengths.map_or(0, |length| length.trim().parse().expect("a length"))
}

fn send(body: &mut impl Read, server: &mut TcpStream, rate: Option<usize>) -> Result<()> {
    let (began, mut sent, mut part) = (Instant::now(), 0, vec![0; 32 << 10]);
    loop {
        let count = body.read(&mut part)?;
        if count == 0 {
            return Ok(());
        }
        server.write_all(&part[..count])?;
        sent += count;
        let due = rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(sent as f64 / rate as f64));
        std::thread::sleep(due.saturating_sub(began.elapsed()));
    }
}
