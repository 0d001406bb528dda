//! What the suite made and still has to take away again. An entry is written before the call that
//! makes the thing: a call that was cut short may have made it.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// A thing that was made, or may have been.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub what: What,
    /// Its id, and of a group that of its member behind it. None before the call that makes it has answered.
    pub ids: Vec<String>,
}

#[derive(Clone, Debug)]
pub(crate) enum What {
    Volume(Box<proto::CreateVolumeRequest>),
    Snapshot(Box<proto::CreateSnapshotRequest>),
    Group(Box<proto::CreateVolumeGroupSnapshotRequest>),
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

    pub fn push(&self, what: What) {
        self.with(|all| all.push(Made { what, ids: Vec::new() }));
    }

    pub fn forget(&self, which: impl Fn(&Made) -> bool) {
        self.with(|all| all.retain(|made| !which(made)));
    }

    /// What is made by that name has these ids.
    pub fn has_ids(&self, name: &str, ids: &[&str]) {
        self.with(|all| {
            for made in all.iter_mut().filter(|made| made.what.name() == Some(name)) {
                made.ids = ids.iter().map(|id| (*id).to_owned()).collect();
            }
        });
    }

    /// Where a volume is attached.
    pub fn attachment(&self, volume_id: &str) -> Option<Attachment> {
        self.with(|all| {
            all.iter().find_map(|made| match &made.what {
                What::Attachment(attachment) if attachment.volume_id == volume_id => Some(attachment.clone()),
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
        self.with(|all| all.iter().map(Made::to_string).collect())
    }
}

impl Made {
    pub fn is(&self, id: &str) -> bool {
        self.ids.first().is_some_and(|own| own == id)
    }
}

impl What {
    /// In the request that makes it.
    fn name(&self) -> Option<&str> {
        match self {
            What::Volume(request) => Some(&request.name),
            What::Snapshot(request) => Some(&request.name),
            What::Group(request) => Some(&request.name),
            What::Attachment(_) => None,
        }
    }
}

impl fmt::Display for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::Volume(request) => write!(f, "volume {}", request.name),
            What::Snapshot(request) => write!(f, "snapshot {}", request.name),
            What::Group(request) => write!(f, "group snapshot {}", request.name),
            What::Attachment(at) => write!(f, "volume {} at {}", at.volume_id, at.target.display()),
        }
    }
}
