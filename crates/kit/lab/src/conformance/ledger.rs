//! What the suite made and still has to take away again. An entry is written before the call that
//! makes the thing: a call that was cut short may have made it.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::attach::remove_place;
use super::plugin::Plugin;
use nix::mount::{MntFlags, umount2};
use procfs::process::Process;

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
        work(&mut self.made.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
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

    /// What is there still.
    pub fn names(&self) -> Vec<String> {
        self.with(|all| all.iter().map(name).collect())
    }

    /// Takes everything away, the last first, each call within `patience`. Returns what could not be.
    pub async fn clean_up(&self, plugin: &Plugin, patience: Duration) -> Vec<String> {
        let mut left = Vec::new();
        // What only a deletion further on makes possible to delete gets a second round.
        for _ in 0..2 {
            left.clear();
            let mut dead = false;
            for made in self.with(|all| all.clone()).into_iter().rev() {
                let undone = match dead {
                    true => Err("the driver does not answer".to_owned()),
                    false => match tokio::time::timeout(patience, undo(plugin, &made)).await {
                        Ok(undone) => undone,
                        Err(_) => Err(format!("no answer within {} s", patience.as_secs())),
                    },
                };
                if let Err(error) = undone {
                    left.push(format!("{}: {error}", name(&made)));
                    let alive = tokio::time::timeout(patience.min(Duration::from_secs(5)), plugin.alive());
                    dead = dead || !alive.await.unwrap_or(false);
                }
            }
            if left.is_empty() || dead {
                break;
            }
        }
        for made in self.with(|all| all.clone()) {
            if let Made::Attachment(attachment) = made {
                left.extend(force(&attachment));
            }
        }
        left
    }
}

fn name(made: &Made) -> String {
    match made {
        Made::Volume { request, .. } => format!("volume {}", request.name),
        Made::Snapshot { request, .. } => format!("snapshot {}", request.name),
        Made::Group { request, .. } => format!("group snapshot {}", request.name),
        Made::Attachment(attachment) => {
            format!("volume {} at {}", attachment.volume_id, attachment.target.display())
        }
    }
}

async fn undo(plugin: &Plugin, made: &Made) -> Result<(), String> {
    let undone = match made {
        Made::Attachment(attachment) => plugin.detach(&attachment.volume_id).await,
        Made::Volume { id: Some(id), .. } => plugin.delete_volume(id).await,
        Made::Snapshot { id: Some(id), .. } => plugin.delete_snapshot(id).await,
        Made::Group { ids: Some((group, member)), .. } => plugin.delete_group(group, member).await,
        Made::Group { request, ids: None } => match plugin.create_group_again((**request).clone()).await {
            Ok((group, member)) => plugin.delete_group(&group, &member).await,
            Err(error) if error.is_silence() => Err(error),
            Err(_) => Ok(()),
        },
        // The call that makes it never answered: made again, it tells the id. Refused, there is none.
        Made::Volume { request, id: None } => match plugin.create_volume_again((**request).clone()).await {
            Ok(volume) => plugin.delete_volume(&volume.volume_id).await,
            Err(error) if error.is_silence() => Err(error),
            Err(_) => Ok(()),
        },
        Made::Snapshot { request, id: None } => {
            match plugin.create_snapshot_again((**request).clone(), false).await {
                Ok(id) => plugin.delete_snapshot(&id).await,
                Err(error) if error.is_silence() => Err(error),
                Err(_) => Ok(()),
            }
        }
    };
    undone.map_err(|error| error.to_string())
}

/// Unmounts what a driver that is gone has left at our own paths, and removes the directories.
fn force(attachment: &Attachment) -> Vec<String> {
    let Attachment { staging, target, .. } = attachment;
    let below = |path: &Path| path.starts_with(staging) || path.starts_with(target);
    let mut left = Vec::new();
    let mounts = Process::myself().and_then(|process| process.mountinfo());
    let mounts =
        mounts.map_or(Vec::new(), |mounts| mounts.0.into_iter().map(|mount| mount.mount_point).collect());
    for place in mounts.iter().rev().filter(|place| below(place)) {
        if let Err(error) = umount2(place, MntFlags::empty()) {
            left.push(format!("unmount {}: {error}", place.display()));
        }
    }
    let _ = std::fs::remove_file(target).or_else(|_| std::fs::remove_dir(target));
    left.extend(remove_place(staging, target));
    left
}
