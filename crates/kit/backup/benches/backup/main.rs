//! `cbt-backup`'s part of `make bench`: backups and restores with cold caches, each beside a bare copy of the same ranges and
//! beside qemu-img, borg and restic, in one run on one disk. Needs root, for the caches, 30 GB of disk in the
//! temporary directory, and memory for one repository in `/dev/shm`.
//!
//! `cargo bench -p cbt-backup --bench backup -- full incremental` runs the rows that are named, of `full`, `peers`,
//! `incremental` and `restore`; without names all. A number beside them is the GiB of data, in place of 4. Each row has a time,
//! and begins no round that would end after it, so that all of them together take less than ten minutes.
#![allow(clippy::disallowed_methods)]

mod bare;
mod driver;
mod source;

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use testkit::bench::{HEADS, row};

use driver::Driver;
use source::{Content, PIECE, Source};

const ROUNDS: usize = 3;
/// Of what takes a second or less.
const SHORT_ROUNDS: usize = 7;
/// Reads at once of a backup, which is the default, of the bare copy and of `qemu-img`.
const READS: usize = 16;
/// Segments at once of a restore, which is the default, and writes at once of what stands beside it.
const WRITES: usize = 8;
const GIB: u64 = 1 << 30;
/// Most memory in KiB.
const MEMORY: u64 = 256 << 10;

/// What one run of a program took.
#[derive(Clone, Copy)]
struct Run {
    took: Duration,
    /// Its most memory, in KiB.
    peak: u64,
}

/// The runs of one row, and what the most memory was so far.
struct Bench {
    dir: tempfile::TempDir,
    data: u64,
    peak: u64,
}

impl Bench {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A command line of the program under test.
    fn tool(&self, repository: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbt-backup"));
        command.arg("--repository").arg(self.path(repository)).args(arguments);
        command
    }

    /// Runs the program under test; its memory counts.
    fn own(&mut self, command: Command) -> Duration {
        let run = run(command);
        self.peak = self.peak.max(run.peak);
        run.took
    }

    fn remove(&self, name: &str) {
        let path = self.path(name);
        let removed =
            if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        removed.expect("remove");
    }
}

/// Runs a program to its end, and looks at its memory meanwhile.
fn run(mut command: Command) -> Run {
    cold();
    let began = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let mut peak = 0;
    let status = loop {
        let text = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim_end_matches("kB").trim().parse().ok());
        peak = peak.max(kib.unwrap_or(0));
        if let Some(status) = child.try_wait().expect("wait") {
            break status;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let took = began.elapsed();
    let mut said = String::new();
    child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("read");
    assert!(status.success(), "{command:?}: {said}");
    Run { took, peak }
}

/// Everything is on the disk, and nothing in memory.
fn cold() {
    // Of the disk that is measured alone: others may be busy for minutes.
    let dir = File::open(std::env::temp_dir()).expect("open the temporary directory");
    nix::unistd::syncfs(&dir).expect("flush the disk");
    std::fs::write("/proc/sys/vm/drop_caches", "3").expect("drop the caches: run this as root");
}

fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if found.is_err() {
        eprintln!("{program} is not installed (`make test-deps`), so nothing is compared with it");
    }
    found.is_ok()
}

/// Up to `most` rounds, at least one, and none that would end after `seconds` if it takes as long as those before.
fn rounds(most: usize, seconds: u64) -> impl Iterator<Item = usize> {
    let began = Instant::now();
    (0..most).take_while(move |round| {
        let spent = began.elapsed();
        *round == 0 || spent + spent / *round as u32 <= Duration::from_secs(seconds)
    })
}

/// The middle one, and the least and the most.
#[derive(Default)]
struct Samples(Vec<Duration>);

impl Samples {
    fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort();
        sorted[sorted.len() / 2].as_secs_f64()
    }
}

impl std::fmt::Display for Samples {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (least, most) = (self.0.iter().min().expect("samples"), self.0.iter().max().expect("samples"));
        let (least, most) = (least.as_secs_f64(), most.as_secs_f64());
        match self.0.len() {
            1 => write!(f, "{most:.2} s (1 run)"),
            runs => write!(f, "{:.2} s ({least:.2} to {most:.2}, {runs} runs)", self.median()),
        }
    }
}

