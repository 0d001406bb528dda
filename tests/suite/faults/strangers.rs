//! Loop devices of other programs: dead ones, hanging ones, and settings that stay with a device number when we get it.
//!
//! The incident: because of one loop device whose filesystem had been shut down, snapshots, stages, publishes, deletions and
//! statistics of all volumes failed with `INTERNAL`, and the driver did not start again. A device on a FUSE server that no
//! longer answered made these calls hang.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use deltapath::sys::loopdev::{Access, LoopDevice};
use deltapath::sys::{mount, program};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request, Session,
};

use super::{DeadDevices, Disk};
use testkit::disk::attributes;
use testkit::prelude::*;
use testkit::{swept_dir, temp_dir};

/// Makes every call that looks for a loop device, and restarts the driver.
async fn everything_works(rig: &mut Rig) {
    let work = async {
        let (volume, ..) = rig.written_volume("raw", 8 * MIB, (1, 100, 1)).await;
        let snapshot = rig.snapshot("snapshot", &volume).await;
        let (restored, _) = rig.volume_from("restored", 0, from_snapshot(&snapshot)).await;
        let (files, target) = rig.published("files", 16 * MIB, mount_capability("ext4")).await;
        rig.stats(&files, &target).await.expect("NodeGetVolumeStats");
        rig.client.expand_volume(&volume, 16 * MIB).await.expect("ControllerExpandVolume");
        rig.snapshot("of the files", &files).await;
        rig.crash().await;
        for volume in [&restored, &files, &volume] {
            rig.delete(volume).await;
        }
        let mut check = Command::new(testkit::program("deltapath"));
        testkit::ok(check.args(["check", "--data-dir"]).arg(rig.data_dir()));
    };
    tokio::time::timeout(Duration::from_secs(60), work).await.expect("the calls hang");
}

#[apply(device_cases)]
async fn a_dead_loop_device_of_somebodys_stops_nobody(
    #[values(PoolKind::Xfs, PoolKind::Dir)] pool: PoolKind,
) {
    // Some have the same names as our files.
    let dead = DeadDevices::attach(&[
        "disk.img",
        "pool.img",
        "volumes/vol-00000000000000000000000000000000/bytes/data.img",
    ]);
    let mut rig = Rig::start(pool).await;
    everything_works(&mut rig).await;
    rig.finish();
    dead.detach();
}

/// The dead device is mounted. mkfs.btrfs looks up the file of each mounted loop device, and a dead one has none.
#[apply(device_test)]
async fn a_dead_filesystem_of_somebodys_stops_no_mkfs() {
    let disk = Disk::new("xfs", &["-q"], 320 << 20);
    let (place, _swept) = swept_dir();
    let image = disk.mount_point.join("image");
    std::fs::File::create(&image).and_then(|file| file.set_len(16 << 20)).expect("image");
    program::run("mkfs.ext4", &["-q"], &image, |code| code == 0).expect("mkfs");
    let mounted_at = place.path().join("mnt");
    std::fs::create_dir(&mounted_at).expect("mkdir");
    testkit::ok(Command::new("mount").args(["-o", "loop"]).args([&image, &mounted_at]));
    program::run("xfs_io", &["-x", "-c", "shutdown"], &disk.mount_point, |code| code == 0).expect("shutdown");
    let mut rig = Rig::start(PoolKind::Btrfs).await;
    let (files, _) = rig.published("files", 128 * MIB, mount_capability("btrfs")).await;
    rig.delete(&files).await;
    rig.finish();
}

/// A filesystem that stops answering requests once it is set to be silent.
struct Silent {
    place: tempfile::TempDir,
    gate: Arc<(Mutex<bool>, Condvar)>,
    server: Option<std::thread::JoinHandle<()>>,
}

