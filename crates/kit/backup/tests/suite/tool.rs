//! The program under test, its repository and an image.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use files::pattern::Image;
use serde_json::Value;
use tempfile::TempDir;

pub const BLOCK: u64 = 4096;
pub const MIB: u64 = 1 << 20;

/// A directory with a repository and an image in it. Nothing else is touched.
pub struct Place {
    pub dir: TempDir,
    /// Where the repository's objects are seen as files.
    pub objects_in: PathBuf,
    /// How it is called, where it is no directory.
    pub url: Option<String>,
    /// Variables of the program.
    pub environment: Vec<(&'static str, String)>,
}

impl Place {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("deltapath-backup-").tempdir().expect("temp dir");
        let objects_in = dir.path().join("repository");
        Place { dir, objects_in, url: None, environment: Vec::new() }
    }

    /// A place of its own, with a copy of the repository in a directory.
    pub fn copy(&self) -> Place {
        let copy = Place::new();
        if self.repository().exists() {
            let mut command = Command::new("cp");
            command.arg("-a").arg(self.repository()).arg(copy.repository());
            assert!(command.status().expect("cp").success());
        }
        copy
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn repository(&self) -> PathBuf {
        self.objects_in.clone()
    }

    pub fn image(&self) -> PathBuf {
        self.path("image")
    }

    /// The image, made with a size where it is missing.
    pub fn open_image(&self, size: u64) -> File {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(self.image())
            .expect("open");
        file.set_len(size).expect("set the length");
        file
    }

    /// Makes the image with this size, and writes so many blocks of it.
    pub fn written(&self, size: u64, start: u64, blocks: u64, seed: u64) -> Image {
        let mut image = Image::default();
        image.write(&self.open_image(size), start, blocks, seed).expect("write");
        image
    }

    /// One with a backup of an image of this size, its id, and what the image holds.
    pub fn with_backup(size: u64) -> (Self, String, Image) {
        let place = Place::new();
        let image = place.written(size, 7, 90, 1);
        let id = place.full();
        (place, id, image)
    }

    /// A command line of the program, not started.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cbt-backup"));
        command
            .arg("--repository")
            .arg(self.url.as_ref().map_or(self.repository(), PathBuf::from))
            .args(arguments)
            .env_remove("CBT_BACKUP_REPOSITORY")
            .envs(self.environment.iter().cloned())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null());
        command
    }

    /// A backup of the image, not started.
    pub fn backup(&self, wish: &str, more: &[&str]) -> Command {
        let image = self.image();
        self.command(&[&[wish, "--volume", "v", "--device", arg(&image)], more].concat())
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("run cbt-backup")
    }

    /// Runs it, and expects it to succeed.
    pub fn ok(&self, arguments: &[&str]) -> Value {
        json(0, self.command(arguments))
    }

    /// Runs it, and expects it to fail with this exit code: what it says.
    pub fn fails(&self, code: i32, arguments: &[&str]) -> String {
        fails(code, self.command(arguments))
    }

    /// What was interrupted. A draft (`NAME#NUMBER`) is not gone on with.
    pub fn partials(&self) -> usize {
        let Ok(entries) = self.repository().join("partial").read_dir() else { return 0 };
        let names = entries.map(|entry| entry.expect("entry").file_name());
        names.filter(|name| !name.to_string_lossy().contains('#')).count()
    }

    /// Ends a backup once a part of it can be gone on with.
    pub fn interrupt(&self, mut running: Running, signal: nix::sys::signal::Signal) {
        testkit::until("there is a part", || {
            assert!(running.0.try_wait().expect("wait").is_none(), "it ends without a part");
            self.partials() > 0
        });
        running.signal(signal);
        let code = running.0.wait().expect("wait").code();
        assert!(code.is_none_or(|code| code == 130), "{code:?}");
        assert_eq!(self.partials(), 1);
    }

    /// A full backup of the image by its holes: its id.
    pub fn full(&self) -> String {
        id(&json(0, self.backup("full", &[])))
    }

    /// Restores a backup and compares it with a model: how long the restore took.
    pub fn restores(&self, id: &str, model: &Image, size: u64) -> Duration {
        let to = self.path("restored");
        let began = Instant::now();
        self.ok(&["restore", id, "--to", arg(&to), "--overwrite"]);
        let length = began.elapsed();
        assert_eq!(std::fs::metadata(&to).expect("restored").len(), size, "{id}");
        model.compare(&to, size, &base::Stop::default()).unwrap_or_else(|error| panic!("{id}: {error}"));
        length
    }

    /// The ids of all backups.
    pub fn list(&self) -> Vec<String> {
        self.ok(&["list"]).as_array().expect("a list").iter().map(id).collect()
    }

    /// The largest file of the repository: a pack with data.
    pub fn largest(&self) -> PathBuf {
        self.objects().into_iter().max_by_key(|path| path.metadata().expect("there").len()).expect("packs")
    }

    /// Every file of the repository, but for the lock.
    pub fn objects(&self) -> Vec<PathBuf> {
        fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(dir).expect("list") {
                let path = entry.expect("entry").path();
                match path.is_dir() {
                    true => walk(&path, found),
                    false => found.push(path),
                }
            }
        }
        let mut found = Vec::new();
        walk(&self.repository(), &mut found);
        found.retain(|path| path.file_name().is_some_and(|name| name != "lock"));
        found.sort();
        found
    }
}

