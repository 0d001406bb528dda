//! `cbt-backup run` and an API server that is away, busy and broken for moments. What it makes of a real one is in the
//! gateway's tests; this one keeps objects and answers as it is told.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Result, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testkit::until;

use crate::tool::{Place, Running, ended, text};

/// How an answer is spoiled.
#[derive(Clone, Copy)]
enum Trouble {
    Code(u16),
    /// The connection is closed.
    Reset,
    /// No answer comes.
    Silent,
    /// Another run is quicker, and the connection is closed.
    Taken,
}

#[derive(Default)]
struct State {
    objects: HashMap<String, Value>,
    /// How many of them were made here.
    made: usize,
    /// What went wrong with a request for an object whose path ends so: from when on, until when.
    troubles: Vec<(&'static str, Trouble, Duration, Duration)>,
    /// What goes wrong with the next request to make an object below a path that ends so. A connection is closed after it is made.
    lost: Vec<(&'static str, Trouble)>,
    /// The pod runs so long.
    runs: Duration,
    /// How pods end, the first first; those after them make the backup.
    ends: Vec<Value>,
    /// When the pod was made.
    began: Option<Instant>,
    pod: Value,
}

struct Server {
    state: Arc<Mutex<State>>,
    place: Place,
}

const SNAPSHOTS: &str = "/apis/snapshot.storage.k8s.io/v1";

/// Serves until the tests end; the program of that place asks there.
fn listen(place: &mut Place, state: State) -> Arc<Mutex<State>> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("an address").port();
    let kubeconfig = place.path("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": format!("http://127.0.0.1:{port}")}}],
        "users": [{"name": "it", "user": {}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", "namespace": "ns"}}],
    });
    std::fs::write(&kubeconfig, config.to_string()).expect("write");
    place.environment = vec![("KUBECONFIG", kubeconfig.display().to_string())];
    let state = Arc::new(Mutex::new(state));
    let of = state.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let of = of.clone();
            std::thread::spawn(move || serve(&of, client));
        }
    });
    state
}

/// An API server that knows a snapshot, by its handle, and the SnapshotMetadataService of its driver.
pub fn with_snapshot(place: &mut Place, handle: &str, address: &str, ca: &str) {
    let objects = [
        (
            format!("{SNAPSHOTS}/namespaces/ns/volumesnapshots/{handle}"),
            json!({"metadata": {"name": handle}, "status": {"boundVolumeSnapshotContentName": "content"}}),
        ),
        (
            format!("{SNAPSHOTS}/volumesnapshotcontents/content"),
            json!({
                "metadata": {"name": "content"}, "spec": {"driver": "driver"}, "status": {"snapshotHandle": handle},
            }),
        ),
        (
            "/apis/cbt.storage.k8s.io/v1beta1/snapshotmetadataservices/driver".to_owned(),
            json!({"metadata": {"name": "driver"}, "spec": {
                "address": address, "audience": "it", "requireBaseSnapshotForDelta": false,
                "caCert": k8s_openapi::ByteString(ca.as_bytes().to_vec()),
            }}),
        ),
    ];
    listen(place, State { objects: objects.into(), ..State::default() });
}

