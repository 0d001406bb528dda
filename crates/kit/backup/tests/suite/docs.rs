//! The commands of docs/backup.md that need no cluster, as they stand there.

use std::process::Command;

use files::pattern::Image;
use testkit::pages;

use crate::tool::{MIB, Place, text};

/// What asks a cluster gets as far as the API server, by its own name and as a plugin of kubectl.
#[test]
fn the_commands_for_a_cluster_are_whole() {
    let page = pages::read("docs/backup.md");
    let section = pages::section(&page, "A claim of a cluster");
    let script = pages::blocks(section, "sh").join("\n");
    let commands = script.lines().filter(|line| line.contains("cbt run") || line.contains("cbt-backup run"));
    let inline = pages::quoted(section).filter(|code| code.starts_with("kubectl cbt "));
    assert_eq!((commands.count(), inline.collect::<Vec<_>>()), (2, Vec::<&str>::new()), "{section}");
    let place = Place::new();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_cbt-backup"));
    std::os::unix::fs::symlink(program, place.path("kubectl-cbt")).expect("a link");
    let path = std::env::var("PATH").expect("PATH");
    let kubectl = "kubectl() { if [ \"$1\" = cbt ]; then shift; kubectl-cbt \"$@\"; fi; }\n";
    let output = Command::new("bash")
        .args(["-c", &[kubectl, &script].concat()])
        .current_dir(place.dir.path())
        .env(
            "PATH",
            format!(
                "{}:{}:{path}",
                place.dir.path().display(),
                program.parent().expect("a directory").display()
            ),
        )
        .env("KUBECONFIG", place.path("none"))
        .env_remove("CBT_BACKUP_REPOSITORY")
        .env_remove("AWS_ACCESS_KEY_ID")
        .output()
        .expect("bash");
    let said = text(&output.stderr);
    assert_eq!(said.matches("no way to the Kubernetes API server").count(), 2, "{said}");
    assert!(
        said.contains("AWS_ACCESS_KEY_ID") && !said.contains("--repository"),
        "the list asks the bucket: {said}"
    );
}

#[test]
fn the_commands_of_the_page_work() {
    let page = pages::read("docs/backup.md");
    // A cluster has tests of its own, and not every kernel has NBD.
    let is_left_out =
        |block: &&str| ["kubectl", "run --pvc", "nbd-client"].iter().any(|word| block.contains(word));
    let blocks = pages::blocks(&page, "sh").into_iter().filter(|block| !is_left_out(block));
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
    let html = std::fs::read_to_string(place.path("history.html")).expect("a page");
    assert!(html.contains("<th>Backup</th>"), "{html}");
    let said = text(&output.stdout);
    assert!(said.contains("all sound") && said.contains("compared, equal"), "{said}");
}
