//! The fuzz targets: one for each kind of input that the driver did not just write itself. Compiled only for tests and for
//! cargo-fuzz (the feature `fuzz`).
//!
//! A target takes bytes and panics where an invariant does not hold. It is in the layer that it tests, in a file `fuzz.rs`;
//! this file lists them; those of cbt-backup are in its crate. `make fuzz` runs each under libFuzzer, which searches for new paths through the code (`fuzz/`); the
//! test below runs each on its corpus, `fuzz/corpus/<target>/`, and on mutations of it.

use crate::{csi, driver, store};

/// A target: it panics where something does not hold.
pub type Target = fn(&[u8]);

/// Every target, by the name of its corpus and its file in `fuzz/fuzz_targets/`.
pub const TARGETS: [(&str, Target); 12] = [
    ("ages", driver::fuzz::ages),
    ("authority", csi::fuzz::authority),
    ("capabilities", csi::fuzz::capabilities),
    ("delta", cbt::fuzz::delta),
    ("hashes", cbt::fuzz::hashes),
    ("ids", base::fuzz::ids),
    ("map_damage", cbt::fuzz::map_damage),
    ("maps", cbt::fuzz::maps),
    ("parameters", driver::fuzz::parameters),
    ("quantities", base::fuzz::quantities),
    ("records", store::fuzz::records),
    ("tokens", driver::fuzz::tokens),
];

/// Runs a target, for `fuzz/fuzz_targets/`.
///
/// # Panics
/// Where something does not hold, and where no target has this name.
pub fn run(name: &str, bytes: &[u8]) {
    let (_, target) = TARGETS.iter().find(|(known, _)| *known == name).expect("a target");
    target(bytes);
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_target_bears_its_corpus_and_mutations_of_it() {
        testkit::fuzz::run(&super::TARGETS);
    }

    #[test]
    fn every_target_has_its_file_and_its_corpus() {
        testkit::fuzz::are_complete(&super::TARGETS, |name| !name.starts_with("backup_"));
    }
}
