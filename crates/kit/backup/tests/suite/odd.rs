//! Every command with odd paths, names, streams and rights, as tables: the exit code, the words, nothing left and nothing lost.

use std::os::unix::net::UnixListener;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use files::pattern::Image;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;

use crate::rights::{by_nobody, set_mode};
use crate::tool::{MIB, Place, Running, arg, text};

const SIZE: u64 = 20 * MIB;
/// What is no device and no image.
const WRONG: &str = "neither a block device nor a file";
const NO_FILE: &str = "No such file or directory";
const NO_PLACE: &str = "/dir/x/y cannot be written: its directory does not exist";
const NO_RIGHT: &str = "Permission denied";
/// A name that would clear a terminal and forge a line.
const NAME: &str = "a\nb\x1b[2J";

/// All that is in a place but for what the repository holds.
fn names(place: &Place) -> Vec<String> {
    let mut names = Vec::new();
    for dir in [place.dir.path().to_owned(), place.path("dir"), place.path("closed")] {
        let entries = dir.read_dir().expect("list").map(|entry| entry.expect("entry").path());
        names.extend(entries.map(|path| path.display().to_string()));
    }
    names.sort();
    names
}

/// Ends in time, as a command on a FIFO that nobody opens does not.
fn run(command: Command) -> Output {
    let line = format!("{command:?}");
    let mut running = Running::start(command);
    if running.ends_within(Duration::from_secs(20)).is_none() {
        running.signal(Signal::SIGKILL);
        panic!("{line} does not end: {:?}", running.output());
    }
    running.output()
}

/// A place with a backup and all that a path may be.
fn world() -> (Place, String, Image) {
    let (place, id, image) = Place::with_backup(SIZE);
    set_mode(place.dir.path(), 0o755);
    nix::unistd::mkfifo(&place.path("fifo"), Mode::from_bits_truncate(0o600)).expect("mkfifo");
    for dir in ["dir", "closed"] {
        std::fs::create_dir(place.path(dir)).expect("mkdir");
    }
    std::fs::write(place.path("dir/thesis.txt"), "mine").expect("write");
    std::os::unix::fs::symlink("loop", place.path("loop")).expect("symlink");
    std::fs::write(place.path("page.html"), "a page").expect("write");
    std::fs::write(place.path(NAME), vec![1; 4096]).expect("write");
    (place, id, image)
}

struct Row {
    arguments: Vec<String>,
    code: i32,
    words: &'static str,
    is_nobody: bool,
}

