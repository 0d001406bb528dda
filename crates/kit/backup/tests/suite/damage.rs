//! What is not as it was written is found: by `verify`, by `restore` before anybody relies on the result, and by `auto`,
//! which then makes a full backup.

use fastrand::Rng;
use files::pattern::Image;

use crate::driver::{Driver, Fault};
use crate::tool::{BLOCK, MIB, Place, arg, ended, fails, flip, id, json, text};

const SIZE: u64 = 140 * MIB;

/// Two backups over a driver, the second one incremental, and what the volume was.
fn two() -> (Place, Driver, [(String, Image); 2]) {
    let (place, driver) = Driver::anew();
    let file = place.open_image(SIZE);
    let mut image = Image::default();
    image.write(&file, 3, 40, 1).expect("write");
    image.write(&file, 128 * MIB / BLOCK - 5, 10, 2).expect("write");
    driver.snapshot("one", &image, SIZE);
    let first = id(&driver.back_up(&place, "auto", "one"));
    let before = image.clone();
    image.write(&file, 10, 2, 3).expect("write");
    image.punch(&file, 20, 4).expect("punch");
    driver.snapshot("two", &image, SIZE);
    let second = driver.back_up(&place, "incremental", "two");
    assert_eq!((&second["kind"], &second["base"]), (&"incremental".into(), &first.as_str().into()));
    let backups = [(first, before), (id(&second), image)];
    (place, driver, backups)
}

#[test]
fn a_flipped_bit_is_found_by_verify_and_by_restore() {
    let (place, _driver, backups) = two();
    let [(first, _), (second, changed)] = &backups;
    // A file with the first backup, onto which the second one goes.
    let held = place.path("held");
    place.ok(&["restore", first, "--to", arg(&held)]);
    let onto = |id: &str, base: &str| place.run(&["restore", id, "--to", arg(&held), "--onto-base", base]);
    let mut random = Rng::with_seed(7);
    let (mut in_packs, mut refused, mut refused_onto) = (0, 0, 0);
    for path in place.objects() {
        let whole = std::fs::read(&path).expect("read");
        // The ends, where lengths and checksums are, and some between.
        let mut bits = vec![0, 8 * 13, 8 * whole.len() - 1, 8 * (whole.len() - 40)];
        bits.extend(std::iter::repeat_with(|| random.usize(..8 * whole.len())).take(4));
        for bit in bits {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(&path, &flipped).expect("write");
            let said = place.fails(1, &["verify"]);
            assert!(
                said.contains("damaged") || said.contains("format"),
                "bit {bit} of {}: {said}",
                path.display()
            );
            in_packs += usize::from(path.to_string_lossy().contains("/packs/"));
            let mut is_refused = false;
            for (id, image) in &backups {
                let to = place.path("restored");
                let _ = std::fs::remove_file(&to);
                let restored = place.run(&["restore", id, "--to", arg(&to)]);
                is_refused |= !restored.status.success();
                if restored.status.success() {
                    image.compare(&to, SIZE, &base::Stop::default()).expect("what is restored is right");
                } else {
                    assert!(!to.exists() && !place.path(".restored.restoring").exists(), "a part is left");
                }
            }
            refused += usize::from(is_refused && path.to_string_lossy().contains("/packs/"));
            let restored = onto(second, first);
            match restored.status.success() {
                true => changed.compare(&held, SIZE, &base::Stop::default()).expect("it is right"),
                false => {
                    refused_onto += 1;
                    let said = text(&restored.stderr);
                    assert!(restored.status.code() == Some(1) && said.contains("cbt-backup: "), "{said}");
                }
            }
            std::fs::write(&path, &whole).expect("write");
            assert!(onto(first, second).status.success(), "back to the first backup");
        }
    }
    assert!(in_packs >= 32, "there are packs with data and with maps of both backups: {in_packs}");
    assert_eq!(refused, in_packs, "every bit of a pack is needed by one of the backups");
    assert!(refused_onto >= 8, "the pack with what changed is needed: {refused_onto}");
    let verified = place.ok(&["verify"]);
    assert_eq!(verified["damage"].as_array().map(Vec::len), Some(0), "all is as it was: {verified}");
    assert!(!place.repository().join("damaged").read_dir().is_ok_and(|mut notes| notes.next().is_some()));
}

