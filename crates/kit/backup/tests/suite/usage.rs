//! What users get wrong, and the errors they get.

use std::process::Command;

use files::pattern::Image;
use testkit::pages::assert_names_every_flag;

use crate::tool::{BLOCK, MIB, Place, Running, arg, id, json, text};

#[test]
fn sizes_that_are_no_whole_blocks_come_back() {
    for size in [1, 511, BLOCK, 3 * BLOCK + 1, 2 * MIB - 1] {
        let place = Place::new();
        let content: Vec<u8> = (0..size).map(|at| (at % 251) as u8 + 1).collect();
        std::fs::write(place.image(), &content).expect("write");
        let id = place.full();
        let to = place.path("restored");
        place.ok(&["restore", &id, "--to", arg(&to)]);
        assert!(std::fs::read(&to).expect("restored") == content, "{size}");
        place.ok(&["verify", &id, "--against", arg(&place.image())]);
    }
    let place = Place::new();
    place.open_image(0);
    let id = place.full();
    place.restores(&id, &Image::default(), 0);
}

#[test]
fn holes_and_zeros_are_neither_stored_nor_written() {
    use std::os::unix::fs::MetadataExt;
    let place = Place::new();
    let size = 8 << 40;
    let file = place.open_image(size);
    let mut image = place.written(size, 1000, 10, 1);
    image.write(&file, size / BLOCK - 9, 9, 1).expect("write");
    image.zero(&file, 40000, 5000).expect("zero");
    let made = json(0, place.backup("full", &[]));
    assert_eq!(made["data"].as_u64(), Some(19 * BLOCK));
    assert!(made["added"].as_u64().is_some_and(|bytes| bytes < 30 * BLOCK), "{made}");
    let to = place.path("restored");
    place.ok(&["restore", &id(&made), "--to", arg(&to)]);
    let restored = to.metadata().expect("restored");
    assert_eq!(restored.len(), size);
    assert!(restored.blocks() * 512 <= 40 * BLOCK, "{} bytes on the disk", restored.blocks() * 512);
    let ends = |start: u64| {
        use std::os::unix::fs::FileExt;
        let mut bytes = [vec![0; 32 * BLOCK as usize], vec![1; 32 * BLOCK as usize]];
        for (path, bytes) in [&place.image(), &to].into_iter().zip(&mut bytes) {
            std::fs::File::open(path).expect("open").read_exact_at(bytes, start).expect("read");
        }
        assert!(bytes[0] == bytes[1], "at {start}");
    };
    ends(990 * BLOCK);
    ends(size - 32 * BLOCK);
}

#[test]
fn every_level_of_compression_comes_back() {
    let place = Place::new();
    // Lines of text: fast levels find less in them.
    let line = |number: u64| {
        format!("{} is the line that has the number {number}\n", number.wrapping_mul(0x9E37_79B9))
    };
    let mut content: Vec<u8> = (0..60000).flat_map(|number| line(number).into_bytes()).collect();
    content.truncate(512 * BLOCK as usize);
    std::fs::write(place.image(), &content).expect("write");
    let to = place.path("restored");
    let added = ["-50", "-5", "1", "19"].map(|level| {
        let made = json(0, place.backup("full", &["--compression", level]));
        place.ok(&["restore", &id(&made), "--to", arg(&to), "--overwrite"]);
        assert!(std::fs::read(&to).expect("read") == content, "level {level}");
        made["added"].as_u64().expect("a number")
    });
    assert!(added.is_sorted_by(|quicker, smaller| quicker > smaller), "{added:?}");
}

/// 8 MiB at 4 MiB a second take two seconds, less what the first and the last reads do not wait for.
#[test]
fn the_rate_is_kept_below_its_limit() {
    let place = Place::new();
    let image = place.written(20 * MIB, 100, 8 * MIB / BLOCK, 1);
    let began = std::time::Instant::now();
    let made = json(0, place.backup("full", &["--limit-rate", "4Mi"]));
    let length = began.elapsed();
    assert!(length >= std::time::Duration::from_secs(1), "8 MiB in {length:?}");
    place.restores(&id(&made), &image, 20 * MIB);
}

#[test]
fn a_prune_and_others_keep_apart() {
    let place = Place::new();
    place.written(400 * MIB, 7, 90, 1);
    place.written(400 * MIB, 128 * MIB / BLOCK, 2000, 2);
    place.full();
    let running = Running::start(place.backup("full", &["--limit-rate", "64Ki"]));
    // As the kernel lists it: to try the lock here would take it from the backup.
    let pid = running.0.id().to_string();
    let holds_the_lock = || {
        let locks = std::fs::read_to_string("/proc/locks").expect("locks");
        locks.lines().any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            fields[1] == "FLOCK" && fields.contains(&"READ") && fields.contains(&pid.as_str())
        })
    };
    testkit::until("the backup takes the lock", holds_the_lock);
    assert!(place.fails(1, &["prune"]).contains("other commands use the repository"));
    place.ok(&["verify"]);
    // kill -9 frees it.
    drop(running);
    place.ok(&["prune"]);
}

/// The page with all flags (docs/reference.md) names all of them, and no other.
#[test]
fn the_reference_has_every_flag() {
    const COMMANDS: [&str; 10] =
        ["full", "incremental", "auto", "run", "restore", "verify", "list", "prune", "show", "mount"];
    let mut flags = std::collections::BTreeSet::new();
    for command in COMMANDS {
        let help =
            Command::new(env!("CARGO_BIN_EXE_cbt-backup")).args([command, "--help"]).output().expect("run");
        let help = text(&help.stdout);
        let named = help.lines().filter_map(|line| {
            line.trim_start().strip_prefix("--").or_else(|| line.split_once(", --").map(|of| of.1))
        });
        flags.extend(named.map(|line| {
            line.split(|c: char| !c.is_ascii_lowercase() && c != '-').next().unwrap_or_default().to_owned()
        }));
    }
    let section = assert_names_every_flag("cbt-backup", flags.iter().map(String::as_str));
    for command in COMMANDS {
        assert!(section.contains(&format!("`{command}`")), "{command} is not in the reference");
    }
}
