//! Points at which a model checker lets another thread run: each operation on a file or a directory.
//!
//! Compiled in with the cargo feature `interleavings`, which no release has.

use std::cell::Cell;

thread_local! {
    static SWITCH: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Calls `switch` at each operation that this thread makes. The checker runs all threads of a model in one of the system.
pub fn switch_at_each_operation(switch: fn()) {
    SWITCH.set(Some(switch));
}

pub(crate) fn pass() {
    if let Some(switch) = SWITCH.get()
        && !std::thread::panicking()
    {
        switch();
    }
}
