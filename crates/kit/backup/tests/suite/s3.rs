//! The same in a bucket of a real S3 server, which checks signatures and knows conditional writes (versitygw). It keeps objects
//! as files, so a test sees what is in the bucket.

use std::fs::File;
use std::io::{BufReader, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::Signal;
use serde_json::json;
use testkit::until;

use crate::driver::{Driver, Fault as DriverFault};
use crate::proxy::{Fault, Proxy, head};
use crate::tool::{BLOCK, MIB, Place, Running, arg, ended, flip, id, text};

const SIZE: u64 = 200 * MIB;
const KEY: &str = "backup";
const SECRET: &str = "a secret of the tests";

/// The server's program, which is built the first time.
fn program() -> PathBuf {
    testkit::needs("an S3 server");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../hack/s3-server.sh");
    let output = Command::new(script).stderr(Stdio::inherit()).output().expect("s3-server.sh");
    assert!(output.status.success(), "needs an S3 server: run hack/s3-server.sh");
    text(&output.stdout).trim().into()
}

/// A server with a bucket, and a place whose repository is in it.
pub struct Bucket {
    pub server: Running,
    pub place: Place,
    pub port: u16,
}

fn environment(endpoint: &str) -> Vec<(&'static str, String)> {
    [
        ("AWS_ACCESS_KEY_ID", KEY.to_owned()),
        ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_ENDPOINT", endpoint.to_owned()),
        ("AWS_ALLOW_HTTP", "true".to_owned()),
    ]
    .into()
}

impl Bucket {
    pub fn start() -> Self {
        let program = program();
        let mut place = Place::new();
        let bucket = place.path("s3/bucket");
        std::fs::create_dir_all(&bucket).expect("mkdir");
        let port = testkit::free_port();
        let mut command = Command::new(program);
        command.args(["--port", &format!("127.0.0.1:{port}"), "--quiet", "posix"]).arg(place.path("s3"));
        command.env("ROOT_ACCESS_KEY_ID", KEY).env("ROOT_SECRET_ACCESS_KEY", SECRET);
        let mut server = Running::start(command);
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(
                Instant::now() < deadline && server.0.try_wait().expect("wait").is_none(),
                "no S3 server"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        place.url = Some("s3://bucket/some/prefix".into());
        place.objects_in = bucket.join("some/prefix");
        place.environment = environment(&format!("http://127.0.0.1:{port}"));
        Bucket { server, place, port }
    }

    /// The server is reached by another port.
    pub fn endpoint(&mut self, port: u16) {
        self.place.environment.retain(|(name, _)| *name != "AWS_ENDPOINT");
        self.place.environment.push(("AWS_ENDPOINT", format!("http://127.0.0.1:{port}")));
    }

    /// A relay by which the server is reached from now on.
    pub fn proxy(&mut self) -> Proxy {
        let proxy = Proxy::start(self.port);
        self.endpoint(proxy.port);
        proxy
    }

    pub fn locks(&self) -> Vec<PathBuf> {
        let Ok(locks) = self.place.repository().join("locks").read_dir() else { return Vec::new() };
        locks.map(|entry| entry.expect("entry").path()).collect()
    }
}

#[test]
fn a_bucket_holds_full_and_incremental_backups() {
    let bucket = Bucket::start();
    let place = &bucket.place;
    let driver = Driver::start(&place.path("csi.sock"));
    let file = place.open_image(SIZE);
    // More than a pack, which is 16 MiB.
    let mut image = place.written(SIZE, 100, 6000, 1);
    image.write(&file, 128 * MIB / BLOCK - 50, 100, 2).expect("write");
    driver.snapshot("one", &image, SIZE);
    let full = driver.back_up(place, "auto", "one");
    let before = image.clone();
    image.write(&file, 3000, 5, 3).expect("write");
    image.punch(&file, 128 * MIB / BLOCK, 20).expect("punch");
    driver.snapshot("two", &image, SIZE);
    driver.script([DriverFault::Cut(0)]);
    let incremental = driver.back_up(place, "auto", "two");
    assert_eq!((full["kind"].as_str(), incremental["kind"].as_str()), (Some("full"), Some("incremental")));
    assert!(incremental["added"].as_u64().is_some_and(|bytes| bytes < MIB), "{incremental}");
    place.restores(&id(&full), &before, SIZE);
    let to = place.path("restored");
    place.ok(&["restore", &id(&incremental), "--to", arg(&to), "--onto-base", &id(&full)]);
    image.compare(&to, SIZE, &base::Stop::default()).expect("equal");
    let verified = place.ok(&["verify"]);
    assert_eq!((&verified["damage"], &verified["unused"]), (&json!([]), &json!(0)));

    let pruned = place.ok(&["prune", "--keep-last", "1", "--max-unused", "0"]);
    assert_eq!(pruned["removed"].as_array().map(Vec::len), Some(1), "{pruned}");
    assert_eq!(place.list(), [id(&incremental)]);
    place.restores(&id(&incremental), &image, SIZE);
    assert_eq!(place.ok(&["verify"])["unused"].as_u64(), Some(0));
    assert!(bucket.locks().is_empty(), "a lock is left");
}

#[test]
fn a_flipped_bit_in_a_bucket_is_found() {
    let bucket = Bucket::start();
    let place = &bucket.place;
    let image = place.written(SIZE, 100, 50, 1);
    let backup = place.full();
    let packs: Vec<PathBuf> =
        place.objects().into_iter().filter(|path| path.to_string_lossy().contains("/packs/")).collect();
    assert_eq!(packs.len(), 2, "data, and maps: {packs:?}");
    for pack in packs {
        let length = pack.metadata().expect("there").len() as usize;
        for at in [0, length / 2, length - 1] {
            flip(&pack, at);
            assert!(place.fails(1, &["verify"]).contains("differs"), "byte {at} of {}", pack.display());
            let to = place.path("restored");
            place.fails(1, &["restore", &backup, "--to", arg(&to)]);
            assert!(!to.exists(), "byte {at} of {}", pack.display());
            flip(&pack, at);
        }
    }
    place.ok(&["verify"]);
    place.restores(&backup, &image, SIZE);
}

/// A lock as a backup leaves it that was killed on another machine.
fn of_another_machine(lock: &std::path::Path) {
    let mut holder: serde_json::Value =
        serde_json::from_slice(&std::fs::read(lock).expect("read")).expect("JSON");
    holder["place"] = "another boot".into();
    std::fs::write(lock, holder.to_string()).expect("write");
}

#[test]
fn a_killed_backup_keeps_its_lock_no_longer_than_it_must() {
    let bucket = Bucket::start();
    let place = &bucket.place;
    let image = place.written(SIZE, 100, 5000, 1);
    let kill = || {
        let mut running = Running::start(place.backup("full", &["--limit-rate", "64Ki"]));
        until("there is a lock", || !bucket.locks().is_empty());
        assert!(place.fails(1, &["prune"]).contains("cbt-backup backup (process"));
        running.signal(Signal::SIGKILL);
        running.0.wait().expect("wait");
        let locks = bucket.locks();
        assert_eq!(locks.len(), 1, "that of the prune is gone: {locks:?}");
        locks[0].clone()
    };
    // On this machine it is known at once that the process is gone.
    kill();
    place.ok(&["prune"]);
    assert!(bucket.locks().is_empty(), "a lock is left");

    let lock = kill();
    of_another_machine(&lock);
    let said = place.fails(1, &["prune"]);
    assert!(said.contains("its lock ends at") && said.contains("UTC"), "{said}");
    // Others that only add may go on beside it.
    let backup = place.full();
    let long_ago = SystemTime::now() - Duration::from_secs(11 * 60);
    let file = File::options().write(true).open(&lock).expect("open");
    file.set_modified(long_ago).expect("set the time");
    place.ok(&["prune", "--max-unused", "0"]);
    assert!(bucket.locks().is_empty(), "a lock is left");
    place.restores(&backup, &image, SIZE);
}

#[test]
fn a_bucket_that_is_missing_is_no_place_for_a_first_backup() {
    let mut bucket = Bucket::start();
    bucket.place.url = Some("s3://bucket/nothing/here".into());
    assert!(bucket.place.fails(1, &["list"]).contains("the first backup makes one"));
    bucket.place.url = Some("s3://nobody-made-this".into());
    for arguments in [&["list"][..], &["verify"], &["prune"]] {
        let said = bucket.place.fails(1, arguments);
        assert!(said.contains("NoSuchBucket") && !said.contains("first backup"), "{said}");
    }
}

/// Over a line on which each answer takes 90 ms, one after another they take a minute and a half.
#[test]
fn a_thousand_backups_are_read_many_at_once() {
    let mut bucket = Bucket::start();
    bucket.place.open_image(MIB);
    bucket.place.full();
    let backups = bucket.place.repository().join("backups");
    let made = bucket.place.list();
    // As many more of the same, each under its own id.
    let sound = std::fs::read(backups.join(&made[0])).expect("read");
    let at = sound.windows(made[0].len()).position(|part| part == made[0].as_bytes()).expect("its id");
    for number in 1..1000 {
        let id = format!("20300101T000000.{number:03}Z-abcdef");
        let mut index = sound[..sound.len() - 32].to_vec();
        index[at..at + id.len()].copy_from_slice(id.as_bytes());
        let hash = blake3::hash(&index);
        index.extend(hash.as_bytes());
        std::fs::write(backups.join(id), index).expect("write");
    }
    let proxy = bucket.proxy();
    proxy.delay(Duration::from_millis(90));
    proxy.next("GET", "/backups/", Fault::Hold);
    let began = Instant::now();
    let listed = std::thread::scope(|scope| {
        let listed = scope.spawn(|| bucket.place.list());
        proxy.wait_waiting(100);
        proxy.open();
        listed.join().expect("no panic")
    });
    println!("{} backups in {:?}", listed.len(), began.elapsed());
    assert_eq!(listed.len(), 1000);
    assert!(listed.is_sorted());
    assert!(proxy.seen() < 1020, "{} requests", proxy.seen());
    // The last one of a volume, of which there is none here: first the very last is read, then 64 at once.
    let before = proxy.seen();
    proxy.next("GET", ".999Z-", Fault::Hold);
    let to = bucket.place.path("restored");
    let restore = ["restore", "latest", "--volume", "rare", "--to", arg(&to)];
    std::thread::scope(|scope| {
        let restored = scope.spawn(|| bucket.place.fails(1, &restore));
        proxy.wait_held();
        // Whichever of them comes first.
        proxy.next("GET", "/backups/", Fault::Hold);
        proxy.open();
        proxy.wait_waiting(64);
        proxy.open();
        assert!(restored.join().expect("no panic").contains("there is no backup of rare"));
    });
    // What is held for long is asked for again.
    assert!(proxy.seen() - before < 1020, "{} requests", proxy.seen() - before);
}

/// A server that does not answer.
#[test]
fn a_signal_ends_a_wait_for_what_is_written() {
    let mut bucket = Bucket::start();
    let image = bucket.place.written(SIZE, 100, 10000, 1);
    let proxy = bucket.proxy();
    proxy.next("PUT", "/packs/", Fault::Hold);
    let mut running = Running::start(bucket.place.backup("full", &[]));
    proxy.wait_held();
    running.signal(Signal::SIGTERM);
    // The 30 seconds of a pod; a request alone has ten minutes.
    let code = running.ends_within(Duration::from_secs(30));
    proxy.open();
    assert_eq!(code, Some(130), "{}", text(&running.output().stderr));
    bucket.place.full();
    bucket.place.restores("latest", &image, SIZE);
}

/// That of a cloud answers to anybody on its machine.
#[test]
fn no_metadata_address_is_asked_but_where_it_is_allowed() {
    let address = TcpListener::bind("127.0.0.1:0").expect("bind");
    address.set_nonblocking(true).expect("set");
    let url = format!("http://{}", address.local_addr().expect("an address"));
    let place = Place { url: Some("s3://bucket/prefix".into()), ..Place::new() };
    let token = place.path("token");
    std::fs::write(&token, "a token").expect("write");
    let pod = [
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", url.as_str()),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", arg(&token)),
    ];
    let cases: [(&[(&str, &str)], bool); 7] = [
        (&[], false),
        (&[("AWS_EC2_METADATA_DISABLED", "true")], false),
        (&[("AWS_EC2_METADATA_DISABLED", "")], false),
        (&[("AWS_SKIP_SIGNATURE", "false")], false),
        (&[("AWS_ACCESS_KEY_ID", "")], false),
        (&[("AWS_EC2_METADATA_DISABLED", "false")], true),
        (&pod, true),
    ];
    for (variables, is_asked) in cases {
        let mut command = place.command(&["list"]);
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_")) {
            command.env_remove(name);
        }
        command.env("AWS_METADATA_ENDPOINT", &url).envs(variables.iter().copied());
        let mut running = Running::start(command);
        let code = match is_asked {
            true => {
                let deadline = Instant::now() + Duration::from_secs(20);
                // It is not closed: an end would be an answer.
                let _asked = loop {
                    if let Ok(asked) = address.accept() {
                        break asked;
                    }
                    assert!(Instant::now() < deadline, "{variables:?}: nobody is asked");
                    std::thread::sleep(Duration::from_millis(5));
                };
                running.signal(Signal::SIGINT);
                running.ends_within(Duration::from_secs(20))
            }
            false => running.ends_within(Duration::from_secs(20)),
        };
        let _ = running.0.kill();
        let said = text(&running.output().stderr);
        assert_eq!(code, Some(if is_asked { 130 } else { 1 }), "{variables:?}: {said}");
        assert!(is_asked || said.contains("no credentials"), "{variables:?}: {said}");
        assert!(is_asked || address.accept().is_err(), "{variables:?}: the address is asked");
        while address.accept().is_ok() {}
    }
}

