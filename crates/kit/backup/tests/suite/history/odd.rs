//! What is odd about the world of a life: several commands at once, a clock that jumps, a disk that is full, a server that fails,
//! and a user, or keys, that may only read.

use std::fs::File;
use std::process::Command;
use std::time::{Duration, SystemTime};

use nix::sys::signal::Signal;

use super::{Life, Taken};
use crate::clock::{Clock, DAY};
use crate::proxy::{Fault, Proxy};
use crate::rights::{by_nobody, set_mode, walk};
use crate::s3::Bucket;
use crate::tool::{Mounted, Place, Running, arg, text};

pub enum Odd {
    /// A directory. As root it is a filesystem of its own.
    Directory { clock: Clock, disk: Option<Mounted> },
    /// A bucket behind a relay. It refuses signatures whose time is wrong by more than 15 minutes.
    Bucket { clock: Clock, proxy: Proxy, _server: Running },
}

impl Odd {
    pub fn new(is_in_bucket: bool) -> (Self, Place) {
        if is_in_bucket {
            let mut bucket = Bucket::start();
            let proxy = bucket.proxy();
            let clock = Clock::new(&bucket.place);
            return (Odd::Bucket { clock, proxy, _server: bucket.server }, bucket.place);
        }
        let mut place = Place::new();
        set_mode(place.dir.path(), 0o777);
        let size = format!("size={ROOM}");
        let tmpfs = || Mounted::at(place.path("disk"), &["-t", "tmpfs", "-o", &size, "none"]);
        let disk = nix::unistd::geteuid().is_root().then(tmpfs);
        if let Some(disk) = &disk {
            place.objects_in = disk.0.join("repository");
        }
        (Odd::Directory { clock: Clock::new(&place), disk }, place)
    }
}

/// Bytes of the disk where it is not full. A tmpfs with a limit can have another one.
const ROOM: u64 = 4 << 30;

fn resize(disk: &Mounted, bytes: u64) {
    let mut command = Command::new("mount");
    command.args(["-o", &format!("remount,size={bytes}")]).arg(&disk.0);
    assert!(command.status().expect("mount").success(), "{bytes} bytes");
}

impl Life {
    /// A command line. Sometimes its clock is not right.
    pub fn command(&mut self, arguments: &[&str]) -> Command {
        let mut command = self.place.command(arguments);
        let (clock, jump) = match &self.odd {
            Odd::Directory { clock, .. } => (clock, 400 * DAY),
            Odd::Bucket { clock, .. } => (clock, 10 * 60),
        };
        if self.random.u8(..3) == 0 {
            clock.set(&mut command, self.random.i64(-jump..jump));
        }
        command
    }

    /// Leaves next to no room in the repository, where its disk can be made smaller. A bucket refuses data when its quota is used up.
    pub fn fill_the_disk(&mut self) -> bool {
        let disk = match &self.odd {
            Odd::Directory { disk: Some(disk), .. } => disk,
            Odd::Directory { disk: None, .. } => return false,
            Odd::Bucket { proxy, .. } => {
                (0..1000).for_each(|_| proxy.next("PUT", "/packs/", Fault::Refuse(403)));
                return true;
            }
        };
        let now = nix::sys::statvfs::statvfs(&disk.0).expect("statvfs");
        let used = (now.blocks() - now.blocks_free()) * now.fragment_size();
        resize(disk, used + self.random.u64(4096..512 << 10));
        true
    }

    /// The server of the bucket gets some of the next requests wrong. What it refuses for good ends a writer.
    pub fn misbehave(&mut self, may_refuse: bool) {
        let Odd::Bucket { proxy, .. } = &self.odd else { return };
        let faults = [
            ("PUT", "/packs/", Fault::Refuse(403)),
            ("PUT", "/packs/", Fault::Refuse(503)),
            ("PUT", "/packs/", Fault::LoseAnswer),
            ("PUT", "/backups/", Fault::LoseAnswer),
            ("PUT", "/locks/", Fault::LoseAnswer),
            ("GET", "/packs/", Fault::Refuse(500)),
            ("GET", "/backups/", Fault::Refuse(503)),
            ("GET", "/packs/", Fault::Cut),
            ("GET", "/backups/", Fault::Cut),
            ("DELETE", "/", Fault::LoseAnswer),
        ];
        for (method, part, fault) in faults.into_iter().skip(usize::from(!may_refuse)) {
            if self.random.u8(..4) == 0 {
                proxy.next(method, part, fault);
            }
        }
    }

