//! What the threads of a backup tell each other: which segments are done, and why all end.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use base::Stop;

use crate::error::Error;

pub struct State<'r> {
    pub stop: &'r Stop,
    is_failed: AtomicBool,
    error: Mutex<Option<Error>>,
    done: Mutex<Vec<u32>>,
}

impl<'r> State<'r> {
    pub fn new(stop: &'r Stop, done: Vec<u32>) -> Self {
        State { stop, is_failed: AtomicBool::new(false), error: Mutex::new(None), done: Mutex::new(done) }
    }

    /// Ends all threads. The first error is the one that the backup ends with.
    pub fn fail(&self, error: Error) {
        self.error.lock().get_or_insert(error);
        self.give_up();
    }

    /// Ends all threads, for a reason that the caller returns.
    pub fn give_up(&self) {
        self.is_failed.store(true, Ordering::Relaxed);
    }

    pub fn error(&self) -> Option<Error> {
        self.error.lock().take()
    }

    /// Whether all are to end.
    pub fn is_over(&self) -> bool {
        self.is_failed.load(Ordering::Relaxed) || self.stop.check().is_err()
    }

    /// The segments that are done: the writer has their maps and data.
    pub fn done(&self) -> Vec<u32> {
        self.done.lock().clone()
    }

    pub fn segment_is_done(&self, number: u32) {
        self.done.lock().push(number);
    }

    pub fn into_done(self) -> Vec<u32> {
        self.done.into_inner()
    }
}