impl Server {
    fn start(runs: Duration) -> Self {
        let mut place = Place::new();
        place.url = Some("s3://bucket/of/the/pod".into());
        let mut state = State { runs, ..State::default() };
        let claim = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", "namespace": "ns"},
            "spec": {"volumeMode": "Block", "volumeName": "pv", "storageClassName": "fast"},
            "status": {"capacity": {"storage": "1Gi"}},
        });
        for (path, object) in [
            ("/api/v1/namespaces/ns/persistentvolumeclaims/data".to_owned(), claim),
            (
                "/api/v1/persistentvolumes/pv".to_owned(),
                json!({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv"}, "spec": {}}),
            ),
            (
                format!("{SNAPSHOTS}/volumesnapshotcontents/content"),
                json!({"metadata": {"name": "content"}, "spec": {"driver": "driver"}}),
            ),
            (
                "/apis/cbt.storage.k8s.io/v1beta1/snapshotmetadataservices/driver".to_owned(),
                json!({"metadata": {"name": "driver"}, "spec": {"requireBaseSnapshotForDelta": false}}),
            ),
        ] {
            state.objects.insert(path, object);
        }
        let state = listen(&mut place, state);
        Server { state, place }
    }

    /// From some time after the pod began on, for some time, answers about it are spoiled.
    fn trouble(&self, path: &'static str, trouble: Trouble, from: u64, until: u64) {
        let (from, until) = (Duration::from_millis(from), Duration::from_millis(until));
        self.state.lock().unwrap().troubles.push((path, trouble, from, until));
    }

    fn left(&self) -> Vec<String> {
        let state = self.state.lock().unwrap();
        let made = |path: &&String| path.contains("/cbt-backup-data");
        state.objects.keys().filter(made).cloned().collect()
    }
}

impl State {
    fn trouble(&mut self, method: &str, path: &str) -> Option<Trouble> {
        if method == "POST" {
            let next = self.lost.iter().position(|(of, _)| path.ends_with(of))?;
            return Some(self.lost.remove(next).1);
        }
        let since = self.began?.elapsed();
        let is_now = |(of, _, from, until): &&(&str, Trouble, Duration, Duration)| {
            path.ends_with(of) && since >= *from && since < *until
        };
        self.troubles.iter().find(is_now).map(|of| of.1)
    }

    fn answer(&mut self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        let missing =
            (404, json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}));
        match method {
            "POST" => {
                let mut object: Value = serde_json::from_slice(body).expect("JSON");
                let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
                if self.objects.contains_key(&format!("{path}/{name}")) {
                    return (409, json!({"kind": "Status", "status": "Failure", "code": 409}));
                }
                object["metadata"]["uid"] = json!(format!("uid {}", self.made));
                self.made += 1;
                if path.ends_with("/volumesnapshots") {
                    object["status"] =
                        json!({"readyToUse": true, "boundVolumeSnapshotContentName": "content"});
                }
                if path.ends_with("/pods") {
                    if self.began.is_some() && !self.ends.is_empty() {
                        self.ends.remove(0);
                    }
                    (self.began, self.pod) = (Some(Instant::now()), object.clone());
                }
                self.objects.insert(format!("{path}/{name}"), object.clone());
                (201, object)
            }
            "DELETE" => {
                let options: Value = serde_json::from_slice(body).expect("JSON");
                let is_it = |object: &Value| options["preconditions"]["uid"] == object["metadata"]["uid"];
                match self.objects.get(path) {
                    Some(object) if !is_it(object) => {
                        (409, json!({"kind": "Status", "status": "Failure", "code": 409}))
                    }
                    _ => self.objects.remove(path).map_or(missing, |object| (200, object)),
                }
            }
            "GET" if path.ends_with("/volumesnapshots") => {
                let items: Vec<&Value> = self
                    .objects
                    .iter()
                    .filter(|(of, _)| of.contains("/volumesnapshots/"))
                    .map(|of| of.1)
                    .collect();
                (200, json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items}))
            }
            _ => match self.objects.get(path) {
                Some(pod) if path.ends_with("/pods/cbt-backup-data") => (200, self.pod(pod)),
                Some(object) => (200, object.clone()),
                None => missing,
            },
        }
    }

    fn pod(&self, pod: &Value) -> Value {
        let mut pod = pod.clone();
        let has_ended = self.began.is_some_and(|began| began.elapsed() > self.runs);
        let report = json!({
            "id": "20260101T000000.000Z-aaaaaa", "volume": "ns/data", "created": 1, "kind": "full", "base": null, "why": null,
            "snapshot": "one", "device": "/dev/source", "size": 1, "data": 1, "listed": 1, "read": 1, "added": 1,
            "milliseconds": 1,
        });
        pod["status"] = match has_ended {
            false => json!({"phase": "Running"}),
            true if !self.ends.is_empty() => self.ends[0].clone(),
            true => {
                let state = json!({"terminated": {"exitCode": 0, "message": report.to_string()}});
                json!({"phase": "Succeeded", "containerStatuses": [{"state": state}]})
            }
        };
        pod
    }
}

