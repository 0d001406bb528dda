//! The figures of a run of rounds, in one line: `hack/crash.sh` adds the lines up.

use std::collections::BTreeSet;

use super::audit::{When, audit};
use super::scene::Scene;
use testkit::{PoolKind, Rig};

/// The figures of one test. Printed when dropped, in whatever way the test ends.
pub struct Tally {
    what: &'static str,
    pool: PoolKind,
    rounds: usize,
    /// Rounds in which the call was cut short.
    pub cut: usize,
    points: BTreeSet<String>,
    losses: usize,
    leaks: usize,
}

impl Tally {
    pub fn new(what: &'static str, pool: PoolKind) -> Self {
        Tally { what, pool, rounds: 0, cut: 0, points: BTreeSet::new(), losses: 0, leaks: 0 }
    }

    /// A round was made.
    pub fn round(&mut self, cut: bool) {
        self.rounds += 1;
        self.cut += usize::from(cut);
    }

    /// A point was stopped at; each counts once.
    #[cfg(feature = "failpoints")]
    pub fn point(&mut self, name: String) {
        self.points.insert(name);
    }

    /// Takes a look; what it finds ends the test.
    pub async fn look(&mut self, rig: &mut Rig, scene: &mut Scene, when: When, context: &str) {
        let found = audit(rig, scene, when).await;
        self.losses += found.losses.len();
        self.leaks += found.leaks.len();
        let fine = found.losses.is_empty() && found.leaks.is_empty();
        assert!(fine, "{context}, {when:?}: {found:#?}\n{}", last_lines(&rig.log()));
    }

    /// A loss that no look can see.
    pub fn lost(&mut self, rig: &Rig, what: &str) -> ! {
        self.losses += 1;
        panic!("{what}\n{}", last_lines(&rig.log()));
    }
}

/// The end of a log.
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
