//! The arrows inside the driver's package point down only (ARCHITECTURE.md, "Rooms"). Those between members of the
//! workspace are Cargo's to enforce; which of them a room may use is seen here.

use std::path::{Path, PathBuf};

/// The rooms, and the members and crates, that a room may use besides itself; everybody may use `base` and `files`.
/// Store, pool and cbt do not know each other.
const MAY_USE: [(&str, &[&str]); 8] = [
    ("sys", &[]),
    ("store", &["sys"]),
    ("pool", &["sys"]),
    ("driver", &["sys", "store", "pool", "cbt"]),
    ("csi", &["sys", "store", "pool", "cbt", "driver", "proto", "serve", "tonic", "prost"]),
    ("http", &["driver", "serve", "axum"]),
    ("cli", &["sys", "store", "pool", "cbt", "driver", "csi", "http", "proto", "csi_client", "clap"]),
    // Compiled for tests and cargo-fuzz alone.
    ("fuzz", &["store", "cbt", "driver", "csi"]),
];

/// Members and crates that not every room may use.
const OUTSIDE: [&str; 8] = ["cbt", "proto", "serve", "csi_client", "clap", "tonic", "prost", "axum"];

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).expect("read_dir") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The rooms that a line of code names as `crate::room`, in a `use` or in a path, and the crates it names.
fn named(line: &str) -> Vec<String> {
    let code = line.split("//").next().unwrap_or("");
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let word = |part: &str| part.trim().chars().take_while(|c| is_word(*c)).collect::<String>();
    let rooms = code.split("crate::").skip(1).flat_map(|rest| match rest.strip_prefix('{') {
        Some(list) => list.split('}').next().unwrap_or("").split(',').map(word).collect(),
        None => vec![word(rest)],
    });
    let crates = OUTSIDE.into_iter().filter(|name| {
        let path = format!("{name}::");
        code.match_indices(&path).any(|(at, _)| !code[..at].ends_with(|c| is_word(c) || c == ':'))
    });
    rooms.chain(crates.map(str::to_owned)).collect()
}

fn violations(room: &str, text: &str) -> Vec<String> {
    let (_, allowed) = MAY_USE.iter().find(|(name, _)| *name == room).expect("a known room");
    let is_known =
        |name: &String| MAY_USE.iter().any(|(room, _)| room == name) || OUTSIDE.contains(&name.as_str());
    text.lines()
        .flat_map(|line| named(line).into_iter().map(move |name| (line, name)))
        .filter(|(_, name)| is_known(name) && name != room && !allowed.contains(&name.as_str()))
        .map(|(line, name)| format!("{room} uses {name}: {}", line.trim()))
        .collect()
}

#[test]
fn arrows_between_rooms_point_down() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    for entry in std::fs::read_dir(&src).expect("src") {
        let path = entry.expect("entry").path();
        if !path.is_dir() {
            continue;
        }
        let room = path.file_name().expect("a name").to_string_lossy().into_owned();
        assert!(
            MAY_USE.iter().any(|(name, _)| *name == room),
            "{room} is a room without arrows: say its arrows here"
        );
        let mut files = Vec::new();
        sources(&path, &mut files);
        assert!(!files.is_empty(), "{room} is empty");
        for file in files {
            wrong.extend(violations(&room, &std::fs::read_to_string(file).expect("read")));
        }
    }
    assert!(wrong.is_empty(), "arrows that point up:\n{}", wrong.join("\n"));
}

#[test]
fn an_arrow_that_points_up_would_be_seen() {
    assert_eq!(violations("sys", "use crate::driver::Driver;").len(), 1);
    assert_eq!(violations("store", "use crate::{sys::mount, pool};").len(), 1);
    assert_eq!(violations("pool", "    let x = cbt::zero_hash(size);").len(), 1);
    assert_eq!(violations("store", "#[derive(clap::ValueEnum)]").len(), 1);
    assert_eq!(violations("pool", "use base::{BlockRange, BlockSize}; // crate::driver").len(), 0);
}

#[test]
fn unsafe_stands_in_sys_alone() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let src = root.join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    for member in std::fs::read_dir(root.join("crates")).expect("crates") {
        let member = member.expect("entry").path();
        // For tests alone.
        if !member.ends_with("testkit") {
            sources(&member.join("src"), &mut files);
        }
    }
    for file in files.iter().filter(|file| !file.starts_with(src.join("sys"))) {
        let text = std::fs::read_to_string(file).expect("read");
        assert!(!text.contains("allow(unsafe_code)"), "{} allows unsafe code", file.display());
    }
}

/// The driver runs with all rights: what it links is what it needs.
#[test]
fn the_driver_links_no_code_of_the_other_programs() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = std::process::Command::new(cargo)
        .args(["tree", "--locked", "--package", "deltapath", "--edges", "normal", "--prefix", "none"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo tree");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8(output.stdout).expect("utf-8");
    let linked: Vec<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(linked.contains(&"tonic"), "{tree}");
    for unwanted in ["kube", "k8s-openapi", "regex", "quick-junit", "serde-saphyr", "object_store"] {
        assert!(!linked.contains(&unwanted), "the driver links {unwanted}");
    }
}