fn serve(state: &Mutex<State>, mut client: TcpStream) -> Result<()> {
    let mut requests = BufReader::new(client.try_clone()?);
    loop {
        let (mut first, mut length) = (String::new(), 0);
        if requests.read_line(&mut first)? == 0 {
            return Ok(());
        }
        loop {
            let mut line = String::new();
            requests.read_line(&mut line)?;
            match line.to_ascii_lowercase().strip_prefix("content-length:") {
                Some(count) => length = count.trim().parse().expect("a length"),
                None if line.trim().is_empty() => break,
                None => {}
            }
        }
        let mut body = vec![0; length];
        requests.read_exact(&mut body)?;
        let mut words = first.split(' ');
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let path = path.split('?').next().unwrap_or_default();
        let trouble = state.lock().unwrap().trouble(method, path);
        let (code, answer) = match trouble {
            Some(Trouble::Code(code)) => (code, json!({"kind": "Status", "status": "Failure", "code": code})),
            Some(Trouble::Reset | Trouble::Taken) => {
                if method == "POST" {
                    let (_, object) = state.lock().unwrap().answer(method, path, &body);
                    if matches!(trouble, Some(Trouble::Taken)) {
                        let name = object["metadata"]["name"].as_str().expect("a name");
                        let of_other = json!({"metadata": {
                            "name": name, "annotations": {"cbt-backup/run": "other"},
                            "labels": {"app.kubernetes.io/managed-by": "cbt-backup"},
                        }});
                        state.lock().unwrap().objects.insert(format!("{path}/{name}"), of_other);
                    }
                }
                return Ok(());
            }
            Some(Trouble::Silent) => {
                std::thread::sleep(Duration::from_secs(600));
                return Ok(());
            }
            None => state.lock().unwrap().answer(method, path, &body),
        };
        let answer = answer.to_string();
        let head = format!(
            "HTTP/1.1 {code} it\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            answer.len()
        );
        client.write_all(head.as_bytes())?;
        client.write_all(answer.as_bytes())?;
    }
}

const RUN: [&str; 5] = ["run", "--pvc", "data", "--patience", "3"];

// What the client of Kubernetes asks again by itself, for some minutes, are 429, 503 and 504 alone.

/// The pod works for longer than the patience, and then the API server is away, for less than that.
#[test]
fn an_api_server_that_is_away_for_moments_ends_no_backup() {
    let server = Server::start(Duration::from_secs(8));
    server.trouble("/pods/cbt-backup-data", Trouble::Code(500), 3500, 4500);
    server.trouble("/pods/cbt-backup-data", Trouble::Reset, 4500, 6000);
    server.trouble("/volumesnapshotcontents/content", Trouble::Code(502), 3500, 10000);
    let made = server.place.ok(&["run", "--pvc", "data", "--patience", "6"]);
    assert_eq!(made["snapshot"], "one");
    assert_eq!(server.left(), [""; 0]);
    assert_eq!(server.state.lock().unwrap().pod["spec"]["containers"][0]["args"][0], "auto");
}

/// The same while the run cleans up: nothing stays.
#[test]
fn an_api_server_that_is_away_for_moments_leaves_nothing_behind() {
    let server = Server::start(Duration::from_secs(1));
    server.trouble("/persistentvolumeclaims/cbt-backup-data", Trouble::Code(500), 500, 3000);
    server.trouble("/persistentvolumeclaims/cbt-backup-data", Trouble::Reset, 3000, 4000);
    assert_eq!(server.place.ok(&["run", "--pvc", "data", "--patience", "20"])["snapshot"], "one");
    assert_eq!(server.left(), [""; 0]);
}

