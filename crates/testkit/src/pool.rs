//! The kinds of pool that tests run on.

use std::fmt;

/// A value of `--pool`. Its number is its place in [`PoolKind::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// btrfs, a subvolume for the bytes of each object: a copy takes constant time.
    Btrfs,
    /// A filesystem that clones files, as xfs does: a copy costs the number of extents.
    Xfs,
    /// Plain files: a copy costs the data.
    Dir,
}

impl PoolKind {
    /// Every kind.
    pub const ALL: [PoolKind; 3] = [PoolKind::Btrfs, PoolKind::Xfs, PoolKind::Dir];

    /// The one with this name.
    pub fn named(name: &str) -> Self {
        let found = Self::ALL.into_iter().find(|pool| pool.name() == name);
        found.unwrap_or_else(|| panic!("no pool is called {name}"))
    }

    /// Its name, as `--pool` takes it.
    pub fn name(self) -> &'static str {
        match self {
            PoolKind::Btrfs => "btrfs",
            PoolKind::Xfs => "xfs",
            PoolKind::Dir => "dir",
        }
    }
}

impl fmt::Display for PoolKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
