//! Random lives of two volumes and their repository: writes, discards, expansions, backups of every kind, streams that are cut or
//! lie, Ctrl-C and `--resume`, prunes, restores; two writers, three readers and a prune at once, a clock that jumps, a full disk, a user
//! who may only read (`odd.rs`). In a bucket the server refuses requests and loses answers. After each step some backup is
//! restored, at the end all are; each must be the volume as it was, byte for byte, and nothing that a prune leaves may be unused.
//!
//! Backups, prunes and restores are killed at any moment of their lives: how long such a life is, the same command says
//! that was left alone before, on the same file or in a copy of the repository.

mod odd;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fastrand::Rng;
use files::pattern::Image;
use nix::sys::signal::Signal;
use rstest::rstest;

use crate::driver::{Driver, Fault, Lie};
use crate::tool::{BLOCK, MIB, Place, Running, arg, id, text};
use odd::Odd;

/// Steps of a life in `make test`, and of one of `make backup-lives`.
const FEW: usize = 3;
const STEPS: usize = 12;

/// A volume as it is now.
struct Volume {
    name: &'static str,
    path: PathBuf,
    file: File,
    image: Image,
    size: u64,
}

/// A snapshot: of which volume, and what that was.
struct Taken {
    volume: usize,
    image: Image,
    size: u64,
}

struct Life {
    random: Rng,
    odd: Odd,
    place: Place,
    driver: Driver,
    volumes: Vec<Volume>,
    /// Snapshots by their handles.
    taken: BTreeMap<String, Taken>,
    /// Backups that were acknowledged and not pruned since, the oldest first, and the snapshot of each.
    backups: BTreeMap<String, String>,
    /// The snapshot that was restored last, which the file holds.
    restored: Option<String>,
    /// How often each command was killed at work.
    killed: BTreeMap<String, usize>,
    /// What happened, for the reader of a failure.
    steps: Vec<String>,
}

impl Life {
    /// In a place that nobody has used yet.
    fn new(is_in_bucket: bool, seed: u64) -> Self {
        let (odd, place) = Odd::new(is_in_bucket);
        let driver = Driver::start(&place.path("csi.sock"));
        // Segments are of 128 MiB: a volume has two, or three when it has grown.
        let size = 200 * MIB;
        let volume = |name| {
            let path = place.path(name);
            let file = File::create_new(&path).expect("create");
            file.set_len(size).expect("set the length");
            Volume { name, path, file, image: Image::default(), size }
        };
        let mut life = Life {
            random: Rng::with_seed(seed),
            volumes: ["v", "w"].map(volume).into(),
            odd,
            place,
            driver,
            taken: BTreeMap::new(),
            backups: BTreeMap::new(),
            restored: None,
            killed: BTreeMap::new(),
            steps: vec![format!("seed {seed}")],
        };
        life.write(0);
        life.write(1);
        life
    }

    fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            self.step();
        }
        // A life has two or three prunes, and whether one is met at work is chance: here one is.
        for _ in 0..20 {
            if steps <= FEW || self.killed.contains_key("prune") || self.backups.is_empty() {
                break;
            }
            self.prune(true);
        }
        self.end();
    }

    fn write(&mut self, volume: usize) {
        let Volume { file, image, size, .. } = &mut self.volumes[volume];
        for _ in 0..self.random.usize(1..40) {
            let blocks = *size / BLOCK;
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
                0 => image.punch(file, start, count),
                1 => image.zero(file, start, count),
                _ => image.write(file, start, count, seed),
            }
            .expect("write to the image");
        }
    }

    fn step(&mut self) {
        let volume = self.random.usize(..self.volumes.len());
        match self.random.u8(..10) {
            0 if self.volumes[volume].size < 300 * MIB => {
                let Volume { name, file, size, .. } = &mut self.volumes[volume];
                *size += self.random.u64(1..40) * MIB;
                file.set_len(*size).expect("grow");
                self.steps.push(format!("grow {name} to {size}"));
            }
            0..3 => self.write(volume),
            3 => {
                let is_killed = self.random.bool();
                self.prune(is_killed);
            }
            4 => {
                let forgotten = self.taken.keys().nth(self.random.usize(..self.taken.len().max(1))).cloned();
                if let Some(handle) = forgotten {
                    self.driver.forget(&handle);
                    self.steps.push(format!("the driver forgets {handle}"));
                }
            }
            5..7 => self.crowd(),
            _ => self.back_up(volume),
        }
        if let Some(id) = self.any() {
            let length = self.check(&id);
            if let Some(other) = self.any().filter(|_| self.random.u8(..4) == 0) {
                self.kill_a_restore(&other, length);
                self.check(&other);
            }
            if self.random.u8(..3) == 0 {
                self.check_as_reader(&id);
            }
        }
    }

    /// Some backup.
    fn any(&mut self) -> Option<String> {
        self.backups.keys().nth(self.random.usize(..self.backups.len().max(1))).cloned()
    }

    /// Any moment of a run that takes this long when it is left alone, or soon after it.
    fn moment(&mut self, length: Duration) -> Duration {
        length.mul_f64(1.1 * self.random.f64())
    }

    /// Runs a command in a copy of the repository: how long it takes when it is left alone.
    fn rehearse(&self, arguments: &[&str]) -> Duration {
        let copy = self.place.copy();
        let began = Instant::now();
        // What comes of it the run that counts says.
        copy.run(arguments);
        began.elapsed()
    }

    /// Runs a command and sends it a signal at a moment; it may have ended by then.
    fn disturb(&mut self, arguments: &[&str], signal: Signal, length: Duration) -> (String, String, String) {
        let moment = self.moment(length);
        let running = Running::start(self.command(arguments));
        std::thread::sleep(moment);
        running.signal(signal);
        self.wait(arguments[0], running)
    }

    /// How a process ended, its output, and what it said.
    fn wait(&mut self, command: &str, running: Running) -> (String, String, String) {
        let output = running.output();
        let ended = output.status.to_string();
        if ended.contains("SIGKILL") {
            *self.killed.entry(command.to_owned()).or_default() += 1;
        }
        (ended, text(&output.stdout), text(&output.stderr))
    }

    /// A restore that is killed leaves the file as it was, or is done.
    fn kill_a_restore(&mut self, id: &str, length: Duration) {
        let to = self.place.path("restored");
        let arguments = ["restore", id, "--to", arg(&to), "--overwrite"];
        let output = self.disturb(&arguments, Signal::SIGKILL, length);
        self.behave();
        self.steps.push(format!("restore {id}, killed after at most {length:?}: {}", output.0));
        let after = self.backups[id].clone();
        let holds = |snapshot: &String| {
            let Taken { image, size, .. } = &self.taken[snapshot];
            let is_of_size = std::fs::metadata(&to).is_ok_and(|file| file.len() == *size);
            is_of_size && image.compare(&to, *size, &base::Stop::default()).is_ok()
        };
        let is_before = self.restored.as_ref().is_some_and(holds);
        assert!(is_before || holds(&after), "neither {:?} nor {after}", self.restored);
        self.restored = Some(if is_before { self.restored.clone().expect("it holds it") } else { after });
    }

    /// Restores a backup and compares it: how long the restore took.
    fn check(&mut self, id: &str) -> Duration {
        let snapshot = &self.backups[id];
        let Taken { image, size, .. } = &self.taken[snapshot];
        self.restored = Some(snapshot.clone());
        self.place.restores(id, image, *size)
    }

    /// Writes to a volume and takes a snapshot: its handle.
    fn take(&mut self, volume: usize) -> String {
        self.write(volume);
        let Volume { image, size, .. } = &self.volumes[volume];
        self.note(Taken { volume, image: image.clone(), size: *size })
    }

    /// Another snapshot of the same moment: its handle.
    fn twin(&mut self, of: &str) -> String {
        let Taken { volume, image, size } = &self.taken[of];
        self.note(Taken { volume: *volume, image: image.clone(), size: *size })
    }

    fn note(&mut self, taken: Taken) -> String {
        let handle = format!("snap-{}", self.taken.len());
        self.driver.snapshot(&handle, &taken.image, taken.size);
        self.taken.insert(handle.clone(), taken);
        handle
    }

    /// The arguments of a backup.
    fn source(&self, wish: &str, handle: &str) -> Vec<String> {
        let Volume { name, path, .. } = &self.volumes[self.taken[handle].volume];
        let endpoint = self.driver.endpoint();
        let source = [wish, "--volume", name, "--device", arg(path), "--endpoint", &endpoint];
        let source = [&source[..], &["--snapshot", handle, "--output", "json"]].concat();
        source.into_iter().map(str::to_owned).collect()
    }

    /// Takes in what writers have made: those who were killed after their commit, too.
    fn adopt(&mut self, handles: &[String]) {
        if !self.place.repository().join("repository").exists() {
            return;
        }
        let last = self.backups.keys().next_back().cloned();
        for about in self.place.ok(&["list"]).as_array().expect("a list") {
            let handle = about["snapshot"].as_str().expect("a snapshot").to_owned();
            if let Entry::Vacant(new) = self.backups.entry(id(about)) {
                assert!(handles.contains(&handle), "{about} of none of {handles:?}");
                // Whatever the clock says.
                assert!(last.as_ref() < Some(new.key()), "{about} comes before {last:?}");
                new.insert(handle);
            }
        }
    }

    fn is_backed_up(&self, handle: &str) -> bool {
        self.backups.values().any(|of| of == handle)
    }

    /// A new snapshot, and a backup of it that may be disturbed; where it failed, perhaps another try.
    fn back_up(&mut self, volume: usize) {
        let handle = self.take(volume);
        let mut is_resumed = false;
        for _ in 0..3 {
            let wish = ["auto", "auto", "full", "incremental"][self.random.usize(..4)];
            let faults = self.faults();
            let signal = match self.random.u8(..3) {
                0 => Some(Signal::SIGKILL),
                1 => Some(Signal::SIGINT),
                _ => None,
            };
            let mut arguments = self.source(wish, &handle);
            // Slow, so that a signal meets it at work.
            arguments.extend(signal.map(|_| "--limit-rate=64Mi".to_owned()));
            arguments.extend(is_resumed.then(|| "--resume".to_owned()));
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let length = signal.map(|_| {
                self.driver.script(faults.iter().copied());
                self.rehearse(&arguments)
            });
            self.driver.script(faults.iter().copied());
            let is_full = self.random.u8(..5) == 0 && self.fill_the_disk();
            self.misbehave(true);
            let output = match signal.zip(length) {
                Some((signal, length)) => self.disturb(&arguments, signal, length),
                None => {
                    let running = Running::start(self.command(&arguments));
                    self.wait(wish, running)
                }
            };
            self.steps.push(format!(
                "{wish} {handle}, {faults:?}, {signal:?}, resume {is_resumed}, full {is_full}: {}",
                output.0
            ));
            self.driver.script([]);
            self.behave();
            self.adopt(std::slice::from_ref(&handle));
            if self.is_backed_up(&handle) {
                return;
            }
            assert_ne!(output.0, "exit status: 0", "{handle} is not there: {}", output.1);
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

    fn prune(&mut self, is_killed: bool) {
        if self.backups.is_empty() {
            return;
        }
        let named: Vec<String> = (0..self.random.usize(..3))
            .filter_map(|_| self.any())
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect();
        let keep = [Some(self.random.usize(1..4)), None][self.random.usize(..2)];
        let volume = [None, Some(self.random.usize(..self.volumes.len()))][self.random.usize(..2)];
        // One without a backup is refused: its name may be a typing error.
        let has_backup =
            |of: &usize| self.backups.values().any(|snapshot| self.taken[snapshot].volume == *of);
        let volume = volume.filter(has_backup);
        let unused = ["0", "0", "30"][self.random.usize(..3)];
        let keep_text = keep.map(|keep| keep.to_string());
        let mut arguments = vec!["prune", "--max-unused", unused];
        arguments.extend(keep_text.iter().flat_map(|keep| ["--keep-last", keep]));
        arguments.extend(volume.iter().flat_map(|volume| ["--volume", self.volumes[*volume].name]));
        arguments.extend(named.iter().flat_map(|id| ["--remove", id]));
        let length = is_killed.then(|| self.rehearse(&arguments));
        let is_full = self.random.u8(..5) == 0 && self.fill_the_disk();
        self.misbehave(false);
        let output = match length {
            Some(length) => self.disturb(&arguments, Signal::SIGKILL, length),
            None => {
                let running = Running::start(self.command(&arguments));
                self.wait("prune", running)
            }
        };
        self.behave();
        self.steps.push(format!("{arguments:?}, killed {is_killed}, full {is_full}: {}", output.0));
        let mut seen = vec![0; self.volumes.len()];
        let mut expected: Vec<String> = Vec::new();
        for (id, snapshot) in self.backups.iter().rev().filter(|(id, _)| !named.contains(id)) {
            let of = self.taken[snapshot].volume;
            seen[of] += 1;
            if volume.is_some_and(|volume| volume != of) || keep.is_none_or(|keep| seen[of] <= keep) {
                expected.push(id.clone());
            }
        }
        expected.reverse();
        let left = self.place.list();
        match output.0 == "exit status: 0" {
            true => assert_eq!(left, expected),
            // Some are gone, but none that was to be kept.
            false => {
                assert!(is_killed || is_full, "{output:?}");
                assert!(expected.iter().all(|id| left.contains(id)), "{expected:?} of {left:?}");
            }
        }
        self.backups.retain(|id, _| left.contains(id));
        assert_eq!(left.len(), self.backups.len());
    }

    /// Restores a backup onto one that the file holds, perhaps once more over what a killed restore has left there.
    fn restore_onto(&mut self, base: &str, id: &str) {
        let to = self.place.path("restored");
        let onto = ["restore", id, "--to", arg(&to), "--onto-base", base];
        let mut length = None;
        for _ in 0..=self.random.usize(..2) {
            self.check(base);
            if let Some(length) = length {
                self.disturb(&onto, Signal::SIGKILL, length);
                self.behave();
            }
            let began = Instant::now();
            self.place.ok(&onto);
            length = Some(began.elapsed());
            let Taken { image, size, .. } = &self.taken[&self.backups[id]];
            let compared = image.compare(&to, *size, &base::Stop::default());
            compared.unwrap_or_else(|error| panic!("{id} onto {base}: {error}"));
        }
    }

    /// All is restored, whole and over each other; nothing is damaged, and after a prune nothing unused.
    fn end(&mut self) {
        let ids: Vec<String> = self.backups.keys().cloned().collect();
        for id in &ids {
            self.check(id);
        }
        let about = |id: &String| {
            let Taken { volume, size, .. } = &self.taken[&self.backups[id]];
            (*volume, *size)
        };
        let mut pairs = Vec::new();
        for volume in 0..self.volumes.len() {
            let of_it: Vec<&String> = ids.iter().filter(|id| about(id).0 == volume).collect();
            pairs.extend(
                of_it
                    .windows(2)
                    .filter(|pair| about(pair[0]) == about(pair[1]))
                    .map(|pair| (pair[0], pair[1])),
            );
        }
        for (base, id) in pairs {
            self.restore_onto(base, id);
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

/// `DELTAPATH_BACKUP_LIVES` says how many there are in all four quarters, and `DELTAPATH_BACKUP_SEED` the first one. In the last
/// quarter the repository is in a bucket.
#[rstest]
fn every_backup_of_a_random_life_is_the_volume_as_it_was(#[values(0, 1, 2, 3)] quarter: u64) {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    let (lives, first) = (number("DELTAPATH_BACKUP_LIVES"), number("DELTAPATH_BACKUP_SEED").unwrap_or(1));
    let (steps, lives): (usize, u64) = (if lives.is_some() { STEPS } else { FEW }, lives.unwrap_or(4));
    let seeds: Vec<u64> = (first..first + lives).filter(|seed| seed % 4 == quarter).collect();
    let mut killed = BTreeMap::<String, usize>::new();
    for seed in &seeds {
        let mut life = Life::new(quarter == 3, *seed);
        life.run(steps);
        for (command, times) in std::mem::take(&mut life.killed) {
            *killed.entry(command).or_default() += times;
        }
        println!("life {seed}: {} steps", life.steps.len());
    }
    println!("{} lives, killed at work: {killed:?}", seeds.len());
    let of = |command: &str| killed.get(command).copied().unwrap_or(0);
    let least = [of("full") + of("incremental") + of("auto"), of("prune"), of("restore")];
    assert!(
        seeds.len() < 4 || least.iter().all(|times| *times > 0),
        "nothing was killed at work: {killed:?}"
    );
}
