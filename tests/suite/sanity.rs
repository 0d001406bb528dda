//! csi-sanity, the CSI community's own test of a driver, against ours: each pool, both access types.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{POOLS, Rig, have_root, leftovers};

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

#[tokio::test(flavor = "multi_thread")]
async fn csi_sanity_finds_nothing() {
    if !have_root() {
        return;
    }
    let Some(program) = csi_sanity() else { return };
    for pool in POOLS {
        let rig = Rig::start(pool).await;
        for access in ["mount", "block"] {
            let dir = rig.dir.path();
            let output = Command::new(&program)
                .arg("-csi.endpoint")
                .arg(format!("unix://{}", rig.socket().display()))
                .arg("-csi.stagingdir")
                .arg(dir.join("sanity-staging"))
                .arg("-csi.mountdir")
                .arg(dir.join("sanity-mount"))
                .args(["-csi.testvolumeaccesstype", access, "-csi.testvolumesize", "67108864"])
                .arg("-ginkgo.no-color")
                .output()
                .expect("run csi-sanity");
            let said = String::from_utf8_lossy(&output.stdout);
            let count = said.lines().find(|line| line.contains(" Passed | ")).unwrap_or("no count");
            println!("csi-sanity, {} pool, {access}: {count}", pool.flag());
            assert!(output.status.success(), "csi-sanity, {pool:?}, {access}:\n{said}");
            assert!(count.contains(" 0 Failed "), "{count}");
            let left: Vec<String> =
                leftovers(dir).into_iter().filter(|left| left.contains("sanity")).collect();
            assert!(left.is_empty(), "left mounted: {left:?}");
        }
        rig.finish();
    }
}
