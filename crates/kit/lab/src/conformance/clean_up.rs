//! Takes away what the suite made, also where the driver no longer answers.

use std::path::Path;
use std::time::Duration;

use super::attach::remove_place;
use super::ledger::{Attachment, Made, What};
use super::plugin::Plugin;
use super::verdict::Wrong;
use nix::mount::{MntFlags, umount2};
use procfs::process::Process;

impl Plugin {
    /// Takes everything away, the last first, each call within `patience`. Returns what could not be.
    pub async fn clean_up(&self, patience: Duration) -> Vec<String> {
        let mut left = Vec::new();
        // What only a deletion further on makes possible to delete gets a second round.
        for _ in 0..2 {
            left.clear();
            let mut dead = false;
            for made in self.ledger.all().into_iter().rev() {
                let undone = match dead {
                    true => Err(Wrong::new("the driver does not answer")),
                    false => tokio::time::timeout(patience, undo(self, &made)).await.unwrap_or_else(|_| {
                        Err(Wrong::new(format!("no answer within {} s", patience.as_secs())))
                    }),
                };
                if let Err(error) = undone {
                    left.push(format!("{made}: {error}"));
                    let alive = tokio::time::timeout(patience.min(Duration::from_secs(5)), self.alive());
                    dead = dead || !alive.await.unwrap_or(false);
                }
            }
            if left.is_empty() || dead {
                break;
            }
        }
        for made in self.ledger.all() {
            if let What::Attachment(attachment) = made.what {
                left.extend(force(&attachment));
            }
        }
        left
    }
}

/// The ids of a thing. Where the call that makes it never answered, it tells them made again.
async fn ids_of(plugin: &Plugin, made: &Made) -> Result<Vec<String>, Wrong> {
    Ok(match &made.what {
        _ if !made.ids.is_empty() => made.ids.clone(),
        What::Volume(request) => vec![plugin.create_volume_again((**request).clone()).await?.volume_id],
        What::Snapshot(request) => vec![plugin.create_snapshot_again((**request).clone(), false).await?],
        What::Group(request) => plugin.create_group_again((**request).clone()).await?.into(),
        What::Attachment(_) => Vec::new(),
    })
}

async fn undo(plugin: &Plugin, made: &Made) -> Result<(), Wrong> {
    let ids = match ids_of(plugin, made).await {
        // There is none.
        Err(refused) if !refused.is_silence() => return Ok(()),
        ids => ids?,
    };
    match (&made.what, &ids[..]) {
        (What::Attachment(attachment), _) => plugin.detach(&attachment.volume_id).await,
        (What::Volume(_), [id, ..]) => plugin.delete_volume(id).await,
        (What::Snapshot(_), [id, ..]) => plugin.delete_snapshot(id).await,
        (What::Group(_), [group, member, ..]) => plugin.delete_group(group, member).await,
        _ => Ok(()),
    }
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