#[test]
fn damage_is_reported_by_backup_and_bytes_and_a_full_backup_follows() {
    let (place, driver, [(first, _), (second, image)]) = two();
    // The largest pack holds the data of the first backup.
    let largest = place.largest();
    flip(&largest, 100);
    let report = json(1, place.command(&["verify"]));
    let damage = report["damage"].as_array().expect("a list");
    let hurt = |id: &str| damage.iter().filter(|of| of["backup"] == id).count();
    assert!(hurt(&first) == 1 && hurt(&second) >= 1, "{report}");
    let is_written = |of: &serde_json::Value| {
        let (start, end) =
            (of["start"].as_u64().expect("a start") / BLOCK, of["end"].as_u64().expect("an end") / BLOCK);
        let middle = 128 * MIB / BLOCK;
        start < end && (start >= 3 && end <= 43 || start >= middle - 5 && end <= middle + 5)
    };
    assert!(damage.iter().all(is_written), "{report}");

    driver.snapshot("three", &image, SIZE);
    let said = fails(1, driver.command(&place, "incremental", "three"));
    assert!(said.contains("damaged"), "{said}");
    let third = driver.back_up(&place, "auto", "three");
    assert_eq!(third["kind"], "full");
    assert!(third["why"].as_str().is_some_and(|why| why.contains("damaged")), "{third}");
    place.restores(&id(&third), &image, SIZE);
    // Once it is whole again, the note goes.
    flip(&largest, 100);
    place.ok(&["verify"]);
    driver.snapshot("four", &image, SIZE);
    assert_eq!(driver.back_up(&place, "auto", "four")["kind"], "incremental");
}

/// What is asked for of one volume, or of all that is sound, is done; the damage is named.
#[test]
fn a_damaged_map_of_a_backup_stops_no_prune_and_no_picture() {
    let (place, _driver, [(first, _), (second, _)]) = two();
    // The map of the second backup, which is not the largest thing in the repository.
    let maps = |id: &str| -> Vec<std::path::PathBuf> {
        let before: Vec<_> =
            place.objects().into_iter().filter(|path| path.to_string_lossy().contains("/packs/")).collect();
        let copy = place.copy();
        copy.ok(&["prune", "--remove", id]);
        let left: Vec<_> =
            copy.objects().into_iter().filter_map(|path| Some(path.file_name()?.to_owned())).collect();
        before
            .into_iter()
            .filter(|path| !left.contains(&path.file_name().expect("a name").to_owned()))
            .collect()
    };
    let own = maps(&second);
    assert!(!own.is_empty());
    for path in &own {
        std::fs::remove_file(path).expect("remove");
    }
    let shown = place.run(&["show", "--volume", "v"]);
    let said = ended(0, &shown);
    assert!(said.contains(&second) && said.contains("left out"), "{said}");
    assert!(text(&shown.stdout).contains(&first[..16]), "{}", text(&shown.stdout));
    let said = ended(0, &place.run(&["prune", "--keep-last", "2"]));
    assert!(said.contains("run `cbt-backup verify`"), "{said}");
}

#[test]
fn a_pack_that_is_gone_is_seen_before_a_backup_is_made_over_it() {
    let (place, driver, [(first, _), (second, image)]) = two();
    // The largest pack holds the data of the first backup.
    let pack = place.largest();
    std::fs::remove_file(&pack).expect("remove");
    driver.snapshot("three", &image, SIZE);
    let made = driver.back_up(&place, "auto", "three");
    assert!(made["why"].as_str().is_some_and(|why| why.contains("is gone")), "{made}");
    place.restores(&id(&made), &image, SIZE);
    let report = json(1, place.command(&["verify"]));
    let name = pack.file_name().and_then(|name| name.to_str()).expect("a name");
    let damage = report["damage"].as_array().expect("a list");
    let is_reported = |of: &serde_json::Value| {
        of["what"].as_str().is_some_and(|what| what.contains(name) && what.contains("not found"))
    };
    assert!(damage.iter().all(is_reported), "{report}");
    // What the first backup wrote, and of that what the second one has not replaced. Whole segments are reported too.
    let ranges = |id: &str| {
        let of = damage.iter().filter(|of| of["backup"] == id);
        let mut ranges: Vec<(u64, u64)> = of
            .map(|of| (of["start"].as_u64().expect("a start"), of["end"].as_u64().expect("an end")))
            .filter(|(start, end)| end - start < SIZE - 128 * MIB)
            .map(|(start, end)| (start / BLOCK, end / BLOCK))
            .collect();
        ranges.sort_unstable();
        ranges
    };
    let middle = 128 * MIB / BLOCK;
    assert_eq!(ranges(&first), [(3, 43), (middle - 5, middle + 5)], "{report}");
    assert_eq!(ranges(&second), [(3, 10), (12, 20), (24, 43), (middle - 5, middle + 5)], "{report}");
}