fn main() {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let data = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(4) * GIB;
    let names: Vec<&String> = arguments.iter().filter(|argument| argument.parse::<u64>().is_err()).collect();
    let wants = |name: &str| names.is_empty() || names.iter().any(|wanted| *wanted == name);
    let dir = tempfile::Builder::new().prefix("deltapath-bench-").tempdir().expect("a directory");
    let mut bench = Bench { dir, data, peak: 0 };
    println!("{HEADS}");
    if wants("full") {
        full(&mut bench);
    }
    if wants("peers") {
        peers(&mut bench);
    }
    if wants("incremental") {
        incremental(&mut bench);
    }
    if wants("restore") {
        restore(&mut bench);
    }
    eprintln!("the data lies in {} pieces of 1 MiB; median (least to most)", data / PIECE);
    let mib = bench.peak >> 10;
    row("m", "most memory of all of them", &format!("{mib} MiB"), "", "256 MiB", bench.peak <= MEMORY);
}

/// A full backup of what does not compress, beside a bare copy.
fn full(bench: &mut Bench) {
    let source = Source::make(&bench.path("image"), 2 * bench.data, bench.data, Content::Noise);
    let driver = Driver::start(&bench.path("csi.sock"), &source, "one");
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    for _ in rounds(ROUNDS, 80) {
        cold();
        bare.push(bare::copy(source.path(), &bench.path("copy"), &source.ranges(), READS));
        bench.remove("copy");
        ours.push(bench.own(back_up(bench, "repository", "full", &source, &driver, "one")));
        bench.remove("repository");
    }
    drop(driver);
    bench.remove("image");
    let (ours, bare) = (Samples(ours), Samples(bare));
    let share = bare.median() / ours.median() * 100.0;
    row(
        "a",
        &format!(
            "full backup, {} GiB of data in a volume of {} GiB, noise",
            bench.data / GIB,
            2 * bench.data / GIB
        ),
        &ours.to_string(),
        &format!("{share:.0} % of the speed of a bare copy, {bare}"),
        "90 %",
        share >= 90.0,
    );
}

fn back_up(
    bench: &Bench,
    repository: &str,
    wish: &str,
    source: &Source,
    driver: &Driver,
    handle: &str,
) -> Command {
    let mut command = bench.tool(repository, &[wish, "--volume", "v", "--snapshot", handle, "--endpoint"]);
    command.arg(driver.endpoint()).arg("--device").arg(source.path());
    command
}

/// A full backup of what compresses in part, beside other programs: at the default level beside those that compress, and at
/// a quick one beside `qemu-img`, which does not.
fn peers(bench: &mut Bench) {
    let source = Source::make(&bench.path("image"), 2 * bench.data, bench.data, Content::Mixed);
    let driver = Driver::start(&bench.path("csi.sock"), &source, "one");
    let programs: Vec<_> = ["qemu-img", "borg", "restic"].into_iter().filter(|name| has(name)).collect();
    let (mut ours, mut quick) = (Vec::new(), Vec::new());
    let mut theirs: Vec<Vec<Duration>> = vec![Vec::new(); programs.len()];
    for round in rounds(ROUNDS, 240) {
        ours.push(bench.own(back_up(bench, "repository", "full", &source, &driver, "one")));
        bench.remove("repository");
        let mut command = back_up(bench, "repository", "full", &source, &driver, "one");
        command.arg("--compression=-3");
        quick.push(bench.own(command));
        bench.remove("repository");
        for (program, samples) in programs.iter().zip(&mut theirs) {
            // They take most of the time, and are far behind.
            if round > 0 && *program != "qemu-img" {
                continue;
            }
            samples.push(run(peer(bench, program, source.path())).took);
            bench.remove("theirs");
        }
    }
    drop(driver);
    bench.remove("image");
    let (ours, quick) = (Samples(ours), Samples(quick));
    for (program, samples) in programs.iter().zip(theirs) {
        let theirs = Samples(samples);
        let (level, ours, other) = match *program {
            "qemu-img" => {
                (", --compression=-3", &quick, format!("; {:.1} x without", theirs.median() / ours.median()))
            }
            _ => ("", &ours, String::new()),
        };
        row(
            "b",
            &format!(
                "full backup, {} GiB of data of which half is text{level}, against {program}",
                bench.data / GIB
            ),
            &ours.to_string(),
            &format!("{:.1} x the speed of {program}, {theirs}{other}", theirs.median() / ours.median()),
            "faster",
            ours.median() < theirs.median(),
        );
    }
}

