//! The space that is left, in the pool and on the disk under its image.

use super::{OpenPool, Result};
use crate::sys::{Space, space};
use base::Quantity;

/// A filesystem with less than a fiftieth of its size left is short of space; a large one with less than a GiB.
const LOW_SHARE: u64 = 50;
const LOW_BYTES: u64 = 1 << 30;
/// With less than this on the disk under an image nothing new is made: its filesystem believes that it has room,
/// and a btrfs that finds out otherwise turns read-only.
pub(super) const LEAST_HOST: u64 = 16 << 20;
/// With less than this the disk under an image gets no reserve, and without one nothing new is made either.
pub(super) const ROOM_FOR_RESERVE: u64 = 64 << 20;
/// What an image grows by: enough for a second chunk of metadata.
const GROWTH: u64 = 64 << 20;

impl OpenPool {
    /// Bytes that can still be written: free in the pool, or on the host where a sparse image has less
    /// behind it than it shows.
    pub fn free(&self) -> Result<u64> {
        let inside = space(self.dir.path())?.available;
        Ok(match &self.image {
            None => inside,
            Some(image) => inside.min(image.host()?.available),
        })
    }

    /// What is wrong with the space that is left, if anything: a pool, or the host of a sparse image, that
    /// is almost full breaks all volumes at once.
    pub fn shortage(&self) -> Result<Option<String>> {
        let low = |space: &Space| space.available < LOW_BYTES.min(space.total / LOW_SHARE);
        let inside = space(self.dir.path())?;
        if low(&inside) {
            return Ok(Some(format!("the pool has {} left", Quantity(inside.available))));
        }
        let Some(image) = &self.image else { return Ok(None) };
        let host = image.host()?;
        Ok(low(&host)
            .then(|| format!("the disk under the pool's image has {} left", Quantity(host.available))))
    }

    /// Gives a pool that has no room for the reserve of its deletions (`sys/reserve.rs`) more room, and returns whether it
    /// did.
    pub fn make_room_for_reserve(&self) -> Result<bool> {
        let Some(image) = &self.image else { return Ok(false) };
        if !self.backend.deletes_only_when_grown(self.dir.path())?
            || image.host()?.available < GROWTH + LEAST_HOST
        {
            return Ok(false);
        }
        tracing::warn!(path = %image.path.display(), by = GROWTH, "the pool is full and nothing could be deleted, so its image is made larger");
        image.grow(GROWTH)?;
        Ok(true)
    }

    /// Why nothing new may be made, if there is a reason: the disk under the image is full.
    pub fn host_is_full(&self) -> Result<Option<String>> {
        let Some(image) = &self.image else { return Ok(None) };
        image.take_reserve()?;
        let left = image.host()?.available;
        let least = if image.reserve.is_held() { LEAST_HOST } else { ROOM_FOR_RESERVE };
        Ok((left < least).then(|| {
            format!(
                "No space left on device: the disk under the pool's image has only {} left; free space on it, or delete \
                 volumes or snapshots",
                Quantity(left)
            )
        }))
    }
}