/// An index that cannot be read stops a prune, which does not know what that backup needs, until it is removed by name.
#[test]
fn a_backup_is_removed_by_name_also_where_its_index_is_damaged() {
    let (place, _driver, [(first, _), (second, changed)]) = two();
    let index = place.repository().join("backups").join(&first);
    flip(&index, 20);
    let said = place.fails(1, &["prune", "--keep-last", "1"]);
    assert!(said.contains(&format!("`cbt-backup prune --remove {first}`")), "{said}");
    for (wanted, expected) in [("nothing", "there is no backup nothing"), (&first[..2], "write more of it")] {
        let said = place.fails(1, &["prune", "--remove", wanted]);
        assert!(said.contains(expected), "{said}");
    }
    for dry in [&["--dry-run"][..], &[]] {
        assert!(index.exists());
        let pruned = place.ok(&[&["prune", "--remove", &first, "--max-unused", "0"], dry].concat());
        let ids = |name: &str| pruned[name].as_array().expect("a list").clone();
        assert_eq!(ids("removed"), [first.as_str()]);
        assert_eq!(ids("kept"), [second.as_str()]);
    }
    let verified = place.ok(&["verify"]);
    let found = (verified["damage"].as_array().map(Vec::len), verified["unused"].as_u64());
    assert_eq!(found, (Some(0), Some(0)));
    place.restores(&second, &changed, SIZE);
}

#[test]
fn auto_says_why_it_is_full() {
    let (place, driver) = Driver::anew();
    let file = place.open_image(SIZE);
    let mut image = Image::default();
    let next = |image: &Image, size: u64, handle: &str, fault: Option<Fault>| {
        driver.snapshot(handle, image, size);
        driver.script(fault);
        let made = driver.back_up(&place, "auto", handle);
        driver.script([]);
        place.restores(&id(&made), image, size);
        (
            made["kind"].as_str().expect("a kind").to_owned(),
            made["why"].as_str().unwrap_or_default().to_owned(),
        )
    };
    image.write(&file, 0, 9, 1).expect("write");
    let (kind, why) = next(&image, SIZE, "a", None);
    assert!(kind == "full" && why.contains("no earlier backup"), "{why}");
    image.write(&file, 5, 1, 2).expect("write");
    assert_eq!(next(&image, SIZE, "b", Some(Fault::Cut(0))).0, "incremental");
    let (kind, why) = next(&image, SIZE, "c", Some(Fault::NoDelta));
    assert!(kind == "full" && why.contains("no deltas"), "{why}");
    driver.forget("c");
    let (kind, why) = next(&image, SIZE, "d", None);
    assert!(kind == "full" && why.contains("does not exist"), "{why}");
    // More ranges than one message has.
    for block in (0..60).step_by(2) {
        image.write(&file, block, 1, 3).expect("write");
    }
    let (kind, why) = next(&image, SIZE, "lost", Some(Fault::Loses(1)));
    assert!(kind == "full" && why.contains("a map cannot be read"), "{why}");
    file.set_len(SIZE + MIB).expect("grow");
    assert_eq!(next(&image, SIZE + MIB, "e", None).0, "incremental");
    assert_eq!(next(&image, SIZE + MIB, "f", None).0, "incremental");
    // An index that cannot be read is of a backup that may have been the base.
    let index = place.repository().join("backups").join(place.list().pop().expect("backups"));
    flip(&index, 20);
    let listed = json(1, place.command(&["list"]));
    let damaged: Vec<&serde_json::Value> =
        listed.as_array().expect("a list").iter().filter(|backup| backup["damage"].is_string()).collect();
    assert_eq!(damaged.len(), 1, "{listed}");
    assert_eq!(Some(damaged[0]["id"].as_str().expect("an id").as_ref()), index.file_name());
    let said = place.fails(1, &["list"]);
    assert!(said.contains("checksum"), "{said}");
    let (kind, _) = next(&image, SIZE + MIB, "g", None);
    assert_eq!(kind, "incremental", "over the one before");
}