/// A full copy of an image by another program, into `theirs`. Each knows the holes of the image, and the backup programs
/// compress with zstd, as quickly as they can.
fn peer(bench: &Bench, program: &str, image: &Path) -> Command {
    let to = bench.path("theirs");
    let mut command = Command::new(program);
    command.env("HOME", bench.dir.path()).env("BORG_BASE_DIR", bench.path("borg"));
    let prepare = |arguments: &[&str]| {
        let mut first = Command::new(program);
        first.env("HOME", bench.dir.path()).env("BORG_BASE_DIR", bench.path("borg")).args(arguments).arg(&to);
        let done = first.env("RESTIC_PASSWORD", "none").output().expect(program);
        assert!(done.status.success(), "{first:?}: {}", String::from_utf8_lossy(&done.stderr));
    };
    match program {
        "qemu-img" => {
            let arguments =
                ["convert", "-f", "raw", "-O", "raw", "-T", "none", "-t", "none", "-W", "-m", "16"];
            command.args(arguments).arg(image).arg(&to);
        }
        "borg" => {
            prepare(&["init", "--encryption", "none"]);
            let arguments =
                ["create", "--sparse", "--chunker-params", "fixed,4194304", "--compression", "zstd,1"];
            command.args(arguments).arg(format!("{}::one", to.display())).arg(image);
        }
        _ => {
            prepare(&["init", "--repository-version", "2", "--no-cache", "--repo"]);
            let arguments = ["backup", "--no-cache", "--compression", "auto", "--repo"];
            command.env("RESTIC_PASSWORD", "none").args(arguments).arg(&to).arg(image);
        }
    }
    command
}

/// A volume of which incremental backups are made.
struct Volume {
    what: String,
    name: String,
    source: Source,
    driver: Driver,
    ours: Samples,
    bare: Samples,
}

/// Incremental backups of 1 %, in random blocks of 4 KiB: of a volume, of one of 8 TiB with the same data in its first
/// part, and of one whose data is spread over all of its 8 TiB. In turn, so that a slow moment meets all three.
fn incremental(bench: &mut Bench) {
    const HUGE: u64 = 8 << 40;
    let near = 2 * bench.data;
    let kinds = [
        (format!("in a volume of {} GiB", near / GIB), near, near),
        ("the same in a sparse volume of 8 TiB".to_owned(), HUGE, near),
        ("spread over a sparse volume of 8 TiB".to_owned(), HUGE, HUGE),
    ];
    let mut volumes = Vec::new();
    for (number, (what, size, span)) in kinds.into_iter().enumerate() {
        let name = format!("volume-{number}");
        let source = Source::make_within(&bench.path(&name), size, span, bench.data, Content::Noise);
        let driver = Driver::start(&bench.path(&format!("{name}.sock")), &source, "0");
        bench.own(back_up(bench, &format!("{name}-repository"), "full", &source, &driver, "0"));
        volumes.push(Volume {
            what,
            name,
            source,
            driver,
            ours: Samples::default(),
            bare: Samples::default(),
        });
    }
    for round in rounds(SHORT_ROUNDS, 60) {
        for Volume { name, source, driver, ours, bare, .. } in &mut volumes {
            let changed = source.change(bench.data / source::BLOCK / 100);
            let now = (round + 1).to_string();
            driver.delta(&round.to_string(), &now, &changed);
            cold();
            bare.0.push(bare::copy(source.path(), &bench.path("copy"), &changed, READS));
            bench.remove("copy");
            let repository = format!("{name}-repository");
            ours.0.push(bench.own(back_up(bench, &repository, "incremental", source, driver, &now)));
        }
    }
    let near = volumes[0].ours.median();
    for Volume { what, name, ours, bare, .. } in &volumes {
        bench.remove(&format!("{name}-repository"));
        bench.remove(name);
        let is_quick = ours.median() <= 2.0 * bare.median() + 0.05;
        let times = ours.median() / near;
        row(
            "c",
            &format!("incremental backup of 1 % of {} GiB, {what}", bench.data / GIB),
            &ours.to_string(),
            &format!(
                "{:.2} x a bare copy of these blocks, {bare}; {times:.2} x the first of these rows",
                ours.median() / bare.median()
            ),
            "2 x and 50 ms; 1.5 x",
            is_quick && times <= 1.5,
        );
    }
}

