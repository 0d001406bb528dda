//! A layer of the driver's package uses only layers below it (ARCHITECTURE.md, "Members and layers"), and only the members
//! of the workspace that it may use. Cargo enforces the dependencies between members.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use testkit::files_below;

/// For each layer, the layers, members and crates that it may use. Every layer may use itself, `base` and `files`. Store,
/// pool and cbt must not use each other.
const MAY_USE: [(&str, &[&str]); 8] = [
    ("sys", &[]),
    ("store", &["sys"]),
    ("pool", &["sys"]),
    ("driver", &["sys", "store", "pool", "cbt"]),
    ("csi", &["sys", "store", "pool", "cbt", "driver", "proto", "serve", "tonic", "prost"]),
    ("http", &["driver", "serve", "axum"]),
    // The log is one of `serve`.
    (
        "cli",
        &["sys", "store", "pool", "cbt", "driver", "csi", "http", "proto", "csi_client", "serve", "clap"],
    ),
    // Compiled only for tests and cargo-fuzz.
    ("fuzz", &["store", "cbt", "driver", "csi"]),
];

/// Members and crates that not every layer may use.
const OUTSIDE: [&str; 8] = ["cbt", "proto", "serve", "csi_client", "clap", "tonic", "prost", "axum"];

/// The layers that a line of code names as `crate::layer`, in a `use` or in a path, and the crates it names.
fn named(line: &str) -> Vec<String> {
    let code = line.split("//").next().unwrap_or("");
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let word = |part: &str| part.trim().chars().take_while(|c| is_word(*c)).collect::<String>();
    let layers = code.split("crate::").skip(1).flat_map(|rest| match rest.strip_prefix('{') {
        Some(list) => list.split('}').next().unwrap_or("").split(',').map(word).collect(),
        None => vec![word(rest)],
    });
    let crates = OUTSIDE.into_iter().filter(|name| {
        let path = format!("{name}::");
        code.match_indices(&path).any(|(at, _)| !code[..at].ends_with(|c| is_word(c) || c == ':'))
    });
    layers.chain(crates.map(str::to_owned)).collect()
}

