//! Mounting, unmounting, and what is mounted where.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, umount2};

use super::{Context, Result};

/// A line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Device number of the filesystem, `major:minor`.
    pub dev: String,
    /// The directory or file of that filesystem which is seen here.
    pub root: PathBuf,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Whether this mount is read-only.
    pub read_only: bool,
    /// `ext4`, `xfs`, ...
    pub fs_type: String,
}

/// All mounts of this process's namespace, in mount order: the last at a path is the one seen.
pub fn mounts() -> Result<Vec<Mount>> {
    let path = Path::new("/proc/self/mountinfo");
    let text = std::fs::read(path).context("read", path)?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(parse_line).collect())
}

/// The mount seen at `path` itself, if it is a mount point.
pub fn mounted_at(path: &Path) -> Result<Option<Mount>> {
    Ok(mounts()?.into_iter().rev().find(|mount| mount.mount_point == path))
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let dev = text(fields.nth(2)?);
    let root = unescape(fields.next()?);
    let mount_point = unescape(fields.next()?);
    let read_only = fields.next()?.split(|byte| *byte == b',').any(|option| option == b"ro");
    let fs_type = text(fields.skip_while(|field| *field != b"-").nth(1)?);
    Some(Mount { dev, root, mount_point, read_only, fs_type })
}

/// Undoes the octal escapes of blanks and backslashes.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        match (first, tail) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after;
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(bytes).into()
}

/// Mounts `device` with the filesystem's own `options` (comma separated).
pub fn mount(device: &Path, target: &Path, fs_type: &str, flags: MsFlags, options: &str) -> Result<()> {
    nix::mount::mount(Some(device), target, Some(fs_type), flags, Some(options))
        .context("mount a filesystem at", target)
}

/// Shows `source` (a file or a directory) at `target` as well.
pub fn bind(source: &Path, target: &Path, read_only: bool) -> Result<()> {
    let none = None::<&Path>;
    nix::mount::mount(Some(source), target, none, MsFlags::MS_BIND, none).context("bind mount at", target)?;
    if read_only {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        if let Err(error) = nix::mount::mount(none, target, none, flags, none) {
            let _ = umount2(target, MntFlags::empty());
            return Err(error).context("make read-only the mount at", target);
        }
    }
    Ok(())
}

/// Unmounts what is seen at `target`; fine when nothing is.
pub fn unmount(target: &Path) -> Result<()> {
    match umount2(target, MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) | Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => Ok(()),
        Err(error) => Err(error).context("unmount", target),
    }
}

/// Whether a path may be given to a mount call: absolute, without `..` and NUL.
pub fn is_plain_absolute(path: &Path) -> bool {
    use std::path::Component;
    path.is_absolute()
        && !path.as_os_str().as_bytes().contains(&0)
        && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

pub use nix::mount::MsFlags as Flags;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_lines_parse_with_escapes_and_optional_fields() {
        let line = br"36 35 98:0 /mnt1 /mnt\040two ro,noatime shared:7 master:1 - ext4 /dev/root rw";
        let mount = parse_line(line).expect("a whole line");
        assert_eq!(mount.dev, "98:0");
        assert_eq!(mount.root, Path::new("/mnt1"));
        assert_eq!(mount.mount_point, Path::new("/mnt two"));
        assert_eq!(mount.fs_type, "ext4");
        assert!(mount.read_only);
        assert_eq!(parse_line(b""), None);
    }

    #[test]
    fn only_plain_absolute_paths_reach_the_kernel() {
        assert!(is_plain_absolute(Path::new("/var/lib/kubelet/x")));
        for bad in ["", "relative", "/a/../b", "/a\0b"] {
            assert!(!is_plain_absolute(Path::new(bad)), "{bad:?}");
        }
    }
}