/// What is behind the old end is read, whatever the driver says of it.
#[test]
fn a_volume_that_grows_is_backed_up_by_what_is_new() {
    let (place, driver) = Driver::anew();
    let mut size = SIZE - 700;
    let file = place.open_image(size);
    let mut image = Image::default();
    image.write(&file, 3, 4000, 1).expect("write");
    driver.snapshot("0", &image, size);
    let mut made = driver.back_up(&place, "auto", "0");
    // Inside a block, to the end of one, over the end of a segment, by nothing that holds data.
    for (round, grown) in (1..).zip([700, 4 * MIB, 130 * MIB, 40 * MIB]) {
        let before = (id(&made), image.clone(), size);
        let first = size / BLOCK;
        size += grown;
        file.set_len(size).expect("grow");
        image.write(&file, 500 + round, 2, round).expect("write");
        if grown != 40 * MIB {
            image.write(&file, size / BLOCK - 1, 1, round).expect("write");
            image.write(&file, first, (grown / BLOCK).min(3), round).expect("write");
        }
        let handle = round.to_string();
        driver.snapshot(&handle, &image, size);
        made = driver.back_up(&place, "auto", &handle);
        assert_eq!((&made["kind"], &made["size"]), (&"incremental".into(), &size.into()), "{made}");
        assert!(made["read"].as_u64().is_some_and(|bytes| bytes <= grown + 10 * BLOCK), "{made}");
        place.restores(&id(&made), &image, size);
        place.restores(&before.0, &before.1, before.2);
    }
    // Where it has grown by far more than it holds, to read all of that would take longer than a full backup.
    size += 3 << 30;
    file.set_len(size).expect("grow");
    driver.snapshot("far", &image, size);
    made = driver.back_up(&place, "auto", "far");
    assert_eq!(made["kind"], "full");
    place.ok(&["prune", "--keep-last", "2", "--max-unused", "0"]);
    place.ok(&["verify"]);
    place.restores("latest", &image, size);
}

/// Of which volume a damaged index is nobody knows: what is asked of another volume is done all the same.
#[test]
fn one_damaged_index_stops_nothing_that_is_about_another_volume() {
    let place = Place::new();
    let file = place.open_image(SIZE);
    let mut image = Image::default();
    let mut made = Vec::new();
    let device = place.image();
    for (round, volume) in (1..).zip(["a", "a", "b", "b"]) {
        image.write(&file, round * 10, 5, round).expect("write");
        made.push((id(&place.ok(&["full", "--volume", volume, "--device", arg(&device)])), image.clone()));
    }
    let damaged = place.repository().join("backups").join(&made[3].0);
    flip(&damaged, 20);

    let to = place.path("restored");
    let packs = || place.objects().iter().filter(|path| path.to_string_lossy().contains("/packs/")).count();
    for arguments in [
        vec!["restore", "latest", "--volume", "a", "--to", arg(&to)],
        vec!["show", "latest", "--volume", "a"],
        vec!["show", "--volume", "a"],
        vec!["prune", "--volume", "a", "--keep-last", "1"],
    ] {
        let before = packs();
        let said = ended(0, &place.run(&arguments));
        assert!(said.contains(&made[3].0) && said.contains("checksum differs"), "{arguments:?}: {said}");
        assert_eq!(packs(), before, "{arguments:?}: what the damaged one needs nobody knows");
    }
    made[1].1.compare(&to, SIZE, &base::Stop::default()).expect("the latest of a");
    let mut kept = place.repository().join("backups").read_dir().expect("list").count();
    assert_eq!(kept, 3, "one of a is gone");
    // Of all volumes the latest is the damaged one, and all rules are about it, too.
    place.fails(1, &["restore", "latest", "--to", arg(&to), "--overwrite"]);
    place.fails(1, &["prune", "--keep-last", "1"]);
    // Whole again, nothing of it is lost, and what was left is freed.
    flip(&damaged, 20);
    let pruned = place.ok(&["prune"]);
    assert!(pruned["freed"].as_u64().is_some_and(|bytes| bytes > 5 * BLOCK), "{pruned}");
    kept = place.list().len();
    assert_eq!(kept, 3);
    for (id, image) in &made[1..] {
        place.restores(id, image, SIZE);
    }
}

/// The index comes last: where a pack cannot be written there is no backup that names it.
#[test]
fn a_backup_whose_packs_cannot_be_written_has_no_index() {
    let place = Place::new();
    let mut image = place.written(SIZE, 3, 40, 1);
    let first = place.full();
    let (packs, aside) = (place.repository().join("packs"), place.path("aside"));
    std::fs::rename(&packs, &aside).expect("rename");
    std::fs::write(&packs, "no directory").expect("write");
    image.write(&place.open_image(SIZE), 60, 9, 2).expect("write");
    let said = fails(1, place.backup("full", &[]));
    assert!(said.contains("write packs/"), "{said}");
    assert_eq!(place.list(), [first.as_str()]);
    std::fs::remove_file(&packs).expect("remove");
    std::fs::rename(&aside, &packs).expect("rename");
    place.restores(&place.full(), &image, SIZE);
}
