//! The figures of a run, in one line. `hack/crash.sh` adds up the lines.

use std::collections::BTreeSet;

use super::audit::{When, audit};
use super::scene::Scene;
use testkit::{PoolKind, Rig};

/// The figures of one test. They are printed when dropped, even if the test fails.
pub struct Tally {
    what: &'static str,
    pub pool: PoolKind,
    rounds: usize,
    /// Rounds in which the call was interrupted.
    pub cut: usize,
    points: BTreeSet<String>,
    losses: usize,
    leaks: usize,
}

impl Tally {
    pub fn new(what: &'static str, pool: PoolKind) -> Self {
        Tally { what, pool, rounds: 0, cut: 0, points: BTreeSet::new(), losses: 0, leaks: 0 }
    }

    pub fn round(&mut self, cut: bool) {
        self.rounds += 1;
        self.cut += usize::from(cut);
    }

    /// Counts a point; each counts once.
    pub fn point(&mut self, name: String) {
        self.points.insert(name);
    }

    /// Makes an audit, and fails with its findings.
    pub async fn look(&mut self, rig: &mut Rig, scene: &mut Scene, when: When, context: &str) {
        let found = audit(rig, scene, when).await;
        self.losses += found.losses.len();
        self.leaks += found.leaks.len();
        let fine = found.losses.is_empty() && found.leaks.is_empty();
        assert!(fine, "{context}, {when:?}: {found:#?}\n{}", last_lines(&rig.log()));
    }

    /// Counts a loss that an audit cannot find, and fails.
    pub fn lost(&mut self, rig: &Rig, what: &str) -> ! {
        self.losses += 1;
        panic!("{what}\n{}", last_lines(&rig.log()));
    }
}

pub fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

impl Drop for Tally {
    fn drop(&mut self) {
        let Tally { what, pool, rounds, cut, points, losses, leaks } = self;
        let (pool, points) = (pool.name(), points.len());
        println!(
            "crash: kind={what} pool={pool} rounds={rounds} cut={cut} points={points} losses={losses} leaks={leaks}"
        );
    }
}
