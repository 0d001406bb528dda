//! csi-sanity, the CSI community's own test of a driver, against the mock.

use std::path::Path;
use std::process::Command;

use super::Lab;

/// The version that `make deps` installs.
const VERSION: &str = "v5.6.0";

/// What the mock does not claim, as csi-sanity says it.
const NOT_CLAIMED: [&str; 15] = [
    "Controller Publish, UnpublishVolume not supported",
    "ControllerGetVolumeHealth not supported",
    "ControllerListVolumeHealth not supported",
    "ControllerPublishVolume not supported",
    "ControllerUnpublishVolume not supported",
    "GetCapacity not supported",
    "GetSnapshot not supported",
    "NodeExpandVolume not supported",
    "NodeGetStorageHealth not supported",
    "NodeGetVolume",
    "NodeStageVolume not supported",
    "NodeUnstageVolume not supported",
    "SNAPSHOT_ACCESSIBILITY_CONSTRAINTS not supported",
    "Service does not have single node multi writer capability",
    "testnodevolumeattachlimit not enabled",
];

#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_finds_nothing_in_the_mock() {
    crate::needs("csi-sanity");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..");
    let program = root.join(format!(".deps/csi-sanity-{VERSION}/csi-sanity"));
    assert!(program.exists(), "needs csi-sanity {VERSION}: run `make test-deps`");
    let dir = tempfile::tempdir().expect("temp dir");
    let (_lab, socket) = Lab::mock(&dir, &[]).await;
    let mutable = dir.path().join("mutable.yaml");
    std::fs::write(&mutable, "note: other\n").expect("write");
    for access in ["mount", "block"] {
        let output = Command::new(&program)
            .arg("-csi.endpoint")
            .arg(format!("unix://{}", socket.display()))
            .arg("-csi.stagingdir")
            .arg(dir.path().join("staging"))
            .arg("-csi.mountdir")
            .arg(dir.path().join("mount"))
            .arg("-csi.testvolumemutableparameters")
            .arg(&mutable)
            .args(["-csi.testvolumeaccesstype", access, "-csi.testvolumesize", "67108864"])
            .args(["-csi.testvolumeexpandsize", "134217728", "-ginkgo.no-color", "-ginkgo.v"])
            .output()
            .expect("run csi-sanity");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{access}: {said}");
        let count = said.lines().find(|line| line.contains(" Passed | ")).expect("a count");
        assert!(count.contains(" 0 Failed "), "{access}: {count}");
        let passed =
            count.split(" Passed").next().and_then(|line| line.split(' ').next_back()).expect("a count");
        assert!(passed.parse::<u32>().is_ok_and(|passed| passed >= 60), "{access}: {count}");
        let skipped = said.lines().filter_map(|line| line.trim_start().strip_prefix("[SKIPPED] "));
        let wrong: Vec<&str> = skipped
            .filter(|why| {
                !why.starts_with("in [") && !NOT_CLAIMED.iter().any(|reason| why.starts_with(reason))
            })
            .collect();
        assert!(wrong.is_empty(), "{access}: skipped though the mock claims it: {wrong:#?}");
    }
}
