//! The fuzz targets of cbt-backup: one for each kind of file in a repository, and one for what clients of the NBD server send.
//! Compiled only for tests and for cargo-fuzz (the feature `fuzz`). src/fuzz.rs says how they are run.

use base::fuzz::Target;

use crate::nbd;
use crate::repository::fuzz;

/// Every target, by the name of its corpus and its file in `fuzz/fuzz_targets/`.
pub const TARGETS: [(&str, Target); 8] = [
    ("backup_config", fuzz::config),
    ("backup_damage", fuzz::damage),
    ("backup_index", fuzz::index),
    ("backup_lock", fuzz::lock),
    ("backup_nbd", nbd::fuzz::nbd),
    ("backup_pack", fuzz::pack),
    ("backup_partial", fuzz::partial),
    ("backup_segment", fuzz::segment),
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
        testkit::fuzz::run(&super::TARGETS, |name| name.starts_with("backup_"));
    }
}
