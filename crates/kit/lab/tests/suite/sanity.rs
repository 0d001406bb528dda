//! csi-sanity, the CSI community's own test of a driver, against the mock.

use testkit::sanity::Ran;

use super::Lab;

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
    let dir = tempfile::tempdir().expect("temp dir");
    let (_lab, socket) = Lab::mock(&dir, &[]).await;
    for access in ["mount", "block"] {
        let ran = Ran::of(&socket, dir.path(), "note: other\n", access, &[]);
        let count = &ran.count;
        assert!(ran.is_good && count.contains(" 0 Failed "), "{access}: {}", ran.said);
        let passed =
            count.split(" Passed").next().and_then(|line| line.split(' ').next_back()).expect("a count");
        assert!(passed.parse::<u32>().is_ok_and(|passed| passed >= 60), "{access}: {count}");
        let is_claimed = |why: &&str| !NOT_CLAIMED.iter().any(|reason| why.starts_with(reason));
        let wrong: Vec<&str> = ran.skipped().filter(is_claimed).collect();
        assert!(wrong.is_empty(), "{access}: skipped though the mock claims it: {wrong:#?}");
    }
}
