//! Drivers that break the specification: a backup is right, or it fails and says so, and what comes after it is right. It is
//! never short. What comes of a stream that is cut is the client library's own, and in its tests.

use std::fs::File;

use files::pattern::Image;

use crate::driver::{Driver, Fault, Lie};
use crate::tool::{BLOCK, MIB, Place, fails, id};

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
        let (place, driver) = Driver::anew();
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

    /// A backup that must be made and be right: its kind.
    fn honest(&self, wish: &str, handle: &str) -> String {
        let made = self.driver.back_up(&self.place, wish, handle);
        self.place.restores(&id(&made), &self.image, SIZE);
        made["kind"].as_str().expect("a kind").to_owned()
    }

    /// A backup that must fail, with these words, and leave none.
    fn refused(&self, wish: &str, handle: &str, words: &str) {
        let before = self.place.list();
        let said = fails(1, self.driver.command(&self.place, wish, handle));
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