#[test]
fn a_server_that_refuses_or_is_gone_is_reported() {
    let mut bucket = Bucket::start();
    bucket.place.written(SIZE, 0, 1, 1);
    let say = |place: &Place, key: &str, value: &str| {
        let output = place.backup("full", &[]).env(key, value).output().expect("run");
        ended(1, &output)
    };
    let said = say(&bucket.place, "AWS_SECRET_ACCESS_KEY", "another");
    assert!(said.contains("SignatureDoesNotMatch"), "{said}");
    bucket.place.url = Some("s3://nobody-made-this".into());
    let said = say(&bucket.place, "AWS_REGION", "us-east-1");
    assert!(said.contains("NoSuchBucket"), "{said}");
}

/// A server whose answer to each request is that of `answer`, and a place with its repository there.
fn hostile(answer: impl Fn(&str, &mut dyn Write) -> std::io::Result<()> + Send + Sync + 'static) -> Place {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        std::thread::scope(|scope| {
            for mut client in listener.incoming().map_while(Result::ok) {
                let answer = &answer;
                scope.spawn(move || {
                    let mut requests = BufReader::new(client.try_clone().expect("a socket"));
                    while let Ok(head) = head(&mut requests) {
                        if head.is_empty() || answer(&head, &mut client).is_err() {
                            break;
                        }
                    }
                });
            }
        });
    });
    let mut place = Place::new();
    place.url = Some("s3://bucket/some/prefix".into());
    place.environment = environment(&endpoint);
    place
}