/// `@/` is the place, `ID` its backup.
fn table() -> Vec<Row> {
    let mut rows = Vec::new();
    let mut row = |code: i32, words: &'static str, line: &str| {
        let arguments = line.split(' ').map(str::to_owned).collect();
        rows.push(Row { arguments, code, words, is_nobody: false });
    };
    let full = "full --volume v --device @/image";
    // Paths.
    for path in ["@/fifo", "@/socket", "@/dir", "/dev/zero"] {
        for command in ["full --volume v --device", "auto --volume v --device", "verify ID --against"] {
            row(1, WRONG, &format!("{command} {path}"));
        }
        for more in ["", " --overwrite", " --onto-base ID"] {
            row(1, WRONG, &format!("restore ID --to {path}{more}"));
        }
    }
    for path in ["@/gone", "@/loop", "@/dir/x/y"] {
        row(1, "open", &format!("full --volume v --device {path}"));
        row(1, "open", &format!("full --volume v --repository @/new --device {path}"));
        row(1, "open", &format!("verify ID --against {path}"));
        row(1, "open", &format!("incremental --volume v --device {path}"));
    }
    row(1, WRONG, "incremental --volume v --device @/fifo");
    let cluster = "--namespace n --snapshot s --kubeconfig";
    for path in ["@/gone", "@/dir", "@/image"] {
        row(1, "kubeconfig", &format!("{full} {cluster} {path}"));
        row(1, "kubeconfig", &format!("run --pvc data --repository s3://b --kubeconfig {path}"));
    }
    row(1, NO_PLACE, "restore ID --to @/dir/x/y");
    row(1, "create /proc/x: ", "restore ID --to /proc/x");
    row(1, "symbolic link", "restore ID --to @/loop");
    row(1, "add --overwrite", "restore ID --to @/image");
    row(1, NO_FILE, "restore ID --to @/gone --onto-base ID");
    row(1, NO_PLACE, &format!("{full} --report @/dir/x/y"));
    row(1, "is not a file", &format!("{full} --report @/dir"));
    row(1, "is not a file", &format!("{full} --report @/fifo"));
    row(1, NO_PLACE, "show --html @/dir/x/y");
    for path in ["@/dir", "@/fifo", "/dev/null"] {
        row(1, "is not a file", &format!("show --html {path}"));
    }
    row(1, "a file that is not a socket is there", "mount ID --socket @/image");
    row(1, "a file that is not a socket is there", "mount ID --socket @/dir");
    for path in ["@/fifo", "@/loop", "/dev/null"] {
        row(1, "a file that is not a socket is there", &format!("mount ID --socket {path}"));
    }
    row(1, NO_FILE, "mount ID --socket @/dir/x/y");
    row(1, NO_FILE, "mount ID --socket /proc/x");
    row(1, "Address already in use", "mount ID --socket @/socket");
    let too_long = &format!("/{}", "y".repeat(150));
    row(1, "", &format!("mount ID --socket {too_long}"));
    for command in [
        "full --volume v --device @/image --snapshot s",
        "auto --volume v --device @/image --snapshot s",
        "incremental --volume v --device @/image --snapshot s",
        "show --target s",
    ] {
        for path in ["@/gone", "@/loop", "@/dir/x/y"] {
            row(1, "there is no socket of a CSI driver at", &format!("{command} --endpoint {path}"));
        }
        for path in ["@/dir", "@/image", "@/fifo", "/dev/null"] {
            row(1, "is not a socket", &format!("{command} --endpoint {path}"));
        }
        for value in ["unix://", "tcp://x", "http://x", too_long] {
            row(2, "--endpoint", &format!("{command} --endpoint {value}"));
        }
    }
    for command in
        ["list", "show", "verify", "prune", "restore latest --to @/new", "mount latest --socket @/new"]
    {
        row(1, "", &format!("{command} --repository @/fifo"));
        row(1, "the first backup makes it", &format!("{command} --repository @/gone"));
        row(1, "is not a repository", &format!("{command} --repository @/dir"));
    }
    row(1, "thesis.txt", &format!("{full} --repository @/dir"));
    row(1, "", &format!("{full} --repository @/image"));
    // Backups that are not there.
    for command in
        ["restore no --to @/new", "verify no", "show no", "mount no --socket @/new", "prune --remove no"]
    {
        row(1, "there is no backup no", command);
    }
    for command in
        ["restore latest --to @/new", "verify latest", "show latest", "mount latest --socket @/new"]
    {
        row(1, "no backup of other", &format!("{command} --volume other"));
    }
    row(1, "give --endpoint or --namespace", "incremental --volume v --device @/image");
    // What is wrong wherever it is given.
    row(2, "", "full --device @/image");
    row(2, "greater than 0", &format!("{full} --limit-rate 0"));
    row(2, "from 1 to 19", &format!("{full} --compression 0"));
    row(2, "from 1 to 19", &format!("{full} --compression -51"));
    row(2, "", "prune --keep-last 0");
    row(2, "1024", "mount latest --socket @/new --sector-size 1024");
    row(2, "nonsense", "nonsense");
    let odd = ["", NAME, "a\x1b[31mRED", "\u{7f}", "\u{9b}", &"x".repeat(513)];
    for name in odd {
        for line in [
            "full --device @/image --volume",
            "auto --device @/image --volume",
            "full --device @/image --volume v --snapshot",
            "incremental --device @/image --volume v --snapshot s --base",
            "run --pvc data --volume",
        ] {
            let mut arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            arguments.push(name.to_owned());
            rows.push(Row { arguments, code: 2, words: "", is_nobody: false });
        }
    }
    // A name of a file may be anything, and is shown on one line.
    let path = format!("@/{NAME}");
    for (code, words, before) in [
        (1, "a\\nb\\u{1b}[2J", &["verify", "ID", "--against"][..]),
        (1, "a\\nb\\u{1b}[2J", &["restore", "ID", "--to"]),
        (1, "a\\nb\\u{1b}[2J", &["list", "--repository"]),
    ] {
        let arguments = before.iter().copied().chain([path.as_str()]).map(str::to_owned).collect();
        rows.push(Row { arguments, code, words, is_nobody: false });
    }
    // Rights.
    let mut row = |line: &str| {
        let arguments = line.split(' ').map(str::to_owned).collect();
        rows.push(Row { arguments, code: 1, words: NO_RIGHT, is_nobody: true });
    };
    for command in [
        "list",
        "show",
        "verify",
        "prune",
        "prune --keep-last 1 --dry-run",
        "restore latest --to @/new",
        "mount latest --socket @/new",
        "full --volume v --device @/image",
        "full --volume v --device @/page.html --report @/new",
        "auto --volume v --device @/page.html",
        "incremental --volume v --device @/page.html",
        "full --volume v --device @/page.html --repository @/closed/new",
    ] {
        row(command);
    }
    rows
}

