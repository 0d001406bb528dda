//! Waiting for answers of others, and no longer than until the command is stopped.

use std::future::Future;
use std::time::Duration;

use base::Stop;
use tokio::runtime::Handle;

use crate::error::{Error, Result};

/// Between two looks at whether it is over.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// An answer, or [`Error::Stopped`] once `is_over` says so. A future that is not done goes on with the next call, where the
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

/// The same, for a thread that has nothing else to do.
pub fn wait<T>(runtime: &Handle, stop: &Stop, answer: impl Future<Output = T>) -> Result<T> {
    runtime.block_on(unless(|| stop.check().is_err(), answer))
}
