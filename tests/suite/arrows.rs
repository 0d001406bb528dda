//! The arrows between the rooms point down only (ARCHITECTURE.md, "Rooms").

use std::path::{Path, PathBuf};

/// The rooms a room may use besides itself. Store, pool and cbt do not know each other.
const MAY_USE: [(&str, &[&str]); 11] = [
    ("base", &[]),
    ("sys", &["base"]),
    ("store", &["base", "sys"]),
    ("pool", &["base", "sys"]),
    ("cbt", &["base", "sys"]),
    ("driver", &["base", "sys", "store", "pool", "cbt"]),
    ("csi", &["base", "sys", "store", "pool", "cbt", "driver"]),
    ("http", &["base", "driver"]),
    ("client", &["base", "csi"]),
    ("cli", &["base", "sys", "store", "pool", "cbt", "driver", "csi", "client", "http"]),
    // Compiled for tests and cargo-fuzz alone.
    ("fuzz", &["base", "store", "cbt", "driver", "csi"]),
];

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

/// The rooms that a line of code names as `crate::room`, in a `use` or in a path.
fn rooms_named(line: &str) -> Vec<String> {
    let code = line.split("//").next().unwrap_or("");
    let names = |rest: &str| -> Vec<String> {
        let list = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or(""),
            None => rest,
        };
        let word =
            |part: &str| part.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        match rest.starts_with('{') {
            true => list.split(',').map(word).collect(),
            false => vec![word(list)],
        }
    };
    code.split("crate::").skip(1).flat_map(names).collect()
}

fn violations(room: &str, text: &str) -> Vec<String> {
    let (_, allowed) = MAY_USE.iter().find(|(name, _)| *name == room).expect("a known room");
    let is_room = |name: &String| MAY_USE.iter().any(|(room, _)| room == name);
    text.lines()
        .flat_map(|line| rooms_named(line).into_iter().map(move |name| (line, name)))
        .filter(|(_, name)| is_room(name) && name != room && !allowed.contains(&name.as_str()))
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
    assert_eq!(violations("cbt", "use crate::driver::Driver;").len(), 1);
    assert_eq!(violations("store", "use crate::{base::BlockSize, pool};").len(), 1);
    assert_eq!(violations("pool", "    let x = crate::cbt::zero_hash(size);").len(), 1);
    assert_eq!(violations("cbt", "use crate::base::{BlockRange, BlockSize}; // crate::driver").len(), 0);
}

#[test]
fn unsafe_stands_in_sys_alone() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    for file in files.iter().filter(|file| !file.starts_with(src.join("sys"))) {
        let text = std::fs::read_to_string(file).expect("read");
        assert!(!text.contains("allow(unsafe_code)"), "{} allows unsafe code", file.display());
    }
}
