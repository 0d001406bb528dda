//! The examples in other languages: they start the mock and list a delta.

use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::pages;

fn example(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "examples", name].iter().collect()
}

fn python() -> PathBuf {
    let python = Path::new(testkit::HOME).join(".deps/python/bin/python3");
    assert!(python.exists(), "needs Python with gRPC: run `make test-deps`");
    python
}

fn passes(mut command: Command) {
    let output = command.env("CBT_LAB", env!("CARGO_BIN_EXE_cbt-lab")).output().expect("run");
    let told =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}");
}

#[test]
fn the_example_in_go_lists_a_delta() {
    crate::needs("Go");
    let mut test = Command::new("go");
    test.args(["test", "-count=1", "./..."]).current_dir(example("go"));
    passes(test);
}

#[test]
fn the_example_in_python_lists_a_delta() {
    crate::needs("Python with gRPC");
    let mut test = Command::new(python());
    test.arg("test_delta.py").current_dir(example("python")).env("PYTHONDONTWRITEBYTECODE", "1");
    test.env("CSI_PROTO_DIR", Path::new(testkit::HOME).join("proto"));
    passes(test);
}

/// The chosen commands of docs/tutorial-first-delta.md, and what the page says that they print. What they install is there
/// already.
fn of_the_page(chosen: impl Fn(&str) -> bool) -> (String, String) {
    let page = pages::read("docs/tutorial-first-delta.md");
    let (mut script, mut printed, mut is_chosen) = (String::new(), String::new(), false);
    for block in page.split("\n```").skip(1).step_by(2) {
        let (language, content) = block.split_once('\n').expect("a block");
        match language {
            "sh" => {
                is_chosen = !content.contains("pip install") && chosen(content);
                script += if is_chosen { content } else { "" };
                script.push('\n');
            }
            "text" if is_chosen => printed += &format!("{content}\n"),
            _ => {}
        }
    }
    assert!(!printed.is_empty());
    (script, printed)
}

fn prints(script: &str, printed: &str) {
    let root = Path::new(testkit::HOME);
    let programs = Path::new(env!("CARGO_BIN_EXE_cbt-lab")).parent().expect("a directory");
    let python = root.join(".deps/python/bin");
    let path = std::env::var("PATH").expect("PATH");
    let path = format!("{}:{}:{path}", programs.display(), python.display());
    let mut bash = Command::new("bash");
    // Also where a command fails, no mock is left.
    let script = format!("trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}");
    bash.args(["-euc", &script]).current_dir(root).env("PATH", path).env("PYTHONDONTWRITEBYTECODE", "1");
    let output = bash.output().expect("bash");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), printed, "{told}");
}

#[test]
fn the_first_delta_in_python_is_as_its_page_says() {
    crate::needs("Python with gRPC");
    python();
    let (script, printed) = of_the_page(|commands| !commands.contains("go run"));
    prints(&script, &printed);
}

#[test]
fn the_first_delta_in_go_is_as_its_page_says() {
    crate::needs("Go");
    let (script, printed) = of_the_page(|commands| !commands.contains("python3"));
    prints(&script, &printed);
    // It resumes as the one in Python does.
    let tuples = "--tuples-per-message 100";
    assert!(script.contains(tuples), "{script}");
    let cut = script.replace(tuples, &format!("{tuples} --fault cut:after=1,first=1"));
    prints(&cut, &format!("Unavailable: continues at byte 6692864\n{printed}"));
}

/// The page shows lines of the client as they are, and says how many there are.
#[test]
fn the_page_of_the_first_delta_shows_the_client() {
    let page = pages::read("docs/tutorial-first-delta.md");
    let client = pages::read("crates/kit/lab/examples/python/first_delta.py");
    let excerpts = pages::blocks(&page, "python");
    assert!(!excerpts.is_empty());
    for excerpt in excerpts {
        assert!(client.contains(excerpt), "not in the client:\n{excerpt}");
    }
    let in_go = pages::read("crates/kit/lab/examples/go/first_delta/main.go");
    let lines = |client: &str| client.lines().filter(|line| !line.is_empty()).count();
    assert!(lines(&client) <= 60, "{} lines", lines(&client));
    let counts =
        format!("{} lines of Python, or {} of Go, without empty ones", lines(&client), lines(&in_go));
    assert!(page.contains(&counts), "the page does not say {counts:?}");
}
