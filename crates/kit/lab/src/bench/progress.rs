//! How far the measurements are, on standard error: a bar on a terminal, a line every few seconds elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;

/// Between two lines.
const EVERY: Duration = Duration::from_secs(10);

pub(super) struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    state: Mutex<State>,
}

struct State {
    part: String,
    done: u64,
    printed: Option<Instant>,
}

impl Progress {
    pub fn new(steps: u64) -> Self {
        let bar = (shell::tells_progress() && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(steps);
            let style = "{bar:30} {pos}/{len} {msg}";
            bar.set_style(
                ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()),
            );
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        });
        Progress { bar, steps, state: Mutex::new(State { part: String::new(), done: 0, printed: None }) }
    }

    /// What the next steps belong to.
    pub fn part(&self, part: &str) {
        self.with(|state| part.clone_into(&mut state.part));
    }

    /// A step begins.
    pub fn step(&self, what: &str) {
        self.with(|state| state.done += 1);
        self.message(what);
    }

    /// The same step continues with something else.
    pub fn message(&self, what: &str) {
        self.with(|state| {
            let text = format!("{}: {what}", state.part);
            if let Some(bar) = &self.bar {
                bar.set_position(state.done.saturating_sub(1));
                bar.set_message(text);
            } else if shell::tells_progress()
                && state.printed.is_none_or(|printed| printed.elapsed() >= EVERY)
            {
                state.printed = Some(Instant::now());
                shell::say!("step {} of {}: {text}", state.done, self.steps);
            }
        });
    }

    fn with(&self, work: impl FnOnce(&mut State)) {
        work(&mut self.state.lock());
    }

    /// Gives the line of the terminal back.
    pub fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