#[test]
fn what_is_odd_is_refused_and_nothing_is_made_or_lost() {
    let (place, id, image) = world();
    let _listener = UnixListener::bind(place.path("socket")).expect("bind");
    let before = names(&place);
    let objects = place.objects();
    let is_root = nix::unistd::geteuid().is_root();
    for Row { arguments, code, words, is_nobody } in table() {
        if is_nobody && !is_root {
            continue;
        }
        let at = |argument: &String| match argument.strip_prefix("@/") {
            Some(name) => arg(&place.path(name)).to_owned(),
            None if argument == "ID" => id.clone(),
            None => argument.clone(),
        };
        let arguments: Vec<String> = arguments.iter().map(at).collect();
        for output in ["text", "json"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_cbt-backup"));
            command.env("CBT_BACKUP_REPOSITORY", place.repository());
            command.args(["--output", output]).args(&arguments);
            if is_nobody {
                command = by_nobody(&command);
            }
            let ended = run(command);
            let (out, said) = (text(&ended.stdout), text(&ended.stderr));
            assert_eq!(ended.status.code(), Some(code), "{arguments:?}: {said}");
            assert!((said.clone() + &out).contains(words), "{arguments:?}: {said}{out}, instead of {words}");
            let is_plain = |text: &str| !text.chars().any(|c| c.is_control() && c != '\n');
            assert!(code == 2 || is_plain(&said) && is_plain(&out), "{arguments:?}: {said:?} {out:?}");
            // One document, whatever comes of a command.
            if output == "json" {
                let told: serde_json::Value = serde_json::from_slice(&ended.stdout).expect("JSON");
                assert!(told["error"].is_string() || told["differing"].is_array(), "{arguments:?}: {told}");
            }
            assert_eq!(names(&place), before, "{arguments:?}");
            assert_eq!(place.objects(), objects, "{arguments:?}");
        }
    }
    assert_eq!(std::fs::read_to_string(place.path("page.html")).expect("a user's file"), "a page");
    place.restores(&id, &image, SIZE);
}

#[test]
fn long_names_are_cut_in_tables() {
    let place = Place::new();
    place.open_image(MIB);
    let device = place.image();
    let volume = "y".repeat(300);
    place.ok(&["full", "--device", arg(&device), "--volume", &volume]);
    let listed = text(&place.run(&["list"]).stdout);
    assert!(listed.lines().all(|line| line.chars().count() < 140), "{listed}");
    assert!(place.ok(&["list", "--volume", &volume]).as_array().is_some_and(|list| list.len() == 1));
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    Read,
    /// The program is started without it.
    Closed,
    /// Its reader is gone.
    Broken,
    Full,
}

