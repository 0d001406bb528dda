//! The fuzz targets: one for each kind of input that the driver did not just write itself. Compiled only for tests and for
//! cargo-fuzz (the feature `fuzz`).
//!
//! A target takes bytes and panics where an invariant does not hold. It is in the layer that it tests, in a file `fuzz.rs`;
//! this file lists them. Those of cbt-backup are in its crate. `make fuzz` runs each under libFuzzer (`fuzz/`), which searches
//! for new paths through the code. The test below runs each on its corpus and on mutations of it (`testkit::fuzz`).

use base::fuzz::Target;

use crate::{csi, driver, store};

/// Every target, by the name of its corpus and its file in `fuzz/fuzz_targets/`.
pub const TARGETS: [(&str, Target); 13] = [
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
    ("transfer", driver::transfer),
];

/// Runs a target, for `fuzz/fuzz_targets/`.
///
/// # Panics
/// Where something does not hold, and where no target has this name.
pub fn run(name: &str, bytes: &[u8]) {
    base::fuzz::run(&TARGETS, name, bytes);
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_target_has_its_file_and_bears_its_corpus_and_mutations_of_it() {
        testkit::fuzz::run(&super::TARGETS, |name| !name.starts_with("backup_"));
    }
}
