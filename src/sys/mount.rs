//! Mounting, unmounting, and what is mounted where.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use nix::mount::{MntFlags, MsFlags, umount2};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

use files::{Context, Result, step};

/// A line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The kernel's number of this mount, one at a time.
    pub id: u64,
    /// Device number of the filesystem, `major:minor`. Not a block device's where the filesystem may
    /// be on several, as btrfs: see [`Mount::is_of`].
    pub dev: String,
    /// The directory or file of that filesystem which is seen here.
    pub root: PathBuf,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Whether this mount is read-only.
    pub read_only: bool,
    /// Whether the filesystem is, for all its mounts. The kernel does that after an error, too, which ext4 shows as
    /// `emergency_ro` from Linux 6.15 on.
    pub super_read_only: bool,
    /// Whether what is mounted below is seen in the namespaces that have this mount from here, as those of pods.
    pub shared: bool,
    /// `ext4`, `xfs`, ...
    pub fs_type: String,
    /// What was mounted: a device node's path, for a filesystem on a block device.
    pub source: PathBuf,
}

impl Mount {
    /// Whether the filesystem is on the block device numbered `dev`.
    ///
    /// btrfs shows a number of its own making, so there it is the device it names as its source, whose
    /// number the kernel knows by its name whatever `/dev` holds.
    pub fn is_of(&self, dev: &str) -> bool {
        self.dev == dev || (self.dev.starts_with("0:") && self.device().is_some_and(|device| device == dev))
    }

    /// The number of the filesystem's block device, `major:minor`; `None` if it has none.
    pub fn device(&self) -> Option<String> {
        if !self.dev.starts_with("0:") {
            return Some(self.dev.clone());
        }
        let path = Path::new("/sys/class/block").join(self.source.file_name()?).join("dev");
        Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
    }
}

impl Mount {
    /// How many errors the filesystem has counted; `None` where it has none, or does not count. ext4 does, until its
    /// check clears them (`Documentation/ABI/testing/sysfs-fs-ext4`: `errors_count`), and so does btrfs for each of its
    /// devices, until `btrfs device stats -z` does (`sysfs-fs-btrfs`: `devinfo/<id>/error_stats`).
    pub fn errors(&self) -> Result<Option<u64>> {
        let Some(dev) = self.device() else { return Ok(None) };
        let block = Path::new("/sys/dev/block").join(dev);
        let Some(name) = block.canonicalize().ok().and_then(|path| path.file_name().map(ToOwned::to_owned))
        else {
            return Ok(None);
        };
        let count = match self.fs_type.as_str() {
            "ext4" => {
                let counter = Path::new("/sys/fs/ext4").join(name).join("errors_count");
                read_if_there(&counter)?.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
            }
            "btrfs" => btrfs_errors(Path::new("/sys/fs/btrfs"), Path::new(&name))?,
            _ => 0,
        };
        Ok((count > 0).then_some(count))
    }
}

/// The errors that the btrfs with a device of this name has counted on all its devices.
fn btrfs_errors(all: &Path, device: &Path) -> Result<u64> {
    let entries = |dir: &Path| -> Result<Vec<PathBuf>> {
        match std::fs::read_dir(dir) {
            Ok(entries) => Ok(entries.flatten().map(|entry| entry.path()).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error).context("list", dir),
        }
    };
    let is_on = |of: &PathBuf| of.join("devices").join(device).exists();
    let Some(filesystem) = entries(all)?.into_iter().find(is_on) else { return Ok(0) };
    let mut count = 0;
    for device in entries(&filesystem.join("devinfo"))? {
        let counters = read_if_there(&device.join("error_stats"))?.unwrap_or_default();
        // A line each: `read_errs 3`.
        let numbers = counters.lines().filter_map(|line| line.split(' ').next_back()?.parse::<u64>().ok());
        count += numbers.sum::<u64>();
    }
    Ok(count)
}

fn read_if_there(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some).context("read", path),
    }
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

/// The mount that contains `path`, which has no links in it.
pub fn holding(path: &Path) -> Result<Option<Mount>> {
    let holds = |mount: &Mount| path.starts_with(&mount.mount_point);
    // The last at a path is the one seen, and `max_by_key` takes the last of equal ones.
    Ok(mounts()?.into_iter().filter(holds).max_by_key(|mount| mount.mount_point.as_os_str().len()))
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let id = text(fields.next()?).parse().ok()?;
    let dev = text(fields.nth(1)?);
    let root = unescape(fields.next()?);
    let mount_point = unescape(fields.next()?);
    let has_ro = |options: &[u8]| {
        options.split(|byte| *byte == b',').any(|option| option == b"ro" || option == b"emergency_ro")
    };
    let read_only = has_ro(fields.next()?);
    let mut shared = false;
    for field in fields.by_ref().take_while(|field| *field != b"-") {
        shared = shared || field.starts_with(b"shared:");
    }
    let fs_type = text(fields.next()?);
    let source = unescape(fields.next()?);
    let super_read_only = fields.next().is_some_and(has_ro);
    Some(Mount { id, dev, root, mount_point, read_only, super_read_only, shared, fs_type, source })
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

/// Opens a path as a place to mount on. It must be as mountinfo shows it, without links: where somebody has put one since the path
/// was looked up, the error is ELOOP (openat2(2)). What is mounted on the descriptor cannot come to be elsewhere.
fn open_place(path: &Path) -> Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
    openat2(AT_FDCWD, path, how).context("open", path)
}

/// The name of a descriptor for calls that take a path.
fn name_of(place: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd()))
}

