//! Drivers that break the specification: a backup is right, or it fails and says so, and what comes after it is right. It is
//! never short.

use std::fs::File;

use files::pattern::Image;

use crate::driver::{Driver, Fault, Lie};
use crate::tool::{BLOCK, MIB, Place, arg, id, text};

const SIZE: u64 = 200 * MIB;

/// A volume with a backup, and a driver.
struct World {
    place: Place,
    driver: Driver,
    file: File,
    image: Image,
    round: u64,
}

impl World {
    fn new() -> Self {
        let place = Place::new();
        let driver = Driver::start(&place.path("csi.sock"));
        let file = place.open_image(SIZE);
        let mut world = World { place, driver, file, image: Image::default(), round: 0 };
        let handle = world.snapshot();
        world.honest("auto", &handle);
        world
    }

    /// A snapshot of which a driver has five messages to tell, and as many of its delta.
    fn snapshot(&mut self) -> String {
        self.round += 1;
        for block in 0..80 {
            self.image.write(&self.file, 2 + block * 600, 1, self.round).expect("write");
        }
        let handle = format!("snapshot {}", self.round);
        self.driver.snapshot(&handle, &self.image, SIZE);
        handle
    }

    fn back_up(&self, wish: &str, handle: &str) -> std::process::Output {
        let (device, endpoint) = (self.place.image(), self.driver.endpoint());
        let source =
            ["--volume", "v", "--device", arg(&device), "--endpoint", &endpoint, "--snapshot", handle];
        self.place.run(&[&[wish, "--output", "json"], &source[..]].concat())
    }

    /// A backup that must be made and be right: its kind.
    fn honest(&self, wish: &str, handle: &str) -> String {
        let output = self.back_up(wish, handle);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let made: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        self.place.restores(&id(&made), &self.image, SIZE);
        made["kind"].as_str().expect("a kind").to_owned()
    }

    /// A backup that must fail, with these words, and leave none.
    fn refused(&self, wish: &str, handle: &str, words: &str) {
        let before = self.place.list();
        let output = self.back_up(wish, handle);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{wish}, where {words:?} is wrong: {said}");
        assert!(said.contains(words), "{wish}: {said}, instead of {words}");
        assert_eq!(self.place.list(), before, "{wish} with {words}");
    }
}

/// The end of the ranges, the offset of the sixth message's first one, and others, stand in the messages: words are enough.
fn words(lie: Lie) -> &'static str {
    match lie {
        Lie::SwappedMessages | Lie::SwappedRanges | Lie::Overlap => "and the one before it ends at",
        Lie::BeyondEnd | Lie::Negative | Lie::Empty => "is not in a volume of 209715200 bytes, or is empty",
        Lie::Capacity => "volume_capacity_bytes was 209715200 first and is 209719296 now",
        Lie::Style => "block_metadata_type was VariableLength first and is FixedLength now",
        Lie::NoMessage => "without any message",
    }
}

#[test]
fn a_stream_that_breaks_the_specification_makes_no_backup() {
    let mut world = World::new();
    for lie in Lie::ALL {
        let handle = world.snapshot();
        let faults = [Fault::Lies(lie, 2)];
        world.driver.script(faults);
        world.refused("incremental", &handle, words(lie));
        world.driver.script(faults);
        world.refused("full", &handle, words(lie));
        // No word of the delta counts; what is allocated is another question.
        world.driver.script(faults);
        assert_eq!(world.honest("auto", &handle), "full", "{lie:?}");
        let handle = world.snapshot();
        assert_eq!(world.honest("auto", &handle), "incremental", "after {lie:?}");
    }
}

#[test]
fn the_rest_of_a_stream_that_was_cut_must_fit_what_came_before() {
    let mut world = World::new();
    for (rest, words) in [
        (&[Fault::Lies(Lie::Capacity, 0)][..], "volume_capacity_bytes was 209715200 first"),
        (&[Fault::Lies(Lie::Style, 0)], "block_metadata_type was VariableLength first"),
        (&[Fault::Lies(Lie::SwappedMessages, 0)], "and the one before it ends at"),
        // OK too early: once it is asked again, and the second time it does not know what it has sent.
        (&[Fault::Lies(Lie::NoMessage, 0), Fault::Lies(Lie::NoMessage, 0)], "is not in it any more"),
    ] {
        for wish in ["incremental", "full"] {
            let handle = world.snapshot();
            world.driver.script(std::iter::once(Fault::Cut(2)).chain(rest.iter().copied()));
            world.refused(wish, &handle, words);
            let handle = world.snapshot();
            assert_eq!(world.honest("auto", &handle), "incremental");
        }
    }
}

#[test]
fn streams_that_are_cut_and_come_back_are_whole() {
    let mut world = World::new();
    for faults in [
        &[Fault::Cut(0), Fault::Cut(0), Fault::Cut(0)][..],
        &[Fault::Cut(1), Fault::Cut(1), Fault::Cut(0), Fault::Cut(2)],
        &[Fault::Cut(3), Fault::FromTheBeginning],
        &[Fault::Cut(2), Fault::Lies(Lie::NoMessage, 0)],
    ] {
        for wish in ["incremental", "full"] {
            let handle = world.snapshot();
            world.driver.script(faults.iter().copied());
            assert_eq!(world.honest(wish, &handle), wish, "{faults:?}");
        }
    }
}

/// The incident: the tool looked five times a second whether it was to stop, and gave up what it had begun each time. A stream
/// whose first message took longer was asked for again and again.
#[test]
fn a_stream_that_begins_late_is_waited_for() {
    let mut world = World::new();
    for wish in ["incremental", "full"] {
        let handle = world.snapshot();
        world.driver.script([Fault::Cut(2), Fault::Late]);
        assert_eq!(world.honest(wish, &handle), wish);
        assert_eq!(world.driver.calls(), 2, "{wish}");
    }
}

#[test]
fn a_volume_that_does_not_fit_its_device_is_refused() {
    let mut world = World::new();
    let handle = world.snapshot();
    world.file.set_len(SIZE - BLOCK).expect("shrink");
    for wish in ["full", "incremental", "auto"] {
        world.refused(wish, &handle, "it is not the device of that snapshot");
    }
}