/// What is asked for has a name, so a second request finds what the first one made.
#[test]
fn what_is_made_while_the_api_server_is_away_is_made_once() {
    let server = Server::start(Duration::from_secs(1));
    for path in ["/volumesnapshots", "/persistentvolumeclaims", "/pods"] {
        let troubles = [Trouble::Code(500), Trouble::Reset, Trouble::Code(502)];
        server.state.lock().unwrap().lost.extend(troubles.map(|trouble| (path, trouble)));
    }
    let said = ended(0, &server.place.run(&RUN));
    assert_eq!(said.matches("asked again for at most 3 s").count(), 3, "once for each object: {said}");
    assert_eq!(server.left(), [""; 0]);
    assert_eq!(server.state.lock().unwrap().lost.len(), 0, "not all went wrong");
}

/// A second request finds what another run has made meanwhile: it is not touched.
#[test]
fn what_another_run_has_made_is_not_taken_for_ours() {
    let server = Server::start(Duration::from_secs(1));
    server.state.lock().unwrap().lost.push(("/persistentvolumeclaims", Trouble::Taken));
    let said = server.place.fails(1, &RUN);
    assert!(said.contains("PersistentVolumeClaim cbt-backup-data is there already"), "{said}");
    assert_eq!(server.left(), ["/api/v1/namespaces/ns/persistentvolumeclaims/cbt-backup-data"]);
}

#[test]
fn ctrl_c_is_seen_while_nothing_can_be_made() {
    let server = Server::start(Duration::from_secs(600));
    server.state.lock().unwrap().lost.extend([("/pods", Trouble::Code(500)); 1000]);
    let mut running = Running::start(server.place.command(&["run", "--pvc", "data"]));
    until("a pod is asked for", || server.state.lock().unwrap().lost.len() <= 998);
    running.signal(Signal::SIGINT);
    assert_eq!(running.ends_within(Duration::from_secs(10)), Some(130));
    assert_eq!(server.left(), [""; 0]);
}

#[test]
fn an_api_server_that_stays_away_ends_the_wait() {
    let server = Server::start(Duration::from_secs(600));
    server.trouble("/pods/cbt-backup-data", Trouble::Code(500), 500, 600_000);
    let began = Instant::now();
    let said = server.place.fails(1, &RUN);
    assert!(said.contains("get Pod cbt-backup-data"), "{said}");
    assert!(began.elapsed() >= Duration::from_secs(3), "no patience");
}

/// A backup is made, and nobody says any more whether its snapshot is needed: it stays.
#[test]
fn a_backup_that_is_made_stays_one_where_the_api_server_goes_away() {
    let server = Server::start(Duration::from_secs(1));
    server.trouble("/volumesnapshotcontents/content", Trouble::Code(500), 0, 600_000);
    assert_eq!(server.place.ok(&RUN)["snapshot"], "one");
    let left = server.left();
    assert!(left.len() == 1 && left[0].contains("/volumesnapshots/"), "{left:?}");
}

#[test]
fn ctrl_c_is_seen_while_the_api_server_is_silent() {
    let server = Server::start(Duration::from_secs(600));
    server.trouble("/pods/cbt-backup-data", Trouble::Silent, 300, 600_000);
    let mut running = Running::start(server.place.command(&RUN));
    until("there is a pod", || server.state.lock().unwrap().began.is_some());
    std::thread::sleep(Duration::from_secs(1));
    // What is deleted is looked at.
    server.state.lock().unwrap().troubles.clear();
    running.signal(Signal::SIGINT);
    assert_eq!(running.ends_within(Duration::from_secs(10)), Some(130));
    assert_eq!(server.left(), [""; 0]);
}

