//! Lines for standard output and standard error, by threads that must not wait for whoever reads them. A file takes a line at
//! once. For a pipe or a terminal, lines wait in a bounded queue for a thread that does nothing but write them; what finds the queue
//! full is dropped and counted, so that a reader that stops stops no call and no probe. (The `tracing-appender` crate has such a
//! thread, but its end prints to the very output that is blocked.)

use std::error::Error;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// The most bytes that wait for one output.
const QUEUED: usize = 1 << 20;
/// How long the end of a process waits for the readers of its last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

static STDOUT: OnceLock<Lines> = OnceLock::new();
static STDERR: OnceLock<Lines> = OnceLock::new();
/// The counter of lines that were dropped.
static DROPPED: OnceLock<&'static str> = OnceLock::new();

/// Standard output.
pub fn stdout() -> &'static Lines {
    STDOUT.get_or_init(|| Lines::to("stdout", io::stdout().as_fd()))
}

/// Standard error.
pub fn stderr() -> &'static Lines {
    STDERR.get_or_init(|| Lines::to("stderr", io::stderr().as_fd()))
}

/// Counts dropped lines under this name from now on, by `output`.
pub(crate) fn count_dropped(name: &'static str) {
    let _ = DROPPED.set(name);
    metrics::describe_counter!(name, "Lines dropped because the reader of the output was too slow.");
    for output in ["stdout", "stderr"] {
        metrics::counter!(name, "output" => output).absolute(0);
    }
}

/// Waits until all lines are written, for a second at most. For the end of a process.
pub fn flush() {
    let until = Instant::now() + LAST_LINES;
    for lines in [&STDOUT, &STDERR].into_iter().filter_map(OnceLock::get) {
        lines.flush_until(until);
    }
}

/// [`shell::end`] of a process whose lines may have no reader: it ends all the same.
pub fn end(program: &str, done: Result<ExitCode, Box<dyn Error>>) -> ExitCode {
    let code = shell::end_with(program, done, |line| stderr().push(format!("{line}\n").as_bytes()));
    flush();
    code
}

/// Where lines go.
#[derive(Debug)]
pub struct Lines {
    name: &'static str,
    to: To,
}

#[derive(Debug)]
enum To {
    File(File),
    Queue(Arc<Queue>),
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    text: Vec<u8>,
    /// Bytes taken out of `text` whose write has not returned.
    under_way: usize,
    dropped: u64,
}

impl Lines {
    fn to(name: &'static str, output: BorrowedFd<'_>) -> Self {
        // Of its own: whoever else writes to `io::stderr` must not wait for the lock of a blocked writer.
        let file = output.try_clone_to_owned().map(File::from);
        let file = file.unwrap_or_else(|error| panic!("duplicate {name}: {error}"));
        if file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Lines { name, to: To::File(file) };
        }
        let queue = Arc::<Queue>::default();
        let written = queue.clone();
        std::thread::spawn(move || written.write(&file, name));
        Lines { name, to: To::Queue(queue) }
    }

    /// Writes one or more whole lines, or drops them.
    pub fn push(&self, lines: &[u8]) {
        let is_dropped = match &self.to {
            // Only the disk can hold this up, and after an error there is no one to tell.
            To::File(file) => {
                let mut file = file;
                file.write_all(lines).is_err()
            }
            To::Queue(queue) => !queue.push(lines),
        };
        if let (true, Some(name)) = (is_dropped, DROPPED.get()) {
            metrics::counter!(*name, "output" => self.name).increment(1);
        }
    }

    fn flush_until(&self, until: Instant) {
        if let To::Queue(queue) = &self.to {
            let left = until.saturating_duration_since(Instant::now());
            let mut waiting = queue.waiting.lock();
            let is_left = |waiting: &mut Waiting| waiting.under_way + waiting.text.len() > 0;
            queue.changed.wait_while_for(&mut waiting, is_left, left);
        }
    }
}

impl Write for &Lines {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        self.push(lines);
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Queue {
    fn push(&self, lines: &[u8]) -> bool {
        let mut waiting = self.waiting.lock();
        if waiting.under_way + waiting.text.len() + lines.len() > QUEUED {
            waiting.dropped += 1;
            return false;
        }
        waiting.text.extend_from_slice(lines);
        self.changed.notify_all();
        true
    }

    /// The thread that writes; for ever.
    fn write(&self, mut file: &File, name: &'static str) {
        loop {
            let mut waiting = self.waiting.lock();
            self.changed.wait_while(&mut waiting, |waiting| waiting.text.is_empty());
            let text = std::mem::take(&mut waiting.text);
            waiting.under_way = text.len();
            drop(waiting);
            // Where the reader is gone, the lines are too: calls are served all the same.
            let _ = file.write_all(&text);
            let mut waiting = self.waiting.lock();
            waiting.under_way = 0;
            let dropped = std::mem::take(&mut waiting.dropped);
            self.changed.notify_all();
            drop(waiting);
            if dropped > 0 {
                tracing::warn!(
                    output = name,
                    lines = dropped,
                    "the output was read too slowly: lines are lost"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_reader_that_stops_costs_lines_and_no_time() {
        let (mut reader, writer) = io::pipe().expect("a pipe");
        let lines = Lines::to("test", writer.as_fd());
        drop(writer);
        let begun = Instant::now();
        // Ten times what the queue takes.
        let count = 10 * QUEUED / 100;
        for number in 0..count {
            lines.push(format!("{number:099}\n").as_bytes());
        }
        lines.flush_until(Instant::now() + Duration::from_millis(100));
        assert!(begun.elapsed() < Duration::from_secs(60), "it waited for its reader");
        let mut read = [0; 100];
        let mut next = || {
            reader.read_exact(&mut read).expect("a line");
            std::str::from_utf8(&read).expect("text").trim_start_matches('0').trim_end().to_owned()
        };
        let kept = QUEUED / 100;
        for number in 0..kept {
            assert_eq!(next(), if number == 0 { String::new() } else { number.to_string() });
        }
        // Once it reads again, later lines come again; a pipe's worth of those above was written before they were dropped.
        let mut last = kept;
        lines.push(format!("{:099}\n", 123_456_789).as_bytes());
        loop {
            let number = next().parse::<usize>().expect("a number");
            assert!(number > last || number == kept, "{number} after {last}");
            last = number;
            if number == 123_456_789 {
                break;
            }
            assert!(number < count);
        }
        lines.flush_until(Instant::now() + Duration::from_secs(60));
        drop(reader);
        lines.push(b"nobody reads this\n");
        lines.flush_until(Instant::now() + Duration::from_secs(60));
    }

    #[test]
    fn a_file_has_each_line_at_once() {
        let mut file = tempfile::tempfile().expect("a file");
        let lines = Lines::to("test", file.as_fd());
        lines.push(b"one\n");
        let mut text = String::new();
        io::Seek::rewind(&mut file).expect("rewind");
        file.read_to_string(&mut text).expect("read");
        assert_eq!(text, "one\n");
    }
}
