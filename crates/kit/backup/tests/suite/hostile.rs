//! Repositories that somebody has forged, with checksums that are right: they are damaged, and take no more memory than others.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::tool::{MIB, Place, Running, arg, ended, plant, text};

const SIZE: u64 = 140 * MIB;

/// As in `repository/index.rs`, field by field.
#[derive(Clone, Serialize, Deserialize)]
struct About(String, String, i64, u8, Option<String>, Option<String>, Option<String>, String, [u64; 6]);
#[derive(Clone, Serialize, Deserialize)]
struct Pack([u8; 32], u32, u32);
#[derive(Clone, Serialize, Deserialize)]
struct Segment(u32, u32, u32, u32, Vec<u32>, [u8; 16]);
#[derive(Clone, Serialize, Deserialize)]
struct Index(About, Vec<Pack>, Vec<Segment>, Vec<u8>);

fn read<T: DeserializeOwned>(path: &Path) -> T {
    let bytes = std::fs::read(path).expect("read");
    postcard::from_bytes(&bytes[12..bytes.len() - 32]).expect("an object")
}

fn write(path: &Path, content: &impl Serialize) {
    let mut bytes = [b"cbtbackp".as_slice(), &1u32.to_le_bytes()].concat();
    bytes.extend(postcard::to_stdvec(content).expect("postcard"));
    let hash = blake3::hash(&bytes);
    bytes.extend(hash.as_bytes());
    plant(path, bytes);
}

fn hex(id: &[u8; 32]) -> String {
    blake3::Hash::from(*id).to_hex().to_string()
}

struct World {
    place: Place,
    id: String,
    index: PathBuf,
    sound: Index,
}

impl World {
    fn new() -> Self {
        let place = Place::new();
        place.written(SIZE, 3, 40, 1);
        let id = place.full();
        let index = place.repository().join("backups").join(&id);
        World { sound: read(&index), place, id, index }
    }

    /// Stores a pack of these chunks, not compressed.
    fn store(&self, chunks: &[Vec<u8>]) -> Pack {
        let row = |chunk: &Vec<u8>| {
            let length = (chunk.len() as u32).to_le_bytes();
            [&length[..], &length, blake3::hash(chunk).as_bytes()].concat()
        };
        let table: Vec<u8> = chunks.iter().flat_map(row).collect();
        let bytes = [chunks.concat(), table.clone()].concat();
        let pack = Pack(*blake3::hash(&table).as_bytes(), bytes.len() as u32, chunks.len() as u32);
        plant(&self.pack(&pack), bytes);
        pack
    }

    fn pack(&self, of: &Pack) -> PathBuf {
        let name = hex(&of.0);
        self.place.repository().join("packs").join(&name[..2]).join(name)
    }

    /// With 2 GiB of memory, which is a multiple of what any command needs.
    fn run(&self, arguments: &[&str]) -> Output {
        let program = self.place.command(arguments);
        let mut command = Command::new("sh");
        command
            .args(["-c", "ulimit -v 2097152; exec \"$@\"", "sh"])
            .arg(program.get_program())
            .args(program.get_args());
        command.output().expect("run")
    }

    /// Every command that reads what is forged fails, and says that it is damaged.
    fn is_damaged(&self, what: &str, commands: &[&[&str]]) {
        for arguments in commands {
            let output = self.run(arguments);
            let said = text(&output.stderr) + &text(&output.stdout);
            assert_eq!(output.status.code(), Some(1), "{what}: {arguments:?}: {said}");
            assert!(said.contains("damaged") && !said.contains("panicked"), "{what}: {arguments:?}: {said}");
        }
    }
}

#[test]
fn a_forged_index_is_damaged_and_takes_no_memory() {
    let world = World::new();
    let to = world.place.path("restored");
    let socket = world.place.path("nbd.sock");
    let (id, to, socket) = (world.id.as_str(), arg(&to), arg(&socket));
    let commands: [&[&str]; 7] = [
        &["list"],
        &["verify"],
        &["restore", id, "--to", to],
        &["show", id],
        &["mount", id, "--socket", socket],
        &["prune"],
        &["restore", "latest", "--to", to],
    ];
    type Forge = fn(&mut Index);
    let cases: [(&str, Forge); 10] = [
        ("rows", |index| index.1.push(Pack([7; 32], u32::MAX, u32::MAX))),
        ("rows of a pack that is there", |index| index.1[0].2 = u32::MAX),
        ("bytes", |index| index.1[0].1 = u32::MAX),
        ("one pack twice", |index| index.1.push(index.1[0].clone())),
        ("a chunk", |index| index.2[0].2 = u32::MAX),
        ("a pack", |index| index.2[0].1 = u32::MAX),
        ("a pack of data", |index| index.2[0].4 = vec![u32::MAX]),
        ("a segment", |index| index.2[0].0 = u32::MAX),
        ("a size", |index| index.0.8[0] = u64::MAX),
        ("cells", |index| index.3.clear()),
    ];
    for (what, forge) in cases {
        let mut index = world.sound.clone();
        forge(&mut index);
        write(&world.index, &index);
        world.is_damaged(what, &commands);
    }
    // Data behind the end of the volume.
    let mut index = world.sound.clone();
    index.0.8[0] = 5 * 4096;
    write(&world.index, &index);
    world.is_damaged("a size before its data", &[&["verify"], &["restore", id, "--to", to]]);
    // One that is long and holds nothing.
    let file = std::fs::File::create(&world.index).expect("create");
    file.set_len(3 << 30).expect("extend");
    world.is_damaged("a long one", &commands);
}

