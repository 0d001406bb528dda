//! The faults that are on, and which of them a call meets. They may change while calls are made.

use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;

use super::caller::Caller;
use super::catalog::Kind;
use super::request::Asked;
use super::spec::{Spec, When};
use crate::random;

/// A fault that is on.
#[derive(Debug)]
struct Armed {
    id: u64,
    spec: Arc<Spec>,
    /// Calls that it is for.
    calls: u64,
    /// Those that met it.
    met: u64,
}

/// A fault that is on, as the HTTP API tells it.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    id: u64,
    pub fault: String,
    /// Calls that it is for, so far.
    calls: u64,
    /// Those of them that met it.
    met: u64,
}

#[derive(Debug, Default)]
struct Inner {
    armed: Vec<Armed>,
    last_id: u64,
}

impl Inner {
    fn add(&mut self, specs: Vec<Spec>) -> Vec<Row> {
        let mut added = Vec::new();
        for spec in specs {
            self.last_id += 1;
            let armed = Armed { id: self.last_id, spec: Arc::new(spec), calls: 0, met: 0 };
            added.push(row(&armed));
            self.armed.push(armed);
        }
        added
    }
}

/// All faults that are on.
#[derive(Debug)]
pub(super) struct Active {
    seed: u64,
    inner: Mutex<Inner>,
}

impl Active {
    pub fn new(seed: u64, specs: Vec<Spec>) -> Self {
        let active = Active { seed, inner: Mutex::default() };
        active.add(specs);
        active
    }

    pub fn add(&self, specs: Vec<Spec>) -> Vec<Row> {
        self.inner.lock().add(specs)
    }

    /// Turns all others off, at once.
    pub fn replace(&self, specs: Vec<Spec>) -> Vec<Row> {
        let mut inner = self.inner.lock();
        inner.armed.clear();
        inner.add(specs)
    }

    /// Takes one away; false where there is none of that number.
    pub fn remove(&self, id: u64) -> bool {
        let mut inner = self.inner.lock();
        let before = inner.armed.len();
        inner.armed.retain(|armed| armed.id != id);
        inner.armed.len() < before
    }

    pub fn rows(&self) -> Vec<Row> {
        self.inner.lock().armed.iter().map(row).collect()
    }

    /// Whether a fault of that kind is on; for those that are not about a call.
    pub fn has(&self, kind: Kind) -> bool {
        self.inner.lock().armed.iter().any(|armed| armed.spec.entry.kind == kind)
    }

    /// The faults that a call meets, in the order in which they were turned on.
    pub fn meets(&self, asked: &Asked) -> Vec<Arc<Spec>> {
        let mut met = Vec::new();
        for armed in &mut self.inner.lock().armed {
            if !is_about(&armed.spec, asked) {
                continue;
            }
            armed.calls += 1;
            let (number, limits) = (armed.calls, &armed.spec.limits);
            let burst = armed.spec.entry.kind != Kind::Burst
                || (number - 1) % armed.spec.values.of < armed.spec.values.times;
            if burst
                && limits.nth.is_none_or(|nth| number == nth)
                && limits.first.is_none_or(|first| number <= first)
                && limits.every.is_none_or(|every| number % every == 0)
                && limits.share.is_none_or(|share| random::share(self.seed ^ armed.id, number) < share)
            {
                armed.met += 1;
                met.push(armed.spec.clone());
            }
        }
        met
    }
}

fn row(armed: &Armed) -> Row {
    Row { id: armed.id, fault: armed.spec.to_string(), calls: armed.calls, met: armed.met }
}

/// Whether a fault is about such a call at all.
pub(super) fn is_about(spec: &Spec, asked: &Asked) -> bool {
    let limits = &spec.limits;
    let of_stream = |when: When| {
        asked.stream.as_ref().is_some_and(|stream| match when {
            When::Whole => stream.offset == 0,
            When::Resumed => stream.offset != 0,
            When::Unaligned => stream.offset % 4096 != 0,
            When::NegativeBound => stream.max_results < 0,
        })
    };
    spec.is_for(&asked.call)
        && limits.snapshot.as_ref().is_none_or(|id| asked.snapshots().any(|asked| asked == id))
        && limits.account.as_ref().is_none_or(|account| {
            let caller = asked.stream.as_ref().and_then(|stream| stream.caller.as_ref());
            caller.and_then(Caller::account).is_some_and(|asking| asking == *account)
        })
        && limits.when.is_none_or(of_stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::spec::parse_all;

    fn asked(call: &str) -> Asked {
        Asked { call: call.to_owned(), stream: None, snapshot: None }
    }

    fn which(faults: &str, seed: u64) -> Vec<u64> {
        let active = Active::new(seed, parse_all(faults).expect("faults"));
        (1..=20).filter(|_| !active.meets(&asked("Probe")).is_empty()).collect()
    }

    #[test]
    fn limits_say_which_calls_meet_a_fault() {
        assert_eq!(which("refuse:nth=3", 1), [3]);
        assert_eq!(which("refuse:first=2", 1), [1, 2]);
        assert_eq!(which("refuse:every=7", 1), [7, 14]);
        assert_eq!(which("burst:times=2,of=9", 1), [1, 2, 10, 11, 19, 20]);
        assert!(which("refuse:call=CreateSnapshot", 1).is_empty());
        assert!(which("refuse:snapshot=one", 1).is_empty());
        assert!(which("refuse:when=whole", 1).is_empty());
    }

    #[test]
    fn a_share_is_the_same_for_a_seed() {
        let some = which("refuse:share=0.5", 1);
        assert!((4..17).contains(&some.len()), "{some:?}");
        assert_eq!(some, which("refuse:share=0.5", 1));
        assert_ne!(some, which("refuse:share=0.5", 2));
    }

    #[test]
    fn faults_come_and_go_and_are_counted() {
        let active = Active::new(1, parse_all("refuse:nth=2;delay").expect("faults"));
        for _ in 0..3 {
            active.meets(&asked("Probe"));
        }
        let answer = |active: &Active| -> Vec<(u64, u64, u64)> {
            active.rows().iter().map(|row| (row.id, row.calls, row.met)).collect()
        };
        assert_eq!(answer(&active), [(1, 3, 1), (2, 3, 3)]);
        assert!(active.remove(1) && !active.remove(1));
        active.add(parse_all("cut").expect("a fault"));
        assert_eq!(answer(&active), [(2, 3, 3), (3, 0, 0)]);
        active.replace(Vec::new());
        assert!(active.rows().is_empty());
    }
}
