//! The commands of docs/backup.md that need no cluster, as they stand there.

use std::process::Command;

use files::pattern::Image;
use testkit::pages;

use crate::tool::{MIB, Place, text};

#[test]
fn the_commands_of_the_page_work() {
    let page = pages::read("docs/backup.md");
    // A cluster has tests of its own.
    let needs_a_cluster = |block: &&str| block.contains("kubectl") || block.contains("run --pvc");
    let blocks = pages::blocks(&page, "sh").into_iter().filter(|block| !needs_a_cluster(block));
    let script = blocks.collect::<Vec<_>>().join("\n");
    assert_eq!(script.matches("cbt-backup ").count(), 10, "{script}");
    let place = Place::new();
    let mut image = Image::default();
    let disk = std::fs::File::create(place.path("disk.img")).expect("create");
    disk.set_len(64 * MIB).expect("set the length");
    image.write(&disk, 7, 900, 1).expect("write");
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_cbt-backup")).parent().expect("a directory");
    let path = std::env::var("PATH").expect("PATH");
    let output = Command::new("bash")
        .args(["-euxc", &script])
        .current_dir(place.dir.path())
        .env("PATH", format!("{}:{path}", program.display()))
        .output()
        .expect("bash");
    assert!(output.status.success(), "{}", text(&output.stderr));
    image.compare(&place.path("restored.img"), 64 * MIB, &base::Stop::default()).expect("equal");
    let html = std::fs::read_to_string(place.path("disk.html")).expect("a page");
    assert!(html.contains("<th>Backup</th>"), "{html}");
    let said = text(&output.stdout);
    assert!(said.contains("all sound") && said.contains("compared, equal"), "{said}");
}
