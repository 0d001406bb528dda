//! How far a command is: a bar on a terminal, lines elsewhere.

use std::process::{Command, Stdio};

use crate::tool::{BLOCK, MIB, Place, Running, text};

/// 13 MiB at 1 MiB a second: there is a line every 10 seconds.
fn slow(place: &Place) -> Command {
    place.written(26 * MIB, 100, 13 * MIB / BLOCK, 1);
    place.backup("full", &["--limit-rate", "1Mi", "--output", "json"])
}

/// The same command on a terminal of its own: what that shows.
fn on_a_terminal(command: &Command) -> Command {
    let quoted = |word: &std::ffi::OsStr| format!("'{}'", word.to_str().expect("UTF-8"));
    let line: Vec<String> =
        std::iter::once(command.get_program()).chain(command.get_args()).map(quoted).collect();
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line.join(" "), "/dev/null"]);
    script.env("TERM", "xterm").env_remove("NO_COLOR").stdin(Stdio::null());
    script
}

#[test]
fn a_terminal_has_a_bar_and_a_log_has_lines() {
    let (seen, logged) = (Place::new(), Place::new());
    let on_terminal = Running::start(on_a_terminal(&slow(&seen)));
    let in_log = Running::start(slow(&logged));
    let outputs = [on_terminal, in_log].map(Running::output);
    let [on_terminal, in_log] = &outputs;
    assert!(on_terminal.status.success() && in_log.status.success(), "{outputs:?}");

    let shown = text(&on_terminal.stdout);
    let rate = |line: &str| line.contains("MiB/s") || line.contains("KiB/s");
    // A bar is drawn over the one before it.
    let bars: Vec<&str> = shown.split('\r').filter(|line| line.contains(" left")).collect();
    assert!(bars.len() > 5, "{shown:?}");
    let halfway =
        |bar: &&&str| bar.contains('█') && bar.contains('░') && bar.contains("/26.00 MiB") && rate(bar);
    assert!(bars.iter().any(|bar| halfway(&bar)), "{bars:?}");
    assert!(!shown.contains("% of the volume"), "{shown:?}");

    let lines = text(&in_log.stderr);
    let line = lines.lines().find(|line| line.contains("% of the volume")).expect("a line");
    let percent = line.strip_prefix("backup: ").and_then(|line| line.split(' ').next()).expect("a number");
    // After ten seconds of thirteen.
    assert!(percent.parse::<u32>().is_ok_and(|percent| (20..=60).contains(&percent)), "{line}");
    assert!(line.contains("MiB moved") && rate(line), "{line}");
    assert!(!lines.contains('\r') && !lines.contains('\u{1b}'), "{lines:?}");
    let made: serde_json::Value = serde_json::from_slice(&in_log.stdout).expect("JSON alone");
    assert_eq!(made["read"].as_u64(), Some(13 * MIB));
}
