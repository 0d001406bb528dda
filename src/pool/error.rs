//! What can go wrong with a pool.

use std::path::PathBuf;

use base::{Quantity, Stopped};

/// An error of the pool.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused a call.
    #[error(transparent)]
    Sys(#[from] files::Error),
    /// The copy was given up.
    #[error(transparent)]
    Stopped(#[from] Stopped),
    /// The machine cannot make the pool that was asked for.
    #[error("--pool {choice} cannot be used on {}: {reason}", dir.display())]
    Unavailable {
        /// What was asked for.
        choice: &'static str,
        /// The data directory.
        dir: PathBuf,
        /// What is missing and what to do.
        reason: String,
    },
    /// The image would be too small for the filesystem, or larger than what is free.
    #[error("a pool image of {size} cannot be made in {}: {reason}", dir.display())]
    Size {
        /// The data directory.
        dir: PathBuf,
        /// The size of the image.
        size: Quantity,
        /// Why not.
        reason: &'static str,
    },
    /// The directory was made with an image, which is missing.
    #[error("pool image {} is missing, and all objects with it: put it back, or start on another --data-dir", .0.display())]
    ImageMissing(PathBuf),
    /// The image holds no filesystem that a pool is made with.
    #[error("{} is not a pool image: it holds neither btrfs nor xfs; put the right one back, or remove it", .0.display())]
    ImageUnknown(PathBuf),
    /// There is an image, and the flags ask for none, or for another kind.
    #[error("pool image {} does not match --pool {choice}: remove it, or use --pool auto", image.display())]
    ImageUnwanted {
        /// The image.
        image: PathBuf,
        /// What was asked for.
        choice: &'static str,
    },
    /// The image was unmounted under a running driver.
    #[error("the pool image is no longer mounted at {}: restart the driver", .0.display())]
    NotMounted(PathBuf),
    /// Another process serves the image.
    #[error("pool image {} is in use by another process: stop it first", .0.display())]
    ImageInUse(PathBuf),
}