#[test]
fn what_was_interrupted_is_not_taken_at_its_word() {
    let world = World::new();
    let Index(about, packs, segments, _) = world.sound.clone();
    let partial = world.place.repository().join("partial/20200101T000000.000Z-abcdef");
    type Forge = fn(&mut Vec<Pack>, &mut Vec<Segment>);
    let cases: [(&str, Forge); 3] = [
        ("rows", |packs, _| packs.push(Pack([7; 32], u32::MAX, u32::MAX))),
        ("a pack", |_, segments| segments[0].1 = 99),
        ("a pack of data", |_, segments| segments[0].4 = vec![99]),
    ];
    for (what, forge) in cases {
        let (mut packs, mut segments) = (packs.clone(), segments.clone());
        forge(&mut packs, &mut segments);
        write(&partial, &(about.clone(), packs, segments, vec![0u32]));
        world.is_damaged(what, &[&["verify"]]);
        let device = world.place.image();
        let copy = world.place.copy();
        let said = ended(0, &copy.run(&["full", "--volume", "v", "--device", arg(&device), "--resume"]));
        assert!(said.contains("is not resumed"), "{what}: {said}");
        world.place.ok(&["prune"]);
        assert!(!partial.exists(), "{what}");
    }
}

/// The map of a segment and the table of a pack, whose checksums the index names.
#[test]
fn forged_packs_are_damaged_and_take_no_memory() {
    let world = World::new();
    let to = world.place.path("restored");
    let (id, to) = (world.id.as_str(), arg(&to));
    // A pack that is sparse, and by its index as long as it is.
    for pack in world.sound.1.iter().take(2) {
        let path = world.pack(pack);
        let whole = std::fs::read(&path).expect("read");
        std::fs::File::options().write(true).open(&path).expect("open").set_len(2700 << 20).expect("extend");
        world.is_damaged("a long pack", &[&["verify"]]);
        std::fs::write(&path, whole).expect("write");
    }
    // The map names a pack of any size, and more blocks than there are.
    type Extent = (u32, u32, u32, u32, u32);
    let data = &world.sound.1[world.sound.2[0].4[0] as usize];
    let cases: [(&str, Pack, Extent); 3] = [
        ("rows", Pack(data.0, u32::MAX, u32::MAX), (3, 40, 0, 0, 0)),
        ("a chunk", data.clone(), (3, 40, 0, u32::MAX, 0)),
        ("blocks", data.clone(), (3, 40, 0, 0, 32768)),
    ];
    for (what, pack, extent) in cases {
        let map = postcard::to_stdvec(&(vec![pack], vec![extent])).expect("postcard");
        let forged = world.store(&[map]);
        let mut index = world.sound.clone();
        let place = index.2[0].1 as usize;
        index.1[place] = forged;
        index.2[0].2 = 0;
        write(&world.index, &index);
        world.is_damaged(what, &[&["verify"], &["restore", id, "--to", to]]);
    }
}

/// Many packs that are not there, each with all the chunks that a pack may have.
#[test]
fn packs_that_are_missing_take_no_memory_each_chunk() {
    let world = World::new();
    let mut index = world.sound.clone();
    let missing = |number: u32| {
        let mut id = [0; 32];
        id[..4].copy_from_slice(&number.to_le_bytes());
        Pack(id, 655_360, 16384)
    };
    index.1.extend((0..2000).map(missing));
    write(&world.index, &index);
    let began = std::time::Instant::now();
    world.is_damaged("packs", &[&["verify"]]);
    assert!(began.elapsed() < std::time::Duration::from_secs(60), "{:?}", began.elapsed());
    // One map of all blocks, by turns in two packs that are not there, for every segment.
    let packs = vec![missing(0), missing(1)];
    let extents: Vec<(u32, u32, u32, u32, u32)> =
        (0..32768).map(|block| (block, 1, block % 2, block % 16384, 0)).collect();
    let map = world.store(&[postcard::to_stdvec(&(&packs, &extents)).expect("postcard")]);
    let mut index = world.sound.clone();
    index.0.8[0] = 60 * 128 * MIB;
    index.1 = [&[map], &packs[..]].concat();
    index.2 = (0..60).map(|number| Segment(number, 0, 0, 32768, vec![1, 2], [255; 16])).collect();
    write(&world.index, &index);
    let output = world.run(&["verify", "--output", "json"]);
    let said = ended(1, &output);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(report["damage"].as_array().is_some_and(|damage| damage.len() <= 2000), "{said}");
}

