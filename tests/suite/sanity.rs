//! csi-sanity, the CSI community's own test of a driver, against ours: each pool, both access types,
//! with and without attachments.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::{PoolKind, Rig, leftovers, sanity};

/// The version that `make deps` installs.
const VERSION: &str = "v5.6.0";

fn csi_sanity() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!(".deps/csi-sanity-{VERSION}/csi-sanity"));
    if path.exists() {
        return Some(path);
    }
    eprintln!("skipped: needs csi-sanity {VERSION}, which `make deps` builds where go is installed");
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "skipped under CI: needs csi-sanity");
    None
}

/// Why csi-sanity may skip a test where there are no attachments; where there are, it skips nothing.
const MAY_SKIP_WITHOUT_ATTACH: [&str; 5] = [
    "ControllerPublishVolume not supported",
    "ControllerPublishVolume.readonly field not supported",
    "Controller Publish, UnpublishVolume not supported",
    "ControllerUnpublishVolume not supported",
    "testnodevolumeattachlimit not enabled",
];

async fn run(pool: PoolKind, attach: bool) {
    let Some(program) = csi_sanity() else { return };
    let flags: &[&str] = if attach { &["--enable-attach", "--max-volumes-per-node", "4"] } else { &[] };
    let rig = Rig::start_with(pool, flags, "info").await;
    let dir = rig.dir.path();
    let mutable = dir.join("mutable.yaml");
    std::fs::write(&mutable, "readAheadKiB: \"1024\"\ndirectIO: \"false\"\n").expect("write");
    for access in ["mount", "block"] {
        let mut command = Command::new(&program);
        command
            .arg("-csi.endpoint")
            .arg(format!("unix://{}", rig.socket().display()))
            .arg("-csi.stagingdir")
            .arg(dir.join("sanity-staging"))
            .arg("-csi.mountdir")
            .arg(dir.join("sanity-mount"))
            .arg("-csi.testvolumemutableparameters")
            .arg(&mutable)
            .args(["-csi.testvolumeaccesstype", access, "-csi.testvolumesize", "67108864"])
            .args(["-csi.testvolumeexpandsize", "134217728", "-ginkgo.no-color", "-ginkgo.v"]);
        if attach {
            command.arg("-csi.testnodevolumeattachlimit");
        }
        let output = command.output().expect("run csi-sanity");
        let said = String::from_utf8_lossy(&output.stdout);
        let count = said.lines().find(|line| line.contains(" Passed | ")).unwrap_or("no count");
        // Past the test runner's capture: the counts are part of what `make test` tells.
        writeln!(std::io::stdout(), "csi-sanity, {} pool, {access}, attach {attach}: {count}", pool.name())
            .expect("write");
        sanity::assert_only_memory_differs(&said, "\"node-1\"");
        assert!(count.contains(" 1 Failed "), "csi-sanity, {pool:?}, {access}, attach {attach}: {count}");
        let may_skip =
            |line: &str| !attach && MAY_SKIP_WITHOUT_ATTACH.iter().any(|reason| line.contains(reason));
        let skipped: Vec<&str> = said
            .lines()
            .filter(|line| {
                line.trim_start().strip_prefix("[SKIPPED] ").is_some_and(|why| !why.starts_with("in ["))
            })
            .collect();
        let wrong: Vec<&&str> = skipped.iter().filter(|line| !may_skip(line)).collect();
        assert!(wrong.is_empty(), "skipped though we claim it: {wrong:#?}");
        // By the count too, for the lines may come to be worded otherwise.
        assert_eq!(count.contains(" 0 Skipped"), attach, "{count}");
        assert_eq!(skipped.is_empty(), attach, "csi-sanity no longer says what it skips:\n{said}");
        let left: Vec<String> = leftovers(dir).into_iter().filter(|left| left.contains("sanity")).collect();
        assert!(left.is_empty(), "left mounted: {left:?}");
    }
    rig.finish();
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_finds_nothing_on_dir() {
    run(PoolKind::Dir, false).await;
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_finds_nothing_on_dir_with_attach() {
    run(PoolKind::Dir, true).await;
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_finds_nothing_on_xfs() {
    run(PoolKind::Xfs, false).await;
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_finds_nothing_on_xfs_with_attach() {
    run(PoolKind::Xfs, true).await;
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_finds_nothing_on_btrfs() {
    run(PoolKind::Btrfs, false).await;
}

#[test_with::root]
#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_finds_nothing_on_btrfs_with_attach() {
    run(PoolKind::Btrfs, true).await;
}