impl Silent {
    fn start() -> Self {
        let place = temp_dir();
        let gate: Arc<(Mutex<bool>, Condvar)> = Arc::default();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("deltapath-test-silent".into())];
        let session =
            Session::new(Quiet(gate.clone()), place.path(), &config).expect("mount a FUSE filesystem");
        let server = std::thread::spawn(move || drop(session.run()));
        Silent { place, gate, server: Some(server) }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn be_silent(&self, silent: bool) {
        *self.gate.0.lock().expect("the gate") = silent;
        self.gate.1.notify_all();
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.be_silent(false);
        mount::unmount(self.place.path()).expect("unmount");
        let _ = self.server.take().map(std::thread::JoinHandle::join);
    }
}

struct Quiet(Arc<(Mutex<bool>, Condvar)>);

impl Quiet {
    fn attributes(inode: INodeNo) -> FileAttr {
        match inode {
            INodeNo::ROOT => attributes(inode, FileType::Directory, 0),
            _ => attributes(inode, FileType::RegularFile, 1 << 20),
        }
    }

    /// Waits until the filesystem is not silent, then answers. Each request has its own thread.
    fn when_it_may(&self, answer: impl FnOnce() + Send + 'static) {
        let gate = self.0.clone();
        std::thread::spawn(move || {
            let silent = gate.0.lock().expect("the gate");
            drop(gate.1.wait_while(silent, |silent| *silent).expect("the gate"));
            answer();
        });
    }
}

impl Filesystem for Quiet {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let inode = match name.to_str() {
            Some("disk.img") => INodeNo(2),
            Some("pool.img") => INodeNo(3),
            _ => return reply.error(Errno::ENOENT),
        };
        self.when_it_may(move || reply.entry(&Duration::ZERO, &Self::attributes(inode), Generation(0)));
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.when_it_may(move || reply.attr(&Duration::ZERO, &Self::attributes(inode)));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.when_it_may(move || reply.data(&vec![0; size as usize]));
    }
}

#[apply(device_test)]
async fn a_silent_loop_device_of_somebodys_stops_nobody() {
    let silent = Silent::start();
    let attach = |name: &str| LoopDevice::attach(&silent.file(name), Access::ReadOnly).expect("attach");
    let devices = ["disk.img", "pool.img"].map(attach);
    silent.be_silent(true);
    let mut rig = Rig::start(PoolKind::Btrfs).await;
    everything_works(&mut rig).await;
    rig.finish();
    silent.be_silent(false);
    for device in devices {
        assert!(device.detach().expect("detach"));
    }
}

/// The incident: a program had set a loop device to "write through", and the device number keeps that setting. The next
/// device with this number sends no flush, and a power cut loses synced data.
#[apply(device_test)]
async fn flushes_that_a_former_user_of_the_number_turned_off_are_on_again() {
    /// Sets all free loop devices to "write through", and back when dropped.
    struct WriteThrough(Vec<PathBuf>);
    impl Drop for WriteThrough {
        fn drop(&mut self) {
            self.0.iter().for_each(|path| drop(std::fs::write(path, "write back")));
        }
    }
    let mut rig = Rig::start(PoolKind::Dir).await;
    let volume = rig.volume("raw", MIB, block_capability()).await;
    let numbers =
        std::fs::read_dir("/sys/block").expect("/sys/block").map(|entry| entry.expect("entry").path());
    let is_free =
        |path: &Path| path.to_string_lossy().contains("/loop") && !path.join("loop/backing_file").exists();
    let free: Vec<PathBuf> =
        numbers.filter(|path| is_free(path)).map(|path| path.join("queue/write_cache")).collect();
    let reported = WriteThrough(free);
    reported.0.iter().for_each(|path| std::fs::write(path, "write through").expect("write_cache"));
    let device = rig.attach(&volume).await;
    let number = deltapath::sys::blockdev::number(&device).expect("a block device");
    let seen = std::fs::read_to_string(format!("/sys/dev/block/{number}/queue/write_cache")).expect("read");
    assert_eq!(seen.trim(), "write back");
    drop(reported);
    rig.detach_and_finish(&volume).await;
}