/// One pack with two numbers of chunks, in two backups.
#[test]
fn backups_that_contradict_each_other_are_damaged() {
    let world = World::new();
    let data = world.store(&[vec![7; 4096]]);
    let map = |pack: &Pack, chunk: u32| {
        let map = (vec![pack], vec![(0u32, 1u32, 0u32, chunk, 0u32)]);
        vec![postcard::to_stdvec(&map).expect("postcard")]
    };
    let maps = world.store(&map(&data, 0));
    let forged = Pack(maps.0, 700_000, 16384);
    let beyond = world.store(&map(&forged, 9999));
    let segment = Segment(0, 0, 0, 1, vec![1], [1; 16]);
    let backups = [
        (vec![forged.clone()], vec![]),
        (vec![maps, data], vec![segment.clone()]),
        (vec![beyond, forged], vec![segment]),
    ];
    std::fs::remove_file(&world.index).expect("remove");
    for (number, (packs, segments)) in backups.into_iter().enumerate() {
        let mut index = world.sound.clone();
        index.0.0 = format!("20260101T000000.00{number}Z-000000");
        (index.1, index.2) = (packs, segments);
        write(&world.index.with_file_name(&index.0.0), &index);
    }
    world.is_damaged("rows", &[&["verify"]]);
    let said = text(&world.run(&["prune", "--max-unused", "0"]).stderr);
    assert!(!said.contains("panicked"), "{said}");
}

/// A repository of a version that did not write what is new.
#[test]
fn what_an_earlier_version_interrupted_can_be_read() {
    let world = World::new();
    let Index(mut about, packs, segments, _) = world.sound.clone();
    about.1 = "other".into();
    let partial = world.place.repository().join("partial/20200101T000000.000Z-abcdef");
    write(&partial, &(about, packs, segments, vec![0u32, 1]));
    world.place.ok(&["verify"]);
    // What it was read from is not known, so it is not gone on with.
    let device = world.place.image();
    let full = ["full", "--volume", "other", "--device", arg(&device), "--resume"];
    let said = ended(0, &world.place.run(&full));
    assert!(said.contains("is not resumed"), "{said}");
}

/// What an index names and needs nothing of.
#[test]
fn packs_that_are_named_alone_take_no_memory() {
    let world = World::new();
    let mut index = world.sound.clone();
    index.1.extend((0..100_000u32).map(|number| {
        let mut id = [0; 32];
        id[..4].copy_from_slice(&number.to_le_bytes());
        Pack(id, 655_360, 16384)
    }));
    write(&world.index, &index);
    let mut command = world.place.command(&["verify"]);
    // Nobody reads it meanwhile.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut running = Running(command.spawn().expect("start"));
    let status = format!("/proc/{}/status", running.0.id());
    let mut peak = 0;
    while let Ok(status) = std::fs::read_to_string(&status) {
        let peak_of = |line: &str| line.strip_prefix("VmHWM:")?.trim().trim_end_matches(" kB").parse().ok();
        // It has none any more when it has ended.
        let Some(now) = status.lines().find_map(peak_of) else { break };
        peak = now;
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(running.0.wait().expect("wait").code(), Some(1));
    // What is said of each of them takes 2 kB, and a bit for each chunk would take as much again.
    assert!((1..260_000u64).contains(&peak), "{peak} kB");
}

#[test]
fn what_was_interrupted_before_all_time_is_pruned() {
    let world = World::new();
    let Index(mut about, packs, segments, _) = world.sound.clone();
    (about.1, about.2) = ("other".into(), i64::MIN);
    let partial = world.place.repository().join("partial/20200101T000000.000Z-abcdef");
    write(&partial, &(about, packs, segments, vec![0u32]));
    world.place.ok(&["prune"]);
    assert!(!partial.exists());
}

/// What a terminal would take for commands.
#[test]
fn what_a_backup_says_of_itself_is_shown_as_text() {
    let world = World::new();
    let mut index = world.sound.clone();
    let text_of = |what: &str| format!("{what}\x1b[2J\x1b]0;title\x07");
    index.0.1 = text_of("volume");
    (index.0.4, index.0.5, index.0.7) = (Some(text_of("base")), Some(text_of("why")), text_of("device"));
    write(&world.index, &index);
    let page = world.place.path("page.html");
    for arguments in [&["show", "latest", "--html", arg(&page)][..], &["show"], &["list"]] {
        let output = world.run(arguments);
        let said = ended(0, &output) + &text(&output.stdout);
        assert!(!said.contains(|c: char| c.is_control() && c != '\n'), "{arguments:?}: {said:?}");
    }
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(
        !page.contains(|c: char| c.is_control() && c != '\n') && page.contains("full because why"),
        "{page}"
    );
}
