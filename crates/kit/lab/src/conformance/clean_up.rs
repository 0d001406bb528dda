//! Takes away what the suite made, also where the driver no longer answers.

use std::path::Path;
use std::time::Duration;

use super::attach::remove_place;
use super::ledger::{Attachment, Made, name};
use super::plugin::Plugin;
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
            for made in self.ledger().all().into_iter().rev() {
                let undone = match dead {
                    true => Err("the driver does not answer".to_owned()),
                    false => match tokio::time::timeout(patience, undo(self, &made)).await {
                        Ok(undone) => undone,
                        Err(_) => Err(format!("no answer within {} s", patience.as_secs())),
                    },
                };
                if let Err(error) = undone {
                    left.push(format!("{}: {error}", name(&made)));
                    let alive = tokio::time::timeout(patience.min(Duration::from_secs(5)), self.alive());
                    dead = dead || !alive.await.unwrap_or(false);
                }
            }
            if left.is_empty() || dead {
                break;
            }
        }
        for made in self.ledger().all() {
            if let Made::Attachment(attachment) = made {
                left.extend(force(&attachment));
            }
        }
        left
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