    /// The disk has room again, the server does what it is asked, and the ten minutes are over in which a lock in a bucket
    /// outlives its process.
    pub fn behave(&self) {
        match &self.odd {
            Odd::Directory { disk, .. } => disk.iter().for_each(|disk| resize(disk, ROOM)),
            Odd::Bucket { proxy, .. } => proxy.forget(),
        }
        let Ok(locks) = self.place.repository().join("locks").read_dir() else { return };
        let long_ago = SystemTime::now() - Duration::from_secs(11 * 60);
        for lock in locks {
            let lock = File::options().write(true).open(lock.expect("entry").path()).expect("open");
            lock.set_modified(long_ago).expect("set the time");
        }
    }

    /// Two writers, perhaps of one volume, three readers and a prune at once, of whom some are killed. No reader fails because of others,
    /// but a prune keeps them out while it works.
    pub fn crowd(&mut self) {
        let first = self.take(0);
        let second = if self.random.bool() { self.twin(&first) } else { self.take(1) };
        let handles = [first, second];
        let before: Vec<String> = self.backups.keys().cloned().collect();
        let faults = self.faults();
        self.driver.script(faults.iter().copied());
        self.misbehave(true);
        let mut started = Vec::new();
        for handle in &handles {
            let mut arguments = self.source("auto", handle);
            arguments.push("--limit-rate=64Mi".to_owned());
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            started.push(("auto", None, Running::start(self.command(&arguments))));
        }
        for number in 0..2 {
            let Some(id) = self.random.choice(&before).cloned() else { break };
            let to = self.place.path(&format!("reader-{number}"));
            let _ = std::fs::remove_file(&to);
            let command = self.command(&["restore", &id, "--to", arg(&to)]);
            started.push(("restore", Some((id, to)), Running::start(command)));
        }
        if !before.is_empty() {
            started.push(("verify", None, Running::start(self.command(&["verify"]))));
        }
        std::thread::sleep(Duration::from_millis(self.random.u64(0..500)));
        if !before.is_empty() && self.random.bool() {
            // It waits for nobody, and removes no backup.
            let command = self.command(&["prune", "--max-unused", "0"]);
            started.push(("prune", None, Running::start(command)));
        }
        std::thread::sleep(Duration::from_millis(self.random.u64(0..500)));
        for (_, _, running) in &started {
            if self.random.u8(..3) == 0 {
                running.signal(Signal::SIGKILL);
            }
        }
        for (command, restored, running) in started {
            let output = self.wait(command, running);
            self.steps.push(format!("beside others: {command} {restored:?}, {faults:?}: {}", output.0));
            let is_done = output.0 == "exit status: 0";
            let waits = ["a prune works on the repository: wait", "cbt-backup prune (process "];
            let may_fail =
                ["auto", "prune"].contains(&command) || waits.iter().any(|words| output.2.contains(words));
            assert!(may_fail || is_done || output.0.contains("SIGKILL"), "{command}: {output:?}");
            if let Some((id, to)) = restored.filter(|_| is_done) {
                self.is_restored(&id, &to);
            }
        }
        self.driver.script([]);
        self.behave();
        self.adopt(&handles);
        if !before.is_empty() {
            let left = self.place.list();
            assert!(before.iter().all(|id| left.contains(id)), "{before:?}, and now {left:?}");
        }
    }

    /// A restore by one who may not write to the repository.
    pub fn check_as_reader(&mut self, id: &str) {
        let to = self.place.path("reader");
        let _ = std::fs::remove_file(&to);
        let mut command = self.command(&["restore", id, "--to", arg(&to)]);
        match &self.odd {
            Odd::Bucket { proxy, .. } => proxy.next("PUT", "/locks/", Fault::Refuse(403)),
            Odd::Directory { disk: Some(_), .. } => {
                for path in walk(&self.place.repository()) {
                    set_mode(&path, if path.is_dir() { 0o755 } else { 0o644 });
                }
                command = by_nobody(&command);
            }
            Odd::Directory { disk: None, .. } => {}
        }
        let output = command.output().expect("run");
        assert!(output.status.success(), "{}", text(&output.stderr));
        self.is_restored(id, &to);
    }

    fn is_restored(&self, id: &str, to: &std::path::Path) {
        let Taken { image, size, .. } = &self.taken[&self.backups[id]];
        assert_eq!(to.metadata().expect("restored").len(), *size, "{id}");
        image.compare(to, *size, &base::Stop::default()).unwrap_or_else(|error| panic!("{id}: {error}"));
    }
}
