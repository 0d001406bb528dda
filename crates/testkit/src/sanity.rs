//! What csi-sanity says of a driver. It is run by the suites of driver and router.

/// The one test of v5.6.0 that fails, for every driver that tells where its snapshots can be used: it compares two messages by
/// their memory, where Go keeps the size of the one that was sent. `tests/suite/snapshots.rs` compares what they say.
const FAILS: &str = "[FAIL] CreateSnapshot [Controller Server] [It] should succeed when creating a snapshot with accessibility \
                     requirements";

/// Fails where csi-sanity found anything but that these two messages, which are equal and name `node`, are not the same memory.
#[track_caller]
pub fn assert_only_memory_differs(said: &str, node: &str) {
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