/// Pages that follow each other without an end: the same one, and after the first the same object with ever new tokens.
#[test]
fn a_list_that_leads_to_itself_ends() {
    let backup = |number: usize| {
        format!(
            "<Contents><Key>some/prefix/backups/2026010{number}T000000.000Z-abcdef</Key>\
             <LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag><Size>9</Size></Contents>"
        )
    };
    for (is_new, why) in [(false, "is followed by itself"), (true, "lists backups/20260102T")] {
        let pages = AtomicUsize::new(0);
        let place = hostile(move |head, client| {
            let count = if is_new { pages.fetch_add(1, Ordering::Relaxed) } else { 0 };
            let objects = if is_new { backup(1 + count.min(1)) } else { String::new() };
            let page = format!(
                "<?xml version=\"1.0\"?><ListBucketResult><Name>bucket</Name><KeyCount>0</KeyCount>\
                 <IsTruncated>true</IsTruncated><NextContinuationToken>a/b &amp;+c={count}</NextContinuationToken>\
                 {objects}</ListBucketResult>"
            );
            let (code, body) = if head.contains("list-type=2") { (200, &*page) } else { (404, "") };
            write!(client, "HTTP/1.1 {code} it\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        });
        let mut running = Running::start(place.command(&["list"]));
        let code = running.ends_within(Duration::from_secs(10));
        let _ = running.0.kill();
        let said = text(&running.output().stderr);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(why), "{said}");
    }
}

/// A bucket's console makes an object whose name ends with a slash, to show a folder: the place is still empty.
#[test]
fn a_folder_in_a_bucket_is_an_empty_place() {
    let place = hostile(|head, client| {
        let list = |keys: &str| {
            let body = format!(
                "<?xml version=\"1.0\"?><ListBucketResult><Name>bucket</Name><KeyCount>1</KeyCount>\
                 <IsTruncated>false</IsTruncated>{keys}</ListBucketResult>"
            );
            (200, body)
        };
        let folder = "<Contents><Key>some/prefix/</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
                      <ETag>e</ETag><Size>0</Size></Contents>";
        let (code, body) = match head {
            head if head.contains("list-type=2") && head.contains("delimiter") => list(folder),
            head if head.contains("list-type=2") => list(""),
            head if head.starts_with("PUT") => (403, String::new()),
            _ => (404, String::new()),
        };
        write!(client, "HTTP/1.1 {code} it\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    });
    place.open_image(MIB);
    let said = place.fails(1, &["full", "--volume", "v", "--device", arg(&place.image())]);
    assert!(said.contains("write repository") && !said.contains("not empty"), "{said}");
}

/// The file of a token is read by a thread that no signal ends.
#[test]
fn a_token_file_that_is_no_file_holds_nobody_up() {
    let mut place = Place::new();
    let fifo = place.path("token");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("mkfifo");
    place.url = Some("s3://bucket/prefix".into());
    place.environment = vec![
        ("AWS_WEB_IDENTITY_TOKEN_FILE", arg(&fifo).to_owned()),
        ("AWS_ROLE_ARN", "arn:aws:iam::1:role/r".into()),
        ("AWS_REGION", "us-east-1".into()),
    ];
    let mut running = Running::start(place.command(&["list"]));
    let code = running.ends_within(Duration::from_secs(10));
    let _ = running.0.kill();
    let said = text(&running.output().stderr);
    assert!(code == Some(1) && said.contains("neither a block device nor a file"), "{said}");
}

#[test]
fn an_answer_that_is_longer_than_what_was_asked_for_is_not_read() {
    let sent = Arc::<AtomicUsize>::default();
    let count = sent.clone();
    let place = hostile(move |_, client| {
        const LENGTH: usize = 300 << 20;
        write!(
            client,
            "HTTP/1.1 206 it\r\ncontent-length: {LENGTH}\r\ncontent-range: bytes 0-{}/{LENGTH}\r\n\
             last-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\n",
            LENGTH - 1
        )?;
        for _ in 0..LENGTH >> 20 {
            client.write_all(&[0; 1 << 20])?;
            count.fetch_add(1 << 20, Ordering::Relaxed);
        }
        Ok(())
    });
    let said = place.fails(1, &["list"]);
    assert!(said.contains("longer than"), "{said}");
    let sent = sent.load(Ordering::Relaxed);
    assert!(sent < 64 << 20, "{sent} bytes are read");
}