/// A pod whose memory is used up, or whose node is drained, has not failed by itself: the next one continues.
#[test]
fn a_pod_that_is_killed_is_replaced() {
    let failed = |code: i32| {
        let state = json!({"terminated": {"exitCode": code, "message": "gone"}});
        json!({"phase": "Failed", "containerStatuses": [{"state": state}]})
    };
    let evicted = json!({"phase": "Failed", "reason": "Evicted", "message": "the node is low on memory"});
    let server = Server::start(Duration::from_millis(300));
    server.state.lock().unwrap().ends = vec![failed(137), evicted, failed(130)];
    let output = server.place.run(&[&RUN[..], &["--full"]].concat());
    let said = ended(0, &output);
    assert_eq!(said.matches("another pod continues the backup").count(), 3, "{said}");
    let last = server.state.lock().unwrap().pod["spec"]["containers"][0]["args"].clone();
    assert!(last[0] == "full" && last.as_array().is_some_and(|words| words.contains(&json!("--resume"))));
    assert_eq!(server.left(), [""; 0]);

    // It is not done for ever, and not for one that failed by itself.
    for (ends, why) in [
        (vec![failed(137); 4], "3 pods before it were killed too"),
        (vec![failed(1)], "exit code 1: gone"),
        (vec![json!({"phase": "Failed", "reason": "OutOfmemory"})], "exit code ?"),
    ] {
        let server = Server::start(Duration::from_millis(300));
        server.state.lock().unwrap().ends = ends;
        let said = server.place.fails(1, &RUN);
        assert!(said.contains(why), "{said}");
        assert_eq!(server.left(), [""; 0]);
    }
}

#[test]
fn a_full_backup_can_be_asked_for() {
    let server = Server::start(Duration::ZERO);
    server.place.ok(&[&RUN[..], &["--full"]].concat());
    assert_eq!(server.state.lock().unwrap().pod["spec"]["containers"][0]["args"][0], "full");
    let said = text(&server.place.run(&["run", "--pvc", "data", "--full", "--clean-up"]).stderr);
    assert!(said.contains("cannot be used with"), "{said}");
}

/// A claim that a user has given the name which a run of the claim `data` needs.
const OF_USER: &str = "/api/v1/namespaces/ns/persistentvolumeclaims/cbt-backup-data";

fn of_user() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "cbt-backup-data", "namespace": "ns", "uid": "mine", "labels": {"app": "users-own"}},
    })
}

#[test]
fn what_no_run_has_made_is_not_deleted() {
    let server = Server::start(Duration::from_secs(1));
    server.state.lock().unwrap().objects.insert(OF_USER.into(), of_user());
    let said = server.place.fails(1, &RUN);
    assert!(said.contains("PersistentVolumeClaim cbt-backup-data is there already"), "{said}");
    assert!(said.contains("no run has made it") && !said.contains("--clean-up"), "{said}");
    // It removes all else.
    let pod = "/api/v1/namespaces/ns/pods/cbt-backup-data";
    let of_run = json!({"metadata": {
        "name": "cbt-backup-data", "uid": "a pod", "labels": {"app.kubernetes.io/managed-by": "cbt-backup"},
    }});
    server.state.lock().unwrap().objects.insert(pod.into(), of_run);
    let said = server.place.fails(1, &["run", "--pvc", "data", "--clean-up"]);
    assert!(said.contains("PersistentVolumeClaim cbt-backup-data is not deleted"), "{said}");
    assert_eq!(server.left(), [OF_USER]);
}

/// Somebody deletes what a run has made, and makes something else of that name.
#[test]
fn a_run_that_ends_deletes_what_it_has_made_alone() {
    let server = Server::start(Duration::from_secs(2));
    let running = Running::start(server.place.command(&RUN));
    until("there is a pod", || server.state.lock().unwrap().began.is_some());
    server.state.lock().unwrap().objects.insert(OF_USER.into(), of_user());
    let said = ended(1, &running.output());
    assert!(said.contains("PersistentVolumeClaim cbt-backup-data is not deleted"), "{said}");
    assert_eq!(server.left(), [OF_USER]);
}
