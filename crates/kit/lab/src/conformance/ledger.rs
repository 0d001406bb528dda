//! What the suite made and still has to take away again. An entry is written before the call that
//! makes the thing: a call that was cut short may have made it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// A thing that was made, or may have been.
#[derive(Clone, Debug)]
pub(crate) enum Made {
    Volume {
        request: Box<proto::CreateVolumeRequest>,
        id: Option<String>,
    },
    Snapshot {
        request: Box<proto::CreateSnapshotRequest>,
        id: Option<String>,
    },
    /// A group snapshot, its id and that of its member.
    Group {
        request: Box<proto::CreateVolumeGroupSnapshotRequest>,
        ids: Option<(String, String)>,
    },
    Attachment(Attachment),
}

/// A volume that is, or may be, attached, staged or published.
#[derive(Clone, Debug)]
pub(crate) struct Attachment {
    pub volume_id: String,
    pub staging: PathBuf,
    pub target: PathBuf,
}

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    made: Mutex<Vec<Made>>,
    count: AtomicU64,
}

impl Ledger {
    /// A number that was not given out before.
    pub fn next(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed)
    }

    fn with<T>(&self, work: impl FnOnce(&mut Vec<Made>) -> T) -> T {
        work(&mut self.made.lock())
    }

    pub fn push(&self, made: Made) {
        self.with(|all| all.push(made));
    }

    pub fn forget(&self, which: impl Fn(&Made) -> bool) {
        self.with(|all| all.retain(|made| !which(made)));
    }

    /// The group of that name has ids.
    pub fn group_is(&self, name: &str, ids_of_it: &(String, String)) {
        self.with(|all| {
            for made in all {
                if let Made::Group { request, ids } = made
                    && request.name == name
                {
                    *ids = Some(ids_of_it.clone());
                }
            }
        });
    }

    /// The volume of that name has an id.
    pub fn volume_is(&self, name: &str, volume_id: &str) {
        self.with(|all| {
            for made in all {
                if let Made::Volume { request, id } = made
                    && request.name == name
                {
                    *id = Some(volume_id.to_owned());
                }
            }
        });
    }

    /// The snapshot of that name has an id.
    pub fn snapshot_is(&self, name: &str, snapshot_id: &str) {
        self.with(|all| {
            for made in all {
                if let Made::Snapshot { request, id } = made
                    && request.name == name
                {
                    *id = Some(snapshot_id.to_owned());
                }
            }
        });
    }

    /// Where a volume is attached.
    pub fn attachment(&self, volume_id: &str) -> Option<Attachment> {
        self.with(|all| {
            all.iter().find_map(|made| match made {
                Made::Attachment(attachment) if attachment.volume_id == volume_id => Some(attachment.clone()),
                _ => None,
            })
        })
    }

    /// What was made, in order.
    pub fn all(&self) -> Vec<Made> {
        self.with(|all| all.clone())
    }

    /// What is there still.
    pub fn names(&self) -> Vec<String> {
        self.with(|all| all.iter().map(name).collect())
    }
}

pub(super) fn name(made: &Made) -> String {
    match made {
        Made::Volume { request, .. } => format!("volume {}", request.name),
        Made::Snapshot { request, .. } => format!("snapshot {}", request.name),
        Made::Group { request, .. } => format!("group snapshot {}", request.name),
        Made::Attachment(attachment) => {
            format!("volume {} at {}", attachment.volume_id, attachment.target.display())
        }
    }
}
