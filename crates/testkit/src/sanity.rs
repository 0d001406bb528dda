//! csi-sanity, the CSI community's own test of a driver, as the suites of driver and router run it.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use crate::{HOME, leftovers};

/// The version that `make deps` installs.
const VERSION: &str = "v5.6.0";

/// The one test of it that fails, for every driver that says where its snapshots can be used: it compares two messages by
/// their memory, where Go keeps the size of the one that was sent. `tests/suite/snapshots.rs` compares what they say.
const FAILS: &str = "[FAIL] CreateSnapshot [Controller Server] [It] should succeed when creating a snapshot with accessibility \
                     requirements";

/// Why csi-sanity may skip a test where there are no attachments; where there are, it skips nothing.
const MAY_SKIP_WITHOUT_ATTACH: [&str; 5] = [
    "ControllerPublishVolume not supported",
    "ControllerPublishVolume.readonly field not supported",
    "Controller Publish, UnpublishVolume not supported",
    "ControllerUnpublishVolume not supported",
    "testnodevolumeattachlimit not enabled",
];

/// What csi-sanity says of a driver.
pub struct Ran {
    pub is_good: bool,
    pub said: String,
    /// How many tests came out how.
    pub count: String,
}

impl Ran {
    /// Runs it for an access type against the driver or router at `socket`, with these mutable parameters in YAML.
    pub fn of(socket: &Path, dir: &Path, mutable: &str, access: &str, more: &[&str]) -> Self {
        let program = Path::new(HOME).join(format!(".deps/csi-sanity-{VERSION}/csi-sanity"));
        assert!(program.exists(), "needs csi-sanity {VERSION}: run `make test-deps`");
        let file = dir.join("mutable.yaml");
        std::fs::write(&file, mutable).expect("write");
        let output = Command::new(&program)
            .arg("-csi.endpoint")
            .arg(format!("unix://{}", socket.display()))
            .arg("-csi.stagingdir")
            .arg(dir.join("sanity-staging"))
            .arg("-csi.mountdir")
            .arg(dir.join("sanity-mount"))
            .arg("-csi.testvolumemutableparameters")
            .arg(&file)
            .args(["-csi.testvolumeaccesstype", access, "-csi.testvolumesize", "67108864"])
            .args(["-csi.testvolumeexpandsize", "134217728", "-ginkgo.no-color", "-ginkgo.v"])
            .args(more)
            .output()
            .expect("run csi-sanity");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let count = said.lines().find(|line| line.contains(" Passed | ")).unwrap_or("no count").to_owned();
        Ran { is_good: output.status.success(), said, count }
    }

    pub fn skipped(&self) -> impl Iterator<Item = &str> {
        let reasons = self.said.lines().filter_map(|line| line.trim_start().strip_prefix("[SKIPPED] "));
        reasons.filter(|why| !why.starts_with("in ["))
    }
}

/// Runs csi-sanity for both access types against the driver or router at `socket`, whose nodes' names begin with `node`, and
/// fails where it finds anything, skips what is claimed, or leaves a mount in `dir`.
pub fn assert_finds_nothing(what: &str, socket: &Path, dir: &Path, node: &str, attach: bool) {
    let mutable = "readAheadKiB: \"1024\"\ndirectIO: \"false\"\n";
    let more: &[&str] = if attach { &["-csi.testnodevolumeattachlimit"] } else { &[] };
    for access in ["mount", "block"] {
        let ran = Ran::of(socket, dir, mutable, access, more);
        let Ran { said, count, .. } = &ran;
        // Past the test runner's capture: the counts are part of what `make test` tells.
        writeln!(std::io::stdout(), "csi-sanity, {what}, {access}, attach {attach}: {count}").expect("write");
        assert_only_memory_differs(said, node);
        assert!(count.contains(" 1 Failed "), "csi-sanity, {what}, {access}, attach {attach}: {count}");
        let may_skip =
            |line: &str| !attach && MAY_SKIP_WITHOUT_ATTACH.iter().any(|reason| line.contains(reason));
        let skipped: Vec<&str> = ran.skipped().collect();
        let wrong: Vec<&&str> = skipped.iter().filter(|line| !may_skip(line)).collect();
        assert!(wrong.is_empty(), "skipped though we claim it: {wrong:#?}");
        // By the count too, for the lines may come to be worded otherwise.
        assert_eq!(count.contains(" 0 Skipped"), attach, "{count}");
        assert_eq!(skipped.is_empty(), attach, "csi-sanity no longer says what it skips:\n{said}");
        let left: Vec<String> = leftovers(dir).into_iter().filter(|left| left.contains("sanity")).collect();
        assert!(left.is_empty(), "left mounted: {left:?}");
    }
}

/// Fails where csi-sanity found anything but that these two messages, which are equal and name `node`, are not the same memory.
#[track_caller]
fn assert_only_memory_differs(said: &str, node: &str) {
    let failed: Vec<&str> = said.lines().map(str::trim).filter(|line| line.starts_with("[FAIL] ")).collect();
    assert_eq!(failed, [FAILS], "{said}");
    let found = said.split_once("[FAILED] Expected\n").expect("what it found").1;
    let (got, wanted) = found.split_once("to equal\n").expect("what it wanted");
    let wanted = wanted.split_once("In [It] at:").expect("where").0;
    let content = |message: &str| -> Vec<String> {
        let lines = message.lines().map(str::trim);
        let is_memory =
            |line: &str| line.starts_with("<*csi.Topology | 0x") || line.starts_with("sizeCache: ");
        lines.filter(|line| !is_memory(line)).map(str::to_owned).collect()
    };
    assert!(got.contains(node), "{got}");
    assert_eq!(content(got), content(wanted));
}
