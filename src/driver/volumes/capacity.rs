//! The sizes of volumes, and the space for them.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::driver::error::{Error, Result};
use crate::driver::request::capability::{Capability, kinds, least_size};
use crate::driver::request::create::CapacityRange;
use crate::driver::request::params::VolumeParameters;
use crate::driver::shared::Shared;
use crate::driver::volumes::incoming::TransferTable;
use crate::store::AccessKind;
use crate::sys;
use base::{BlockSize, Quantity};

/// The size of a volume without a requested size.
const DEFAULT_SIZE: u64 = 1 << 30;

/// What GetCapacity answers, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvailableCapacity {
    /// What can be provisioned.
    pub available: u64,
    /// The largest volume that can be made.
    pub most: u64,
    /// The smallest volume that can be made.
    pub least: u64,
}

/// How large volumes may be, and how much space there is for them.
#[derive(Debug)]
pub struct Capacity {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) transfers: Arc<TransferTable>,
    /// Bytes of volumes that are being made.
    pub(in crate::driver) reserved: Reserved,
}

/// How much of a limited amount is reserved by calls that have not recorded it yet. So two concurrent calls cannot both
/// take the last of it.
#[derive(Debug, Default)]
pub(in crate::driver) struct Reserved(Mutex<u64>);

/// A reserved amount. It is released when dropped: by then a record counts it, or the call failed.
pub(in crate::driver) struct Reservation<'r> {
    reserved: &'r Reserved,
    amount: u64,
}

impl Reserved {
    /// Reserves `amount`, if `check` allows it. The argument of `check` is what others have reserved. It must not do I/O, since
    /// all calls wait for it.
    pub(in crate::driver) fn take(
        &self,
        amount: u64,
        check: impl FnOnce(u64) -> Result<()>,
    ) -> Result<Reservation<'_>> {
        let mut taken = self.0.lock();
        check(*taken)?;
        *taken += amount;
        Ok(Reservation { reserved: self, amount })
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        *self.reserved.0.lock() -= self.amount;
    }
}

impl Capacity {
    /// The size of a new volume: the largest of the requested size, the source's and the least that its filesystem needs,
    /// rounded up to a block.
    pub(in crate::driver) fn of_new(
        &self,
        source: Option<u64>,
        access: &[AccessKind],
        block_size: BlockSize,
        range: CapacityRange,
    ) -> Result<u64> {
        let least = source.unwrap_or_else(|| least_size(access));
        let asked = match (range, source) {
            (CapacityRange { required: 0, limit }, None) => {
                DEFAULT_SIZE.min(limit.map_or(DEFAULT_SIZE, |limit| block_size.round_down(limit)))
            }
            (CapacityRange { required, .. }, _) => required,
        };
        self.rounded(asked.max(least), block_size, range.limit)
    }

    /// The size of an existing volume after an expansion, never less than its current size.
    pub(in crate::driver) fn of_expanded(
        &self,
        now: u64,
        block_size: BlockSize,
        range: CapacityRange,
    ) -> Result<u64> {
        if now >= range.required {
            return match range.limit {
                Some(limit) if now > limit => Err(Error::OutOfRange {
                    field: "capacity_range.limit_bytes",
                    value: i128::from(limit),
                    want: format!("at least {now}, what the volume has: volumes do not shrink"),
                }),
                _ => Ok(now),
            };
        }
        self.rounded(range.required, block_size, range.limit)
    }

    fn rounded(&self, wanted: u64, block_size: BlockSize, limit: Option<u64>) -> Result<u64> {
        let most = self.shared.config.max_volume_size;
        let capacity = block_size.round_up(wanted).filter(|capacity| *capacity <= most.0);
        let capacity = capacity.ok_or_else(|| Error::OutOfRange {
            field: "capacity_range.required_bytes",
            value: i128::from(wanted),
            want: format!("at most {most} (--max-volume-size)"),
        })?;
        match limit {
            Some(limit) if capacity > limit => Err(Error::OutOfRange {
                field: "capacity_range.limit_bytes",
                value: i128::from(limit),
                want: format!(
                    "at least {capacity}: the size asked for, the source's and the least that the filesystem \
                     needs, rounded up to blocks of {}",
                    Quantity(block_size.bytes())
                ),
            }),
            _ => Ok(capacity),
        }
    }

    /// Reserves `bytes` for a volume, or fails with `RESOURCE_EXHAUSTED` if `--overcommit` does not allow them. Without the
    /// flag any size is allowed, since volumes are thin.
    pub(in crate::driver) fn reserve(&self, bytes: u64) -> Result<Reservation<'_>> {
        let most = self.limit()?;
        self.reserved.take(bytes, |taken| match most.map(|most| self.left_of(most, taken)) {
            Some(left) if bytes > left => Err(Error::Exhausted(format!(
                "{} is more than the {} that may still be provisioned: delete volumes, or raise --overcommit",
                Quantity(bytes),
                Quantity(left)
            ))),
            _ => Ok(()),
        })
    }

    /// The most bytes of all volumes together; `None` without `--overcommit`.
    fn limit(&self) -> Result<Option<u64>> {
        let Some(ratio) = self.shared.config.overcommit else { return Ok(None) };
        let total = sys::space(self.shared.open_pool.dir().path())?.total;
        Ok(Some((total as f64 * ratio) as u64))
    }

    /// What volumes and transfers leave of `most` bytes, when `taken` more are reserved.
    fn left_of(&self, most: u64, taken: u64) -> u64 {
        let kept: u64 = self.shared.store.read(|index| {
            index.volumes_after(None).fold(0, |sum: u64, record| sum.saturating_add(record.capacity))
        });
        most.saturating_sub(kept).saturating_sub(self.transfers.reserved()).saturating_sub(taken)
    }

    /// What can be provisioned with these capabilities and parameters. Without a limit these are the free bytes of the pool,
    /// or of the host if a sparse image has less space below it.
    pub fn available(
        &self,
        capabilities: &[Capability],
        parameters: &HashMap<String, String>,
    ) -> Result<AvailableCapacity> {
        let parameters = VolumeParameters::parse(parameters)?;
        let block_size = parameters.block_size.unwrap_or(BlockSize::MIN);
        let kinds = match (capabilities.is_empty(), parameters.fs_type) {
            (true, None) => Vec::new(),
            (true, Some(fs_type)) => vec![AccessKind::Filesystem(fs_type)],
            (false, fs_type) => kinds(capabilities, fs_type.as_deref())?,
        };
        let most = block_size.round_down(self.shared.config.max_volume_size.0);
        let least = block_size.round_up(least_size(&kinds)).unwrap_or(most);
        Ok(match self.limit()?.map(|most| self.left_of(most, 0)) {
            Some(left) => {
                AvailableCapacity { available: left, most: most.min(block_size.round_down(left)), least }
            }
            None => AvailableCapacity { available: self.shared.open_pool.free()?, most, least },
        })
    }
}
