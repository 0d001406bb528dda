//! What the transfers of a driver share. `begin.rs` begins them, and `run.rs` is the thread of each.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::driver::shared::Shared;
use crate::driver::snapshots::quiesce::Copier;
use crate::driver::transfer::throttle::Throttle;
use crate::driver::volumes::capacity::Capacity;
use crate::driver::volumes::incoming::TransferTable;
use crate::driver::volumes::make::Volumes;
use base::VolumeId;

/// Makes volumes from sources on other nodes.
#[derive(Debug)]
pub struct Transfers {
    pub(in crate::driver) shared: Arc<Shared>,
    pub(in crate::driver) volumes: Arc<Volumes>,
    pub(in crate::driver) capacity: Arc<Capacity>,
    pub(in crate::driver) copier: Arc<Copier>,
    pub(in crate::driver) table: Arc<TransferTable>,
    pub(in crate::driver) throttle: Throttle,
    /// The ids of volumes whose source was not open in time, by their names: the next try finds what the source's node has copied
    /// meanwhile.
    pub(in crate::driver) opening: Mutex<HashMap<String, VolumeId>>,
    /// The number of transfers that receive.
    pub(in crate::driver) working: Mutex<usize>,
}
