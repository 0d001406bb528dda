//! Promise: the library can be published, with the messages that it is compiled from and nothing else of this workspace.

use std::path::Path;
use std::process::Command;

/// The files of a package, unpacked below `dir`.
fn unpacked(dir: &Path, package: &str) -> std::path::PathBuf {
    let file = dir.join("package").join(format!("{package}.crate"));
    testkit::ok(Command::new("tar").arg("-xzf").arg(&file).arg("-C").arg(dir));
    dir.join(package)
}

#[test]
fn it_is_packaged_with_its_messages_alone() {
    let dir = tempfile::tempdir().expect("temp dir");
    testkit::ok(
        Command::new(env!("CARGO"))
            .args(["package", "--locked", "--offline", "--no-verify", "--allow-dirty", "--target-dir"])
            .arg(dir.path())
            .args(["--package", "deltapath-proto", "--package", "snapshot-metadata-client"])
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")),
    );

    let version = env!("CARGO_PKG_VERSION");
    let library = unpacked(dir.path(), &format!("snapshot-metadata-client-{version}"));
    let messages = unpacked(dir.path(), &format!("deltapath-proto-{version}"));
    for file in ["src/lib.rs", "README.md", "LICENSE"] {
        assert!(library.join(file).is_file(), "{file} is not in the package");
    }
    for file in ["src/lib.rs", "build.rs", "LICENSE", "proto/csi.proto", "proto/snapshotmetadata.proto"] {
        assert!(messages.join(file).is_file(), "{file} is not in the package");
    }
    // What a registry shows, and where it is compiled from: no path of this workspace.
    let manifest = std::fs::read_to_string(library.join("Cargo.toml")).expect("Cargo.toml");
    for part in [
        "description = ",
        "readme = \"README.md\"",
        "license = \"Apache-2.0\"",
        "rust-version = ",
        "keywords = ",
    ] {
        assert!(manifest.contains(part), "{part}: {manifest}");
    }
    let (_, dependencies) = manifest.split_once("[dependencies").expect("dependencies");
    assert!(!dependencies.contains("path = \"..") && dependencies.contains("deltapath-proto"), "{manifest}");
    let ours = dependencies.matches("deltapath").count();
    assert_eq!(ours, 1, "it needs no other package of this workspace: {manifest}");
}