/// Restores into a file: from the disk that it is written to, beside a bare copy, which reads and writes as much; and from
/// memory, which leaves the disk to what is written, beside a bare write.
fn restore(bench: &mut Bench) {
    let source = Source::make(&bench.path("image"), 2 * bench.data, bench.data, Content::Noise);
    let driver = Driver::start(&bench.path("csi.sock"), &source, "one");
    bench.own(back_up(bench, "repository", "full", &source, &driver, "one"));
    drop(driver);
    let memory = tempfile::Builder::new()
        .prefix("deltapath-bench-")
        .tempdir_in("/dev/shm")
        .expect("a directory in /dev/shm");
    let copied = Command::new("cp").arg("-r").arg(bench.path("repository")).arg(memory.path()).status();
    assert!(copied.expect("cp").success(), "copy the repository to memory");
    let in_memory = memory.path().join("repository").display().to_string();
    let has_qemu = has("qemu-img");
    let [mut ours, mut alone, mut bare, mut read, mut copy, mut theirs] =
        std::array::from_fn(|_| Samples::default());
    for _ in rounds(ROUNDS, 140) {
        cold();
        bare.0.push(bare::write(&bench.path("copy"), &source.ranges(), WRITES));
        bench.remove("copy");
        for (repository, samples) in [("repository", &mut ours), (&in_memory, &mut alone)] {
            let mut command = bench.tool(repository, &["restore", "latest", "--to"]);
            command.arg(bench.path("restored"));
            samples.0.push(bench.own(command));
            let restored =
                File::open(bench.path("restored")).and_then(|file| file.metadata()).expect("there");
            // The filesystem counts blocks of its own tables too.
            let held = restored.blocks() * 512;
            assert_eq!((restored.len(), held / bench.data), (2 * bench.data, 1), "{held} bytes are held");
            bench.remove("restored");
        }
        cold();
        read.0.push(bare::read(source.path(), &source.ranges(), WRITES));
        cold();
        copy.0.push(bare::copy(source.path(), &bench.path("copy"), &source.ranges(), WRITES));
        bench.remove("copy");
        if has_qemu {
            theirs.0.push(run(peer(bench, "qemu-img", source.path())).took);
            bench.remove("theirs");
        }
    }
    // For their memory alone.
    for arguments in [&["verify"][..], &["prune", "--max-unused", "0"]] {
        let command = bench.tool("repository", arguments);
        bench.own(command);
    }
    bench.remove("repository");
    bench.remove("image");
    let of = |other: &Samples| other.median() / ours.median();
    let qemu = match has_qemu {
        true => format!("; {:.1} x the speed of qemu-img, {theirs}", of(&theirs)),
        false => String::new(),
    };
    let what = format!("restore of {} GiB of noise", bench.data / GIB);
    row(
        "d",
        &what,
        &ours.to_string(),
        &format!(
            "{:.0} % of the speed of a bare copy, {copy}, of which reading alone takes {read}, and writing alone {bare}{qemu}",
            of(&copy) * 100.0
        ),
        "90 %",
        of(&copy) >= 0.9,
    );
    let share = bare.median() / alone.median();
    row(
        "d",
        &format!("{what}, the repository in memory"),
        &alone.to_string(),
        &format!("{:.0} % of the speed of that bare write", share * 100.0),
        "90 %",
        share >= 0.9,
    );
}