const STREAMS: [Stream; 4] = [Stream::Read, Stream::Closed, Stream::Broken, Stream::Full];

impl Stream {
    fn stdio(self) -> Stdio {
        match self {
            Stream::Read => Stdio::piped(),
            Stream::Closed => Stdio::null(),
            Stream::Broken => std::io::pipe().expect("a pipe").1.into(),
            Stream::Full => std::fs::File::options().write(true).open("/dev/full").expect("open").into(),
        }
    }
}

/// A command that has stored its backup, or printed all that its reader wanted, has not failed.
#[test]
fn streams_that_nobody_takes_end_no_work() {
    let (place, _, image) = Place::with_backup(SIZE);
    let paths = ["image", "out", "page"].map(|name| place.path(name));
    let [device, to, page] = paths.each_ref().map(|path| arg(path));
    // The exit code, and that where standard output is full: what a command prints alone is lost then.
    let kubeconfig = place.path("kubeconfig");
    std::fs::write(&kubeconfig, "").expect("write");
    let run = ["run", "--pvc", "data", "--kubeconfig", arg(&kubeconfig)];
    let bucket = Place { url: Some("s3://b".into()), ..Place::new() };
    let commands: [(&[&str], i32, i32); 14] = [
        (&run, 1, 1),
        (&["full", "--volume", "v", "--device", device], 0, 0),
        (&["auto", "--volume", "v", "--device", device], 0, 0),
        (&["restore", "latest", "--to", to, "--overwrite"], 0, 0),
        (&["prune", "--keep-last", "2"], 0, 0),
        (&["prune", "--keep-last", "1", "--dry-run"], 0, 0),
        (&["list"], 0, 1),
        (&["show"], 0, 1),
        (&["show", "latest", "--html", page], 0, 1),
        (&["verify"], 0, 1),
        (&["verify", "latest", "--against", device], 0, 1),
        (&["restore", "no", "--to", to, "--overwrite"], 1, 1),
        (&["incremental", "--volume", "v", "--device", device], 1, 1),
        (&["prune", "--keep-last", "0"], 2, 2),
    ];
    for (arguments, code, code_if_full) in commands {
        for (out, err) in STREAMS.iter().flat_map(|out| STREAMS.map(|err| (*out, err))) {
            let outputs = ["text", "json"].into_iter().take(if err == Stream::Read { 2 } else { 1 });
            for output in outputs {
                let of = if arguments == run { &bucket } else { &place };
                let program = of.command(&[arguments, &["--output", output]].concat());
                let closed = [(out, ">&-"), (err, "2>&-")];
                let closed = closed.map(|(of, how)| if of == Stream::Closed { how } else { "" }).join(" ");
                let mut command = Command::new("sh");
                command.args(["-c", &format!("exec \"$@\" {closed}"), "sh"]);
                command.arg(program.get_program()).args(program.get_args());
                let ended = command.stdout(out.stdio()).stderr(err.stdio()).output().expect("run");
                let said = text(&ended.stderr);
                let what = format!("{arguments:?}, {output}, {out:?} and {err:?}: {said}");
                let wanted = if out == Stream::Full { code_if_full } else { code };
                assert_eq!(ended.status.code(), Some(wanted), "{what}");
                assert!(!said.contains("panicked") && !said.contains("Broken pipe"), "{what}");
                if err == Stream::Read && code == 0 {
                    let lost = usize::from(out == Stream::Full);
                    assert_eq!(said.matches("No space left on device").count(), lost, "{what}");
                }
            }
        }
    }
    place.restores("latest", &image, SIZE);
    image.compare(&paths[1], SIZE, &base::Stop::default()).expect("restored");
    assert_eq!(place.list().len(), 2, "those that prune kept");
}
