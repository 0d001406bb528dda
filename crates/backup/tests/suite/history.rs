//! Random lives of a volume and its repository: writes, discards, expansions, backups of every kind, streams that are cut or
//! lie, kills at any moment, Ctrl-C and `--resume`, prunes. After each step some backup is restored, at the end all are; each must be the
//! volume as it was, byte for byte, and nothing that a prune leaves may be unused.

use std::collections::BTreeMap;
use std::fs::File;
use std::time::{Duration, SystemTime};

use fastrand::Rng;
use files::pattern::Image;
use nix::sys::signal::Signal;

use crate::driver::{Driver, Fault, Lie};
use crate::tool::{BLOCK, MIB, Place, Running, arg, id, text};

/// Steps of a life.
const STEPS: usize = 24;

pub struct Life {
    random: Rng,
    place: Place,
    driver: Driver,
    file: File,
    image: Image,
    size: u64,
    /// Snapshots: what the volume was.
    taken: BTreeMap<String, (Image, u64)>,
    /// Backups that were acknowledged and not pruned since, and the snapshot of each.
    backups: BTreeMap<String, String>,
    /// What happened, for whoever reads a failure.
    steps: Vec<String>,
}

impl Life {
    /// In a place that nobody has used yet.
    pub fn at(place: Place, seed: u64) -> Self {
        let driver = Driver::start(&place.path("csi.sock"));
        // Segments are of 128 MiB: the volume has two, or three when it has grown.
        let size = 200 * MIB;
        let file = place.open_image(size);
        let mut life = Life {
            random: Rng::with_seed(seed),
            place,
            driver,
            file,
            image: Image::default(),
            size,
            taken: BTreeMap::new(),
            backups: BTreeMap::new(),
            steps: vec![format!("seed {seed}")],
        };
        life.write();
        life
    }

