//! Waiting for answers of others, and for threads, and no longer than until the command is stopped.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base::Stop;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::error::{Error, Result};

/// Between two looks at whether it is over.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// An answer, or [`Error::Stopped`] once `is_over` says so. A future that is not done continues with the next call, where the
/// caller keeps it.
pub async fn unless<T>(is_over: impl Fn() -> bool, answer: impl Future<Output = T>) -> Result<T> {
    let over = async {
        while !is_over() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        biased;
        () = over => Err(Error::Stopped),
        answer = answer => Ok(answer),
    }
}

/// Calls `work` with each number below `count`, on so many threads, until it fails once: that error.
pub fn each(
    count: usize,
    threads: usize,
    stop: &Stop,
    work: impl Fn(usize) -> Result<()> + Sync,
) -> Result<()> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(None));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    let done = stop.check().map_err(Error::from);
                    if let Err(error) = done.and_then(|()| work(number)) {
                        failed.lock().get_or_insert(error);
                        next.store(count, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}

/// The same as [`unless`], for a thread that has nothing else to do.
pub fn wait<T>(runtime: &Handle, stop: &Stop, answer: impl Future<Output = T>) -> Result<T> {
    runtime.block_on(unless(|| stop.check().is_err(), answer))
}
