//! That the checks see what they are for: run before every soak, on planted faults.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use crate::backup::first_difference;
use crate::curves::{Curves, Sample};
use crate::{Failed, keeper};

/// Plants a flipped byte, a block that fio did not write, a leak a curve, and a line in a log.
pub fn run() -> Result<(), Failed> {
    let dir =
        tempfile::Builder::new().prefix("deltapath-soak-").tempdir().map_err(|error| error.to_string())?;
    compare(&dir.path().join("one"), &dir.path().join("other")).map_err(|error| error.to_string())?;
    verify(dir.path())?;
    leaks()?;
    match keeper::errors_in("INFO fine\n2026 ERROR a map is damaged").len() {
        1 => Ok(()),
        found => Err(format!("{found} lines of a log with one error")),
    }
}

fn compare(one: &std::path::Path, other: &std::path::Path) -> std::io::Result<()> {
    const LENGTH: u64 = (3 << 20) + 4096;
    let new = |path| File::options().create_new(true).read(true).write(true).open(path);
    let (one, other) = (new(one)?, new(other)?);
    one.set_len(LENGTH)?;
    other.set_len(LENGTH)?;
    let same = first_difference(&one, &other, LENGTH)?;
    other.write_all_at(&[1], LENGTH - 1)?;
    match (same, first_difference(&one, &other, LENGTH)?) {
        (None, Some(at)) if at == LENGTH - 1 => Ok(()),
        seen => Err(std::io::Error::other(format!("a flipped byte was seen as {seen:?}"))),
    }
}

/// fio verifies, and a block that was changed behind its back is an error.
fn verify(dir: &std::path::Path) -> Result<(), Failed> {
    let path = dir.join("fio");
    let fio = |more: &[&str]| {
        Command::new("fio")
            .args(["--name=check", "--rw=randwrite", "--bs=4k", "--size=1m", "--ioengine=psync"])
            .args(["--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0", "--randseed=1"])
            .args(more)
            .arg(format!("--filename={}", path.display()))
            .current_dir(dir)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| format!("fio cannot be run: {error}; run make soak, which installs it"))
    };
    let written = fio(&[])?;
    if !written.status.success() {
        return Err(format!(
            "fio ended with {}: {}",
            written.status,
            String::from_utf8_lossy(&written.stderr)
        ));
    }
    let file = File::options().write(true).open(&path).map_err(|error| error.to_string())?;
    file.write_all_at(&[0x5a; 64], 40 * 4096 + 1000).map_err(|error| error.to_string())?;
    match fio(&["--verify_only=1"])?.status.success() {
        true => Err("fio did not see a block that was changed behind its back".into()),
        false => Ok(()),
    }
}

/// A curve that grows is a leak, and one that goes up and down is none.
fn leaks() -> Result<(), Failed> {
    let run = |value: &dyn Fn(f64) -> f64| {
        let sample = |second: u32| Sample { at: f64::from(second), values: [value(f64::from(second)); 6] };
        Curves { samples: (0..180).map(sample).collect(), steady_from: 50.0, length: 180.0 }.leaks().len()
    };
    let steady = run(&|at| 40.0 + at % 7.0);
    let growing = run(&|at| 40.0 + at);
    match (steady, growing) {
        (0, 6) => Ok(()),
        seen => Err(format!("steady and growing curves were taken for {seen:?} leaks")),
    }
}
