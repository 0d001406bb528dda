//! Cleaning up below a directory that is ours alone, such as a temporary one: everything that was mounted
//! or attached there, by any process, also after a crash.

use std::path::Path;
use std::time::Duration;

use super::loopdev::LoopDevice;
use super::{freeze, mount};
use files::Result;

const ROUNDS: u32 = 40;

/// Unmounts all that is mounted below `dir`, detaches every loop device whose backing file is
/// below it, and returns what could not be freed.
///
/// A volume's device may back on a file inside a pool that is a mounted device itself, so it works in rounds. A process that is being
/// started, or a mount namespace, may hold a copy of what is there for a moment: what stays is tried for two seconds.
pub fn sweep(dir: &Path) -> Result<Vec<String>> {
    let mut left = Vec::new();
    for _ in 0..ROUNDS {
        let before = std::mem::take(&mut left);
        let mut below = mount::mounts()?;
        below.retain(|mount| mount.mount_point.starts_with(dir) && mount.mount_point != dir);
        let devices = devices_below(dir)?;
        if below.is_empty() && devices.is_empty() {
            return Ok(left);
        }
        for mount in below.iter().rev() {
            // A frozen filesystem would live on, and its device with it, without a place to thaw it at.
            // A bind mount of something else cannot be thawed, and need not be.
            if let Ok(Some(root)) = freeze::Root::open(mount) {
                let _ = freeze::thaw(&root);
            }
            if mount::unmount(&mount.mount_point).is_err() {
                left.push(format!("mount {}", mount.mount_point.display()));
            }
        }
        for device in devices {
            let path = device.path();
            if !device.detach().unwrap_or(false) {
                left.push(format!("device {}", path.display()));
            }
        }
        if left == before {
            std::thread::sleep(Duration::from_secs(2) / ROUNDS);
        }
    }
    Ok(left)
}

/// The loop devices whose backing file is below `dir`, whether or not it still has a name.
pub fn devices_below(dir: &Path) -> Result<Vec<LoopDevice>> {
    LoopDevice::all_on(|path| path.starts_with(dir))
}