fn violations(layer: &str, text: &str) -> Vec<String> {
    let (_, allowed) = MAY_USE.iter().find(|(name, _)| *name == layer).expect("a known layer");
    let is_known =
        |name: &String| MAY_USE.iter().any(|(layer, _)| layer == name) || OUTSIDE.contains(&name.as_str());
    text.lines()
        .flat_map(|line| named(line).into_iter().map(move |name| (line, name)))
        .filter(|(_, name)| is_known(name) && name != layer && !allowed.contains(&name.as_str()))
        .map(|(line, name)| format!("{layer} uses {name}: {}", line.trim()))
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
        let layer = path.file_name().expect("a name").to_string_lossy().into_owned();
        assert!(MAY_USE.iter().any(|(name, _)| *name == layer), "MAY_USE has no entry for the layer {layer}");
        let files = files_below(&path, "rs");
        assert!(!files.is_empty(), "{layer} is empty");
        for file in files {
            wrong.extend(violations(&layer, &std::fs::read_to_string(file).expect("read")));
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

/// The modules of the driver that a file names as `crate::driver::..`, each as far as it is a file or a folder.
fn used(text: &str, modules: &BTreeSet<String>) -> BTreeSet<String> {
    let code: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let code = code.join("\n");
    let code = code.split("#[cfg(test)]").next().unwrap_or("");
    let mut found = BTreeSet::new();
    for rest in code.split("crate::driver::").skip(1) {
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(rest.len());
        let (path, behind) = rest.split_at(end);
        let list = behind.strip_prefix('{').map_or("", |list| list.split('}').next().unwrap_or(""));
        for last in list.split(',') {
            let path = format!("{path}{}", last.trim());
            let mut words: Vec<&str> = path.split("::").filter(|word| !word.is_empty()).collect();
            while !words.is_empty() && !modules.contains(&words.join("/")) {
                words.pop();
            }
            found.insert(words.join("/"));
        }
    }
    found
}

/// Each module of a layer with the modules that it uses. A file `mod.rs` is the module of its folder.
fn arrows(files: &[(PathBuf, String)]) -> BTreeMap<String, BTreeSet<String>> {
    let name = |path: &Path| {
        let name = path.with_extension("").to_string_lossy().into_owned();
        name.strip_suffix("/mod").map(str::to_owned).unwrap_or(name)
    };
    let modules: BTreeSet<String> = files.iter().map(|(path, _)| name(path)).collect();
    let of = |(path, text): &(PathBuf, String)| {
        let own = name(path);
        let used = used(text, &modules).into_iter().filter(|used| *used != own).collect();
        (own, used)
    };
    files.iter().map(of).collect()
}

/// The same for the folders and files directly below the layer.
fn rooms(arrows: &BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    let room = |name: &str| name.split('/').next().unwrap_or(name).to_owned();
    let mut rooms = BTreeMap::<String, BTreeSet<String>>::new();
    for (name, used) in arrows {
        let used = used.iter().map(|used| room(used)).filter(|used| *used != room(name));
        rooms.entry(room(name)).or_default().extend(used);
    }
    rooms
}

/// The modules that use each other in a circle, or use such a module.
fn circles(mut arrows: BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    loop {
        let left: BTreeSet<String> = arrows.keys().cloned().collect();
        let before = arrows.len();
        arrows.retain(|_, used| {
            used.retain(|name| left.contains(name));
            !used.is_empty()
        });
        if arrows.len() == before {
            return arrows;
        }
    }
}

/// The largest layer has no circles of folders either. Its own file and those of its folders export what is in them;
/// nothing inside uses it by that name.
#[test]
fn folders_of_the_driver_use_each_other_in_no_circle() {
    let layer = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/driver");
    let files = files_below(&layer, "rs");
    let read = |path: &Path| std::fs::read_to_string(path).expect("read");
    let files: Vec<_> = files
        .into_iter()
        .filter(|path| *path != layer.join("mod.rs") && !path.ends_with("tests.rs"))
        .map(|path| (path.strip_prefix(&layer).expect("below it").to_owned(), read(&path)))
        .collect();
    let arrows = arrows(&files);
    assert!(
        arrows["start"].contains("node/used") && arrows["node/used"].contains("volumes/make"),
        "{arrows:?}"
    );
    let folders: BTreeSet<&str> = arrows.keys().filter_map(|name| Some(name.rsplit_once('/')?.0)).collect();
    for (name, used) in &arrows {
        for folder in used.iter().filter(|used| used.is_empty() || folders.contains(used.as_str())) {
            // A file with a folder for its tests.
            let holds_more = folder == "snapshots/queue";
            assert!(holds_more && !name.starts_with(folder.as_str()), "{name} uses the folder `{folder}`");
        }
    }
    let circles = circles(rooms(&arrows));
    assert!(circles.is_empty(), "a circle: {circles:#?}");
}

#[test]
fn a_circle_of_folders_would_be_seen() {
    let files = |a: &str| {
        [
            ("a.rs", a),
            ("b/mod.rs", "mod x;"),
            ("b/x.rs", "use crate::driver::a::A;"),
            ("c.rs", "use crate::driver::b::{\n    x::X,\n};"),
        ]
        .map(|(path, text)| (PathBuf::from(path), text.to_owned()))
    };
    assert!(circles(rooms(&arrows(&files("use crate::store; // crate::driver::c")))).is_empty());
    for closes in
        ["use crate::driver::{d, c};", "fn f() -> crate::driver::c::C;", "use crate::driver::b::x::X;"]
    {
        assert!(!circles(rooms(&arrows(&files(closes)))).is_empty(), "{closes}");
    }
    assert!(arrows(&files("use crate::driver::Error;"))["a"].contains(""), "the layer's own file");
}

#[test]
fn unsafe_stands_in_sys_and_the_handler_of_signals_alone() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let src = root.join("src");
    let mut files = files_below(&src, "rs");
    let members = |folder: &str| std::fs::read_dir(root.join(folder)).expect("a folder of members");
    for member in members("crates").chain(members("crates/kit")) {
        let member = member.expect("entry").path();
        // Only for tests.
        if !member.ends_with("testkit") && member.join("src").is_dir() {
            files.extend(files_below(&member.join("src"), "rs"));
        }
    }
    let may = [src.join("sys"), root.join("crates/shell/src/signals.rs")];
    for file in files.iter().filter(|file| !may.iter().any(|place| file.starts_with(place))) {
        let text = std::fs::read_to_string(file).expect("read");
        for word in ["allow(unsafe_code", "expect(unsafe_code"] {
            assert!(!text.contains(word), "{} has {word}", file.display());
        }
    }
}

/// The driver runs as root, so it must link only what it needs.
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
