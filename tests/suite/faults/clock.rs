//! The clock is wrong. The order of snapshots still comes from sequence numbers, and snapshots that are kept by age are
//! neither removed at once nor kept for ever.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use super::until;
use testkit::prelude::*;
use testkit::temp_dir;

const YEAR: i64 = 365 * 24 * 3600;

/// Shifts the clock of a process by the number of seconds in a file.
const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    const char *path = getenv("CLOCK_OFF_BY");
    if (failed || clock != CLOCK_REALTIME || !path) return failed;
    char text[32] = "";
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return failed;
    if (read(file, text, sizeof text - 1) > 0) now->tv_sec += atoll(text);
    close(file);
    return failed;
}
"#;

/// The clock of a driver, set by the test.
struct Clock(PathBuf);

impl Clock {
    async fn start(pool: PoolKind, arguments: &[&str]) -> (Self, Rig) {
        let dir = temp_dir();
        let (source, library) = (dir.path().join("clock.c"), dir.path().join("clock.so"));
        std::fs::write(&source, LIBRARY).expect("write");
        // `cc` exists, since it is the linker for Rust programs.
        let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
        assert!(built.expect("cc").success(), "cc");
        let clock = Clock(dir.path().join("off-by"));
        clock.off_by(0);
        let environment =
            vec![("LD_PRELOAD", OsString::from(library)), ("CLOCK_OFF_BY", clock.0.clone().into())];
        (clock, Rig::start_as(dir, pool, arguments, environment, "info").await)
    }

    fn off_by(&self, seconds: i64) {
        let fresh = self.0.with_extension("new");
        std::fs::write(&fresh, seconds.to_string()).expect("write");
        std::fs::rename(fresh, &self.0).expect("rename");
    }
}

async fn created(rig: &Rig, snapshot: &str) -> (i64, i32) {
    let request = requests::snapshot(snapshot);
    let answer = rig.client.controller.clone().get_snapshot(request).await.expect("get").into_inner();
    let at = answer.snapshot.expect("a snapshot").creation_time.expect("creation_time");
    (at.seconds, at.nanos)
}

fn now() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    since.as_secs() as i64
}

#[apply(every_pool)]
async fn snapshots_are_in_order_whatever_the_clock_says(pool: PoolKind) {
    let (clock, mut rig) = Clock::start(pool, &[]).await;
    let (volume, device) = rig.block_volume("volume", 16 * MIB).await;
    let mut content = Content::default();
    let mut taken: Vec<(String, Content)> = Vec::new();
    // The clock is right, ten years back, at the beginning of 1970 as on a machine without a battery (Linux sets none before), a
    // year back over a restart, ten years ahead, and right again.
    for (number, off) in [0, -10 * YEAR, -now(), -YEAR, 10 * YEAR, 0].into_iter().enumerate() {
        clock.off_by(off);
        if number == 3 {
            rig.crash().await;
        }
        content.write(&device, number as u64 * 50, 20, number as u8 + 1);
        let snapshot = rig.snapshot(&format!("snapshot {number}"), &volume).await;
        let (seconds, nanos) = created(&rig, &snapshot).await;
        let expected = now() + off;
        assert!((seconds - expected).abs() < 300, "{seconds} is not {expected}");
        assert!((0..1_000_000_000).contains(&nanos), "{nanos}");
        taken.push((snapshot, content.clone()));
    }
    assert_eq!(rig.client.snapshots().await.expect("ListSnapshots").len(), taken.len());
    for (at, (target, after)) in taken.iter().enumerate() {
        for (base, before) in &taken[..at] {
            assert_eq!(rig.changed(base, target).await, after.changed_since(before, BLOCK), "{pool:?}");
            assert_eq!(code(rig.client.delta(target, base, 0, 0).await), Code::InvalidArgument);
        }
    }
    rig.detach_and_finish(&volume).await;
}

fn is_kept(rig: &Rig, snapshot: &str) -> bool {
    rig.retained().iter().any(|id| id == snapshot)
}

#[apply(device_test)]
async fn what_is_kept_by_age_survives_a_clock_that_goes_back() {
    let (clock, mut rig) = Clock::start(PoolKind::Dir, &["--retain-deleted", "8:1h"]).await;
    let (volume, device) = rig.block_volume("volume", 16 * MIB).await;
    let mut content = Content::default();
    let mut taken = Vec::new();
    for number in 0..4u8 {
        content.write(&device, u64::from(number) * 50, 20, number + 1);
        taken.push((rig.snapshot(&format!("snapshot {number}"), &volume).await, content.clone()));
    }
    let last = taken.pop().expect("the target");
    // Deleted at the right time, long before they were taken, and when the clock is right again.
    for ((snapshot, _), off) in taken.iter().zip([0, -10 * YEAR, 0]) {
        clock.off_by(off);
        rig.client.delete_snapshot(snapshot).await.expect("delete");
    }
    for off in [0, -10 * YEAR, 0] {
        clock.off_by(off);
        rig.restart().await;
        for (base, before) in &taken {
            assert_eq!(rig.changed(base, &last.0).await, last.1.changed_since(before, BLOCK));
        }
    }
    clock.off_by(2 * 3600);
    rig.restart().await;
    until("all go when the hour is over", || taken.iter().all(|(id, _)| !is_kept(&rig, id))).await;
    assert_eq!(rig.allocated(&last.0).await, last.1.allocated(BLOCK));
    rig.detach_and_finish(&volume).await;
}

/// A snapshot that was deleted while the clock was ahead is not kept until the clock reaches that time.
#[apply(device_test)]
async fn what_is_kept_by_age_goes_when_the_clock_was_ahead() {
    let (clock, mut rig) = Clock::start(PoolKind::Dir, &["--retain-deleted", "8:2s"]).await;
    let (volume, _) = rig.block_volume("volume", 16 * MIB).await;
    let first = rig.snapshot("first", &volume).await;
    rig.snapshot("second", &volume).await;
    clock.off_by(10 * YEAR);
    rig.client.delete_snapshot(&first).await.expect("delete");
    clock.off_by(0);
    rig.restart().await;
    assert!(is_kept(&rig, &first), "its two seconds are not over");
    tokio::time::sleep(std::time::Duration::from_millis(2100)).await;
    // Every change of the volume's line applies the retention.
    rig.snapshot("third", &volume).await;
    assert!(!is_kept(&rig, &first), "it is kept for ten years");
    rig.detach_and_finish(&volume).await;
}
