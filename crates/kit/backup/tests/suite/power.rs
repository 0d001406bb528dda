//! Power cuts of the machine that holds the repository: a backup that was reported is there after them, every backup that is
//! listed restores byte for byte, and the repository can be used on. A killed process shows nothing of that, for the kernel
//! lives on and writes what the process wrote.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use fastrand::Rng;
use files::pattern::Image;
use testkit::disk::{Mounted, Rack};

use crate::driver::Driver;
use crate::tool::{BLOCK, MIB, Place, Running, arg, id, text};

const DISK: u64 = 2 << 30;
/// Two segments.
const SIZE: u64 = 140 * MIB;

/// A disk as a boot finds it.
struct Cut {
    disk: usize,
    story: String,
    /// Snapshots whose backups were reported before, and are to be kept.
    reported: Vec<String>,
}

/// A machine with a repository, a volume elsewhere, and what was seen so far.
struct Scene {
    // Dropped in this order: each lies on the next.
    _mounted: Mounted,
    rack: Rack,
    driver: Driver,
    place: Place,
    random: Rng,
    image: Image,
    /// What each snapshot holds.
    held: BTreeMap<String, Image>,
    reported: Vec<String>,
    cuts: Vec<Cut>,
}

impl Scene {
    /// A snapshot after a few changes, and the command line of its backup.
    fn snapshot(&mut self) -> (String, Command) {
        let file = self.place.open_image(SIZE);
        for _ in 0..4 {
            let (start, count) = (self.random.u64(0..SIZE / BLOCK - 600), self.random.u64(1..600));
            self.image.write(&file, start, count, self.random.u64(..)).expect("write");
        }
        let handle = format!("s{}", self.held.len());
        self.driver.snapshot(&handle, &self.image, SIZE);
        self.held.insert(handle.clone(), self.image.clone());
        let command = auto(&self.place, &self.place, &self.driver, &handle);
        (handle, command)
    }

    /// Runs a command, and cuts the power at random moments before its end and right after it.
    fn run(&mut self, command: Command, reports: Option<String>) {
        let mut running = Running::start(command);
        while running.0.try_wait().expect("wait").is_none() {
            std::thread::sleep(Duration::from_micros(self.random.u64(0..60_000)));
            self.cut();
        }
        let status = running.0.wait().expect("wait");
        assert!(status.success(), "{status}");
        self.reported.extend(reports);
        self.cut();
    }

    fn cut(&mut self) {
        let (disk, story) = self.rack.cut(0, &mut self.random);
        self.cuts.push(Cut { disk, story, reported: self.reported.clone() });
    }

    /// Boots what a cut left, and looks at all that is there.
    fn audit(&self, cut: &Cut, filesystem: &str) {
        let mut boot = Place::new();
        let at = boot.path("disk");
        std::fs::create_dir(&at).expect("mkdir");
        boot.objects_in = at.join("repository");
        let mounted = Mounted::boot(&self.rack, cut.disk, filesystem, &at);
        let Cut { story, reported, .. } = cut;
        if reported.is_empty() && !boot.repository().join("repository").exists() {
            return;
        }
        let mut listed = Vec::new();
        for backup in boot.ok(&["list"]).as_array().expect("a list") {
            let handle = backup["snapshot"].as_str().expect("a snapshot").to_owned();
            boot.restores(&id(backup), &self.held[&handle], SIZE);
            listed.push(handle);
        }
        for handle in reported {
            assert!(listed.contains(handle), "{handle} was reported, and there is {listed:?}: {story}");
        }
        let verified = boot.run(&["verify"]);
        assert!(verified.status.success(), "{story}: {}", text(&verified.stderr));
        // It goes on, and nothing of the cut stays.
        let newest =
            self.held.keys().max_by_key(|handle| handle[1..].parse::<u64>().expect("a number")).expect("one");
        if !listed.contains(newest) {
            let output = auto(&boot, &self.place, &self.driver, newest).output().expect("run");
            assert!(output.status.success(), "{story}: {}", text(&output.stderr));
        }
        boot.ok(&["prune", "--keep-last", "1", "--max-unused", "0"]);
        let last = &boot.list()[0];
        boot.restores(last, &self.held[newest], SIZE);
        let verified = boot.ok(&["verify"]);
        assert_eq!(verified["unused"].as_u64(), Some(0), "{story}: {verified}");
        drop(mounted);
    }
}

/// A backup of the volume at `volume` into the repository of `place`.
fn auto(place: &Place, volume: &Place, driver: &Driver, handle: &str) -> Command {
    let (image, endpoint) = (volume.image(), driver.endpoint());
    let of = ["--endpoint", &endpoint, "--snapshot", handle];
    place.command(&[&["auto", "--volume", "v", "--device", arg(&image)], &of[..]].concat())
}

/// `DELTAPATH_BACKUP_CUTS` says how many cuts are looked at.
#[rstest::rstest]
#[test_with::root]
#[test]
fn what_was_reported_outlives_the_power(#[values("ext4", "xfs", "btrfs")] filesystem: &str) {
    let wanted = testkit::asked("DELTAPATH_BACKUP_CUTS").unwrap_or(6);
    let (mut place, driver) = Driver::anew();
    let rack = Rack::start(&place.path("rack"), DISK);
    let at = place.path("disk");
    std::fs::create_dir(&at).expect("mkdir");
    let mounted = Mounted::format(&rack, 0, filesystem, &at);
    place.objects_in = at.join("repository");
    let mut scene = Scene {
        _mounted: mounted,
        rack,
        driver,
        place,
        random: Rng::with_seed(testkit::seed(&format!("cuts of a repository on {filesystem}"))),
        image: Image::default(),
        held: BTreeMap::new(),
        reported: Vec::new(),
        cuts: Vec::new(),
    };
    for round in 1..=6 {
        let (handle, command) = scene.snapshot();
        scene.run(command, Some(handle));
        if round % 3 == 0 {
            // From here on a prune may have removed the others.
            let gone = scene.reported.len() - 2;
            scene.reported.drain(..gone);
            let prune = scene.place.command(&["prune", "--keep-last", "2", "--max-unused", "0"]);
            scene.run(prune, None);
        }
    }
    let mut cuts = std::mem::take(&mut scene.cuts);
    scene.random.shuffle(&mut cuts);
    cuts.truncate(wanted);
    for cut in &cuts {
        scene.audit(cut, filesystem);
        scene.rack.scrap(cut.disk);
    }
    println!("{filesystem}: {} cuts", cuts.len());
}
