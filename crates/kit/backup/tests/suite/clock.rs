//! A clock that jumps: the last backup is the one that was made last, and no prune removes it.

use std::collections::BTreeMap;
use std::process::Command;

use files::pattern::Image;
use serde_json::Value;

use crate::driver::Driver;
use crate::tool::{BLOCK, MIB, Place, Running, arg, ended, id, json};

const SIZE: u64 = 20 * MIB;

/// A clock that is ahead by so many seconds as CLOCK_AHEAD says, for programs that are started with it.
const SOURCE: &str = "
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *time) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, \"clock_gettime\");
    int done = real(clock, time);
    const char *ahead = getenv(\"CLOCK_AHEAD\");
    if (done == 0 && clock == CLOCK_REALTIME && ahead) time->tv_sec += atol(ahead);
    return done;
}
";

/// In seconds.
pub const DAY: i64 = 86400;

pub struct Clock {
    library: String,
}

impl Clock {
    pub fn new(place: &Place) -> Self {
        let (source, library) = (place.path("clock.c"), place.path("clock.so"));
        std::fs::write(&source, SOURCE).expect("write");
        let mut command = Command::new("cc");
        command.args(["-shared", "-fPIC", "-o", arg(&library), arg(&source), "-ldl"]);
        assert!(command.status().expect("cc").success());
        Clock { library: arg(&library).to_owned() }
    }

    /// The clock of a command is ahead by so many seconds.
    pub fn set(&self, command: &mut Command, seconds: i64) {
        command.env("LD_PRELOAD", &self.library).env("CLOCK_AHEAD", seconds.to_string());
    }

    /// A full backup of the image, with the clock ahead by so many days, and what is said about it.
    pub fn full(&self, place: &Place, days: i64) -> (String, String) {
        let mut command = place.backup("full", &["--output", "json"]);
        self.set(&mut command, days * DAY);
        let output = command.output().expect("run");
        let said = ended(0, &output);
        let made: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        (id(&made), said)
    }
}

#[test]
fn the_last_backup_is_the_one_that_was_made_last() {
    for days in [100, -100, 0] {
        let place = Place::new();
        let clock = Clock::new(&place);
        let file = place.open_image(SIZE);
        let mut image = Image::default();
        let mut made = Vec::new();
        for (round, ahead) in (0..).zip([days, 0, 0]) {
            image.write(&file, 10 + round, 50, round).expect("write");
            let (id, said) = clock.full(&place, ahead);
            let is_back = days > 0 && round > 0;
            assert_eq!(said.contains("the clock"), is_back, "{days}, {round}: {said}");
            made.push(id);
        }
        assert_eq!(place.list(), made, "in the order in which they were made");
        place.restores("latest", &image, SIZE);
        for rule in ["--keep-last", "--keep-daily", "--keep-weekly"] {
            let copy = place.copy();
            let kept = copy.ok(&["prune", rule, "1"]);
            assert_eq!(kept["kept"], serde_json::json!([made[2]]), "{rule}");
            copy.restores("latest", &image, SIZE);
        }
    }
}

/// What backups have noted of themselves, and the bytes of each. A draft (`NAME#NUMBER`) is not there yet.
fn notes(place: &Place) -> BTreeMap<String, u64> {
    let Ok(entries) = place.repository().join("partial").read_dir() else { return BTreeMap::new() };
    let entries = entries.map(|entry| entry.expect("entry"));
    let note = |entry: std::fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        Some((name, entry.metadata().ok()?.len()))
    };
    entries.filter_map(note).filter(|(name, _)| !name.contains('#')).collect()
}

/// The clock is behind, so the time says nothing: each comes after those that are still being made, also once one is done.
#[test]
fn backups_that_are_made_at_once_are_listed_in_the_order_in_which_they_began() {
    let place = Place::new();
    place.written(SIZE, 7, 1000, 1);
    let mut made = vec![Clock::new(&place).full(&place, 100).0];
    let slow = |rate: &str| {
        let noted = notes(&place);
        let running = Running::start(place.backup("full", &["--limit-rate", rate, "--output", "json"]));
        testkit::until("it has begun", || notes(&place).keys().any(|name| !noted.contains_key(name)));
        running
    };
    let done = |running: Running| {
        let output = running.output();
        ended(0, &output);
        id(&serde_json::from_slice(&output.stdout).expect("JSON"))
    };
    let (first, second, third) = (slow("1Mi"), slow("256Ki"), slow("256Ki"));
    made.push(done(first));
    let fourth = slow("1Mi");
    made.extend([second, third, fourth].map(done));
    assert_eq!(place.list(), made);
    assert_eq!(place.partials(), 0);
}

/// What only keeps the place of a backup is not gone on with in place of what another has stored.
#[test]
fn a_backup_that_has_only_begun_hides_nothing_from_resume() {
    let (place, driver) = Driver::anew();
    let file = place.open_image(200 * MIB);
    let mut image = Image::default();
    // In two segments.
    for (start, seed) in [(7, 1), (150 * MIB / BLOCK, 2)] {
        image.write(&file, start, 1000, seed).expect("write");
    }
    Clock::new(&place).full(&place, 100);
    driver.snapshot("one", &image, 200 * MIB);
    let noted = || notes(&place).values().sum::<u64>();
    let full = |more: &[&str]| {
        let mut command = driver.command(&place, "full", "one");
        command.arg("--resume").args(more);
        command
    };
    let begun = || {
        let before = noted();
        let running = Running::start(full(&["--limit-rate", "512Ki"]));
        testkit::until("it has begun", || noted() > before);
        (running, noted())
    };
    let (first, reserved) = begun();
    testkit::until("a segment is stored", || noted() > reserved);
    drop(first);
    drop(begun());
    assert_eq!(place.partials(), 2);
    let made = json(0, full(&[]));
    assert!(made["read"].as_u64().expect("a number") < 1100 * BLOCK, "{made}");
    assert_eq!(place.partials(), 0);
    place.restores(&id(&made), &image, 200 * MIB);
}