/// Mounts `device` with the filesystem's own `options` (comma separated). `target` is as mountinfo shows it.
#[expect(clippy::disallowed_methods, reason = "this is the step")]
pub fn mount(device: &Path, target: &Path, fs_type: &str, flags: MsFlags, options: &str) -> Result<()> {
    let place = open_place(target)?;
    step("mount a filesystem at", target, || {
        nix::mount::mount(Some(device), &name_of(&place), Some(fs_type), flags, Some(options))
    })
}

/// Mounts `device` where no process sees it, and opens the root of its filesystem (fsopen(2), fsmount(2)). It stays mounted until
/// the file is closed.
pub fn mount_unseen(device: &Path, fs_type: &str) -> Result<File> {
    step("mount the filesystem of", device, || {
        let context = fsopen(fs_type, FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, "source", device)?;
        fsconfig_create(&context)?;
        let tree = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        rustix::fs::openat(&tree, c".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    })
    .map(File::from)
}

/// Shows `source` (a file or a directory) at `target` as well.
///
/// A read-only one is made read-only before it is seen anywhere (open_tree(2), mount_setattr(2),
/// move_mount(2)): a crash cannot leave a writable one, and flags such as `nosuid` stay. Both paths are as mountinfo shows them.
pub fn bind(source: &Path, target: &Path, read_only: bool) -> Result<()> {
    let (clone, place) = (clone_of(source)?, open_place(target)?);
    if read_only {
        step("make read-only a clone of", source, || set_read_only(&clone))?;
    }
    step("bind mount at", target, || attach(&clone, &place))
}

/// A clone of the mount at `source` that is seen nowhere. Its filesystem stays mounted until the descriptor is closed.
pub fn clone_of(source: &Path) -> Result<OwnedFd> {
    let from = open_place(source)?;
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    step("clone the mount at", source, || open_tree(&from, c"", flags))
}

fn set_read_only(tree: &OwnedFd) -> io::Result<()> {
    let attributes =
        libc::mount_attr { attr_set: libc::MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: mount_setattr reads an empty path and one `mount_attr` of the size in its argument; both live
    // through the call, and the descriptor is open.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn attach(tree: &OwnedFd, place: &OwnedFd) -> rustix::io::Result<()> {
    let empty_paths = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(tree, c"", place, c"", empty_paths)
}

/// Unmounts all that is stacked at `target`; fine when nothing is.
pub fn unmount(target: &Path) -> Result<()> {
    // One more than any caller stacks; a mount that the kernel will not part with is an error.
    for _ in 0..16 {
        if mounted_at(target)?.is_none() {
            return Ok(());
        }
        unmount_top(target)?;
    }
    Err(io::Error::from_raw_os_error(libc::EBUSY)).context("unmount all that is stacked at", target)
}

/// For how long a mount that is busy is tried again. Between fork and exec a process has a copy of all descriptors of the
/// one that starts it, of files that are closed there by now, too: on a loaded machine that may take a while.
const BUSY: Duration = Duration::from_millis(500);

/// Unmounts the topmost mount at `target`, not those below it.
#[expect(clippy::disallowed_methods, reason = "this is the step")]
pub fn unmount_top(target: &Path) -> Result<()> {
    // The place itself is not opened: that would keep it busy.
    in_parent(target, |place| {
        let deadline = Instant::now() + BUSY;
        step("unmount", target, || {
            loop {
                match umount2(place, MntFlags::UMOUNT_NOFOLLOW) {
                    Err(Errno::EBUSY) if Instant::now() < deadline => std::thread::sleep(BUSY / 50),
                    done => return done,
                }
            }
        })
    })
}

/// Makes, removes or unmounts `target`, a path as mountinfo shows it, by a name in its parent's descriptor: where somebody exchanges
/// one of the directories above it for a link, nothing behind that is touched.
pub fn in_parent<T>(target: &Path, act: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput)).context("find the parent of", target);
    };
    let parent = open_place(parent)?;
    act(&name_of(&parent).join(name)).map_err(|error| files::Error { path: target.to_owned(), ..error })
}

/// The path as mountinfo shows it: symbolic links among its directories resolved. The last part is not looked into, for it may be the
/// root of a filesystem that no longer answers. A path whose directory is missing stays as it is: nothing can be mounted
/// there.
pub fn resolved(path: &Path) -> PathBuf {
    match (path.parent().map(Path::canonicalize), path.file_name()) {
        (Some(Ok(parent)), Some(name)) => parent.join(name),
        _ => path.to_owned(),
    }
}

/// Whether the last part of a path is a symbolic link, which nothing is mounted on.
pub fn is_link(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|meta| meta.is_symlink())
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
        assert_eq!(mount.id, 36);
        assert_eq!(mount.dev, "98:0");
        assert_eq!(mount.source, Path::new("/dev/root"));
        assert_eq!(mount.root, Path::new("/mnt1"));
        assert_eq!(mount.mount_point, Path::new("/mnt two"));
        assert_eq!(mount.fs_type, "ext4");
        assert!(mount.read_only && !mount.super_read_only && mount.shared);
        assert_eq!(parse_line(b""), None);
        let line = br"36 35 7:1 / /mnt rw - ext4 /dev/loop1 rw,errors=remount-ro,emergency_ro";
        let mount = parse_line(line).expect("a whole line");
        assert!(mount.super_read_only && !mount.shared);
        let line = br"36 35 7:1 / /mnt rw - ext4 /dev/loop1 rw,errors=remount-ro";
        assert!(!parse_line(line).expect("a whole line").super_read_only);
    }

    #[test]
    fn only_plain_absolute_paths_reach_the_kernel() {
        assert!(is_plain_absolute(Path::new("/var/lib/kubelet/x")));
        for bad in ["", "relative", "/a/../b", "/a\0b"] {
            assert!(!is_plain_absolute(Path::new(bad)), "{bad:?}");
        }
    }
}