    pub fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            self.step();
        }
        self.end();
    }

    fn write(&mut self) {
        for _ in 0..self.random.usize(1..40) {
            let blocks = self.size / BLOCK;
            let count =
                if self.random.u8(..4) == 0 { self.random.u64(1..600) } else { self.random.u64(1..9) };
            // Some of it where segments meet, and at the end.
            let start = match self.random.u8(..8) {
                0 => 128 * MIB / BLOCK - count / 2,
                1 => blocks - count,
                _ => self.random.u64(0..blocks - count),
            };
            let seed = self.random.u64(..);
            match self.random.u8(..5) {
                0 => self.image.punch(&self.file, start, count),
                1 => self.image.zero(&self.file, start, count),
                _ => self.image.write(&self.file, start, count, seed),
            }
            .expect("write to the image");
        }
    }

    fn step(&mut self) {
        match self.random.u8(..10) {
            0 if self.size < 300 * MIB => {
                self.size += self.random.u64(1..40) * MIB;
                self.file.set_len(self.size).expect("grow");
                self.steps.push(format!("grow to {}", self.size));
            }
            0..3 => self.write(),
            3 => self.prune(),
            4 => {
                let forgotten = self.taken.keys().nth(self.random.usize(..self.taken.len().max(1))).cloned();
                if let Some(handle) = forgotten {
                    self.driver.forget(&handle);
                    self.steps.push(format!("the driver forgets {handle}"));
                }
            }
            _ => self.back_up(),
        }
        let any = self.backups.keys().nth(self.random.usize(..self.backups.len().max(1))).cloned();
        if let Some(id) = any {
            self.check(&id);
        }
    }

    /// In a bucket, what was killed leaves its lock for ten minutes. They are over.
    fn wait_for_locks(&self) {
        let Ok(locks) = self.place.repository().join("locks").read_dir() else { return };
        let long_ago = SystemTime::now() - Duration::from_secs(11 * 60);
        for lock in locks {
            let lock = File::options().write(true).open(lock.expect("entry").path()).expect("open");
            lock.set_modified(long_ago).expect("set the time");
        }
    }

    fn check(&self, id: &str) {
        let (image, size) = &self.taken[&self.backups[id]];
        self.place.restores(id, image, *size);
    }

    /// A new snapshot, and a backup of it that may be disturbed; where it failed, perhaps another try.
    fn back_up(&mut self) {
        self.write();
        let handle = format!("snap-{}", self.taken.len());
        self.driver.snapshot(&handle, &self.image, self.size);
        self.taken.insert(handle.clone(), (self.image.clone(), self.size));
        let mut is_resumed = false;
        for _ in 0..3 {
            let wish = ["auto", "auto", "full", "incremental"][self.random.usize(..4)];
            let faults = self.faults();
            let signal = match self.random.u8(..3) {
                0 => Some(Signal::SIGKILL),
                1 => Some(Signal::SIGINT),
                _ => None,
            };
            self.driver.script(faults.iter().copied());
            let (endpoint, image) = (self.driver.endpoint(), self.place.image());
            let mut arguments = vec![
                wish,
                "--volume",
                "v",
                "--device",
                arg(&image),
                "--endpoint",
                &endpoint,
                "--snapshot",
                &handle,
            ];
            arguments.extend(["--output", "json"]);
            // Slow, so that a signal meets it at work.
            arguments.extend(signal.map(|_| ["--limit-rate", "8Mi"]).iter().flatten());
            arguments.extend(is_resumed.then_some("--resume"));
            let mut running = Running::start(self.place.command(&arguments));
            if let Some(signal) = signal {
                std::thread::sleep(Duration::from_millis(self.random.u64(0..400)));
                // It may have ended already.
                running.signal(signal);
            }
            let output = wait(&mut running);
            self.steps
                .push(format!("{wish} {handle}, {faults:?}, {signal:?}, resume {is_resumed}: {}", output.0));
            self.driver.script([]);
            self.wait_for_locks();
            if output.0 == "exit status: 0" {
                let made: serde_json::Value = serde_json::from_str(&output.1).expect("JSON");
                self.backups.insert(id(&made), handle);
                return;
            }
            // Killed after its commit, it is there all the same, and is that snapshot.
            let new: Vec<String> =
                self.place_list().into_iter().filter(|id| !self.backups.contains_key(id)).collect();
            assert!(new.len() <= 1, "one backup has made {new:?}");
            if let [id] = new.as_slice() {
                self.backups.insert(id.clone(), handle);
                return;
            }
            is_resumed = self.random.bool();
        }
    }

    /// What goes wrong with the next streams.
    fn faults(&mut self) -> Vec<Fault> {
        let at = self.random.usize(..4);
        let lie = Lie::ALL[self.random.usize(..Lie::ALL.len())];
        match self.random.u8(..10) {
            0 => vec![Fault::Cut(at)],
            1 => vec![Fault::Breaks(at)],
            2 => vec![Fault::NoDelta],
            3 => vec![Fault::Lies(lie, at)],
            4 => vec![Fault::Cut(at), Fault::Lies(lie, at)],
            5 => vec![Fault::Cut(at), Fault::FromTheBeginning],
            6 => vec![Fault::Cut(0), Fault::Cut(at), Fault::Cut(0)],
            _ => Vec::new(),
        }
    }

    /// The backups, also before there is a repository.
    fn place_list(&self) -> Vec<String> {
        match self.place.repository().join("repository").exists() {
            true => self.place.list(),
            false => Vec::new(),
        }
    }

    fn prune(&mut self) {
        if self.place_list().is_empty() {
            return;
        }
        let keep = self.random.usize(1..5);
        let unused = ["0", "0", "30"][self.random.usize(..3)];
        let keep_text = keep.to_string();
        let arguments = ["prune", "--keep-last", &keep_text, "--max-unused", unused];
        let mut running = Running::start(self.place.command(&arguments));
        let is_killed = self.random.bool();
        if is_killed {
            std::thread::sleep(Duration::from_millis(self.random.u64(0..60)));
            running.signal(Signal::SIGKILL);
        }
        let output = wait(&mut running);
        self.wait_for_locks();
        self.steps.push(format!("prune to {keep}, {unused} %, killed {is_killed}: {}", output.0));
        let newest: Vec<String> = self.backups.keys().rev().take(keep).cloned().collect();
        let left = self.place.list();
        match is_killed {
            // Some are gone, but none that was to be kept.
            true => assert!(newest.iter().all(|id| left.contains(id)), "{newest:?} of {left:?}"),
            false => {
                assert_eq!(output.0, "exit status: 0", "{}", output.2);
                assert_eq!(left.iter().rev().cloned().collect::<Vec<_>>(), newest);
            }
        }
        self.backups.retain(|id, _| left.contains(id));
        assert_eq!(left.len(), self.backups.len());
    }

    /// All is restored, whole and over each other; nothing is damaged, and after a prune nothing unused.
    fn end(&mut self) {
        let ids: Vec<String> = self.backups.keys().cloned().collect();
        for id in &ids {
            self.check(id);
        }
        for pair in ids.windows(2) {
            let ((_, before), (image, size)) =
                (&self.taken[&self.backups[&pair[0]]], &self.taken[&self.backups[&pair[1]]]);
            if before == size {
                let to = self.place.path("restored");
                self.place.ok(&["restore", &pair[0], "--to", arg(&to), "--overwrite"]);
                self.place.ok(&["restore", &pair[1], "--to", arg(&to), "--onto-base", &pair[0]]);
                image
                    .compare(&to, *size, &base::Stop::default())
                    .unwrap_or_else(|error| panic!("{pair:?}: {error}"));
            }
        }
        if ids.is_empty() {
            return;
        }
        let verified = self.place.ok(&["verify"]);
        assert_eq!(verified["damage"].as_array().expect("a list").len(), 0, "{verified}");
        self.place.ok(&["prune", "--max-unused", "0"]);
        let verified = self.place.ok(&["verify"]);
        assert_eq!(
            (verified["damage"].as_array().map(Vec::len), verified["unused"].as_u64()),
            (Some(0), Some(0))
        );
        for id in &ids {
            self.check(id);
        }
        for path in self.place.objects() {
            let name = path.strip_prefix(self.place.repository()).expect("below").display().to_string();
            let is_known = name == "repository"
                || ["backups/", "packs/", "partial/", "locks/"].iter().any(|of| name.starts_with(of));
            assert!(is_known && !name.contains('#'), "{name} is left over");
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.steps.join("\n"));
        }
    }
}

/// How a process ended, its output, and what it said.
fn wait(running: &mut Running) -> (String, String, String) {
    use std::io::Read;
    let (mut output, mut error) = (Vec::new(), Vec::new());
    running.0.stdout.take().expect("piped").read_to_end(&mut output).expect("read");
    running.0.stderr.take().expect("piped").read_to_end(&mut error).expect("read");
    let status = running.0.wait().expect("wait");
    (status.to_string(), text(&output), text(&error))
}

/// `DELTAPATH_BACKUP_LIVES` says how many.
#[test]
fn every_backup_of_a_random_life_is_the_volume_as_it_was() {
    let lives = std::env::var("DELTAPATH_BACKUP_LIVES").map_or(4, |lives| lives.parse().expect("a number"));
    let first = std::env::var("DELTAPATH_BACKUP_SEED").map_or(1, |seed| seed.parse().expect("a number"));
    for seed in first..first + lives {
        Life::at(Place::new(), seed).run(STEPS);
    }
}
