//! The commands of docs/backup.md that need no cluster, as they stand there.

use std::process::Command;

use files::pattern::Image;

use crate::tool::{MIB, Place, text};

#[test]
fn the_commands_of_the_page_work() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/backup.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let blocks = page.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    // A cluster has tests of its own.
    let script: String =
        blocks.filter(|block| !block.contains("kubectl") && !block.contains("run --pvc")).collect();
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
