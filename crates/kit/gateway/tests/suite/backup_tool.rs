//! Promise: `cbt-backup` in a cluster is right or fails and says so, while tokens end and gateways, their authorities and
//! drivers change.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::community::backup_account;
use crate::driver::{Driver, STEADY_MESSAGES, TUPLES};
use crate::world::{Gateway, World, eventually};

const SIZE: u64 = 1 << 40;

pub fn arg(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A volume as the driver's `steady` and `plain` snapshots list it: every other block holds something.
pub fn image(world: &World) -> PathBuf {
    let path = world.dir.path().join("image");
    let file = File::create(&path).expect("create");
    file.set_len(SIZE).expect("set the length");
    for number in 0..(STEADY_MESSAGES * TUPLES) as u64 {
        let block = [(number % 255) as u8 + 1; 4096];
        file.write_all_at(&block, number * 8192).expect("write");
    }
    path
}

pub fn tool(world: &World, kubeconfig: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(testkit::program("cbt-backup"));
    command
        .args(arguments)
        .env("CBT_BACKUP_REPOSITORY", world.dir.path().join("repository"))
        .env("KUBECONFIG", kubeconfig)
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

pub async fn ended(child: Child) -> Output {
    let wait = tokio::task::spawn_blocking(move || child.wait_with_output());
    wait.await.expect("no panic").expect("wait")
}

pub async fn output(mut command: Command) -> Output {
    ended(command.spawn().expect("start cbt-backup")).await
}

pub async fn ok(command: Command) -> Value {
    let output = output(command).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Restores the newest backup and compares its first blocks, which are all that the driver lists.
pub async fn restores(world: &World, kubeconfig: &Path, messages: i64) {
    let to = world.dir.path().join("restored");
    ok(tool(world, kubeconfig, &["restore", "latest", "--overwrite", "--output", "json", "--to", arg(&to)]))
        .await;
    let length = (messages * TUPLES) as usize * 8192;
    let read = |path: &Path| {
        let mut bytes = vec![0; length];
        File::open(path).and_then(|file| file.read_exact_at(&mut bytes, 0)).expect("read");
        bytes
    };
    assert!(read(&to) == read(&world.dir.path().join("image")), "the restored volume is another one");
}

/// A gateway with an authority of its own.
async fn gateway(world: &World, config: &Path, name: &str) -> Gateway {
    let gateway = world.gateway_by(config, name, &[]);
    gateway.ready().await;
    gateway
}

/// The first one, which the cluster's object names.
pub async fn first_gateway(world: &World) -> (Gateway, PathBuf) {
    let config = world.gateway_kubeconfig("gateway").await;
    let first = gateway(world, &config, "first").await;
    first.publish(world).await;
    (first, config)
}

async fn asked(driver: &Driver, times: usize) {
    eventually("the driver is asked", async || driver.seen.allocated.lock().len() >= times).await;
    // Some messages: there are sixty, 30 ms apart.
    tokio::time::sleep(Duration::from_millis(200)).await;
}

pub async fn a_backup_outlives_new_tokens_authorities_and_drivers(world: World) {
    let (driver, ns, _) = world.with_snapshots(&[("monday", "steady-1"), ("tuesday", "steady-2")]).await;
    let (first, config) = first_gateway(&world).await;
    let account = backup_account(&world).await;
    let device = image(&world);
    let token = world.dir.path().join("token");
    std::fs::write(&token, world.reader("first").await).expect("write");
    let mut command = tool(&world, &account, &["full", "--volume", "v", "--output", "json"]);
    command.args(["--token-file", arg(&token)]);
    command.args(["--namespace", &ns, "--snapshot", "monday", "--device", arg(&device)]);
    let running = command.spawn().expect("start cbt-backup");
    asked(&driver, 1).await;
    // All at once: another gateway with another authority, another token, and then another driver.
    drop(first);
    std::fs::write(&token, world.reader("second").await).expect("write");
    let second = gateway(&world, &config, "second").await;
    world.change_service(second.spec()).await;
    asked(&driver, 2).await;
    let offsets: Vec<i64> =
        driver.seen.allocated.lock().iter().map(|request| request.starting_offset).collect();
    assert!(offsets[0] == 0 && offsets[1] > 0, "it goes on where it was: {offsets:?}");
    drop(driver);
    let driver = Driver::start(&world.driver, &world.socket());
    let output = ended(running).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(driver.seen.allocated.lock()[0].starting_offset > offsets[1], "the driver goes on");
    let made: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(made["snapshot"], "steady-1", "the handle is the base of the next one");
    assert_eq!(made["listed"].as_i64(), Some(STEADY_MESSAGES * TUPLES * 4096));
    restores(&world, &account, STEADY_MESSAGES).await;
    // A call that was refused before its token was looked at has no user.
    let lines = second.audit();
    let users: BTreeSet<String> =
        lines.iter().filter_map(|line| Some(line.get("user")?.to_string())).collect();
    assert!(!users.is_empty() && users.iter().all(|user| user.contains("second")), "{users:?}");

    // The next one by the handle, with a token that the tool requests itself.
    let mut command = tool(&world, &account, &["incremental", "--volume", "v", "--output", "json"]);
    command.args(["--namespace", &ns, "--snapshot", "tuesday", "--device", arg(&device)]);
    let made = ok(command).await;
    assert_eq!(made["kind"], "incremental");
    let delta = driver.seen.deltas.lock().pop().expect("a delta");
    assert_eq!(delta.base_snapshot_id, "steady-1");
    restores(&world, &account, STEADY_MESSAGES).await;
}

pub async fn a_backup_whose_token_ends_fails_and_says_so(world: World) {
    let (driver, ns, _) = world.with_snapshot("monday", "steady-1").await;
    let (first, _) = first_gateway(&world).await;
    let account = backup_account(&world).await;
    let device = image(&world);
    let token = world.dir.path().join("token");
    std::fs::write(&token, world.reader("first").await).expect("write");
    let mut command = tool(&world, &account, &["auto", "--volume", "v", "--token-file", arg(&token)]);
    command.args(["--namespace", &ns, "--snapshot", "monday", "--device", arg(&device)]);
    let running = command.spawn().expect("start cbt-backup");
    asked(&driver, 1).await;
    std::fs::write(&token, "expired").expect("write");
    drop(driver);
    let _driver = Driver::start(&world.driver, &world.socket());
    let output = ended(running).await;
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.contains("Unauthenticated"), "{said}");
    let list = ok(tool(&world, &account, &["list", "--output", "json"])).await;
    assert_eq!(list, json!([]), "half a backup is listed");
    drop(first);
}