pub fn id(backup: &Value) -> String {
    backup["id"].as_str().expect("an id").to_owned()
}

/// Runs a command, and expects it to end with this exit code and to print JSON.
pub fn json(code: i32, mut command: Command) -> Value {
    let output = command.args(["--output", "json"]).output().expect("run cbt-backup");
    assert_eq!(output.status.code(), Some(code), "{command:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Runs a command, and expects it to end with this exit code: what it says.
pub fn fails(code: i32, mut command: Command) -> String {
    let output = command.output().expect("run cbt-backup");
    let said = text(&output.stderr) + &text(&output.stdout);
    assert_eq!(output.status.code(), Some(code), "{command:?}: {said}");
    said
}

/// What a command said that has ended, with this exit code.
pub fn ended(code: i32, output: &Output) -> String {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    said
}

/// Changes a byte of a file; the second time it is as it was.
pub fn flip(path: &Path, at: usize) {
    let mut bytes = std::fs::read(path).expect("read");
    bytes[at] ^= 1;
    std::fs::write(path, bytes).expect("write");
}

/// Writes a file, in a directory that may not be there yet.
pub fn plant(path: &Path, content: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("mkdir");
    std::fs::write(path, content).expect("write");
}

pub fn arg(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A mount that does not outlive the test.
pub struct Mounted(pub PathBuf);

impl Mounted {
    /// Makes the directory and mounts there what `mount` makes of the arguments.
    pub fn at(path: PathBuf, arguments: &[&str]) -> Self {
        std::fs::create_dir_all(&path).expect("mkdir");
        let mounted = Command::new("mount").args(arguments).arg(&path).status();
        assert!(mounted.expect("mount").success(), "{arguments:?}");
        Mounted(path)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

/// A process that does not outlive the test.
pub struct Running(pub Child);

impl Running {
    pub fn start(mut command: Command) -> Self {
        Running(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start"))
    }

    /// Waits for its end, and reads what it says meanwhile.
    pub fn output(mut self) -> Output {
        let (mut out, mut errors) = (Vec::new(), Vec::new());
        let (stdout, stderr) = (self.0.stdout.take(), self.0.stderr.take());
        std::thread::scope(|scope| {
            scope.spawn(|| stdout.expect("piped").read_to_end(&mut out).expect("read"));
            stderr.expect("piped").read_to_end(&mut errors).expect("read");
        });
        Output { status: self.0.wait().expect("wait"), stdout: out, stderr: errors }
    }

    /// The exit code, where it ends in time.
    pub fn ends_within(&mut self, time: Duration) -> Option<i32> {
        let deadline = Instant::now() + time;
        while Instant::now() < deadline {
            if let Some(status) = self.0.try_wait().expect("wait") {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        None
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        testkit::signal(self.0.id(), signal);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A loop device, which goes with the value.
pub struct Loop(pub PathBuf);

impl Loop {
    pub fn of(path: &Path) -> Self {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(path).output().expect("losetup");
        assert!(output.status.success(), "{}", text(&output.stderr));
        Loop(text(&output.stdout).trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
