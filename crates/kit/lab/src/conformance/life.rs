//! What happens around a snapshot: its volume grows, is written on, modified, restored from and deleted;
//! other snapshots are deleted.

use tonic::Code;

use super::answer::{Answer, missing, unexpected};
use super::complete::{check_allocated, check_delta, right_capacity};
use super::content::{BLOCK, Edit, apply};
use super::fixtures::Fixtures;
use super::history::short;
use super::subject::Subject;
use super::verdict::{Judged, Verdict, Wrong, remarked, remarked_once, said};
use super::volume::Snap;
use csi_client::{Question, mount_capability};

/// A snapshot from before the expansion is as large as it was.
pub(super) async fn old_capacity(fixtures: &Fixtures) -> Judged {
    let before = &fixtures.expanded()?.before;
    let answer = fixtures.ask(&before.allocated(), 0, 0).await?;
    if answer.messages.is_empty() {
        return Err(Wrong::new("OK without a message, though the volume was written"));
    }
    right_capacity(&answer, before)?;
    remarked(check_allocated(fixtures, before).await?)
}

/// One from after it is as large as the volume is, and its delta has the new part.
pub(super) async fn new_capacity(fixtures: &Fixtures) -> Judged {
    let change = fixtures.expanded()?;
    for question in [change.after.allocated(), change.after.since(&change.before)] {
        let answer = fixtures.ask(&question, 0, 0).await?;
        if answer.messages.is_empty() {
            return Err(Wrong::new("OK without a message, though the volume was written"));
        }
        right_capacity(&answer, &change.after)?;
    }
    Ok(Verdict::Pass)
}

pub(super) async fn grown(fixtures: &Fixtures) -> Judged {
    let change = fixtures.expanded()?;
    let mut remarks = check_delta(fixtures, &change.before, &change.after).await?;
    remarks.extend(check_allocated(fixtures, &change.after).await?);
    // An offset that the base does not have.
    let (question, offset) = (change.after.since(&change.before), change.before.size + BLOCK);
    let answer = fixtures.ask(&question, offset as i64, 0).await?;
    let must = change.after.content.data().within(offset, u64::MAX);
    missing("in the new part", &must, &answer.ranges())?;
    remarked_once(remarks)
}

/// A restore between two snapshots costs the delta nothing.
pub(super) async fn restored_between(fixtures: &Fixtures) -> Judged {
    let change = fixtures.between()?;
    remarked(check_delta(fixtures, &change.before, &change.after).await?)
}

/// What a restored volume was restored with is its data, too.
pub(super) async fn of_restored(fixtures: &Fixtures) -> Judged {
    let copy = fixtures.between()?.copy.as_ref().ok_or_else(|| Wrong::new("no copy was made"))?;
    remarked(check_allocated(fixtures, copy).await?)
}

/// Both answers about the second snapshot.
pub(super) async fn both(
    fixtures: &Fixtures,
    before: &Snap,
    after: &Snap,
) -> Result<Vec<(Question, Answer)>, Wrong> {
    let mut answers = Vec::new();
    for question in [after.allocated(), after.since(before)] {
        let answer = fixtures.ask(&question, 0, 0).await?;
        answers.push((question, answer));
    }
    Ok(answers)
}

/// The same questions, answered as before.
pub(super) async fn as_before(
    fixtures: &Fixtures,
    answers: &[(Question, Answer)],
    what: &str,
) -> Result<(), Wrong> {
    for (question, was) in answers {
        let is = fixtures.ask(question, 0, 0).await.map_err(|wrong| wrong.at(what))?;
        missing(&format!("that were listed {what}"), &was.ranges(), &is.ranges())?;
        if is.capacity() != was.capacity() {
            let found = format!("volume_capacity_bytes {:?} became {:?}", was.capacity(), is.capacity());
            return Err(Wrong::new(found).at(what));
        }
    }
    Ok(())
}

/// The volume changes; its snapshots do not.
pub(super) async fn written_on(fixtures: &Fixtures) -> Judged {
    let (open, change) = short(&fixtures.plugin).await?;
    let answers = both(fixtures, &change.before, &change.after).await?;
    let step = open.blocks() / 64;
    let edits = (0..64).map(|place| Edit::Write { start: place * step + 7, count: 8, seed: 9 }).collect();
    apply(open.content.clone(), open.device.clone(), edits).await?;
    let same = as_before(fixtures, &answers, "before the volume was written on").await;
    let complete = check_delta(fixtures, &change.before, &change.after).await;
    clear(fixtures, &open.volume.id, &[&change.after, &change.before]).await?;
    same?;
    remarked(complete?)
}

/// Detaches and deletes a volume and its snapshots.
pub(super) async fn clear(fixtures: &Fixtures, volume_id: &str, snaps: &[&Snap]) -> Result<(), Wrong> {
    fixtures.plugin.detach(volume_id).await?;
    for snap in snaps {
        fixtures.plugin.delete_snapshot(&snap.id).await?;
    }
    fixtures.plugin.delete_volume(volume_id).await
}

pub(super) async fn source_deleted(fixtures: &Fixtures) -> Judged {
    let (open, change) = short(&fixtures.plugin).await?;
    let answers = both(fixtures, &change.before, &change.after).await?;
    fixtures.plugin.detach(&open.volume.id).await?;
    if let Err(refused) = fixtures.plugin.delete_volume(&open.volume.id).await {
        return match refused.code() {
            Some(Code::FailedPrecondition) => Ok(Verdict::Skip(format!("the volume stays: {refused}"))),
            _ => Err(refused),
        };
    }
    as_before(fixtures, &answers, "before the source volume was deleted").await?;
    let remarks = check_delta(fixtures, &change.before, &change.after).await?;
    fixtures.plugin.delete_snapshot(&change.after.id).await?;
    fixtures.plugin.delete_snapshot(&change.before.id).await?;
    remarked(remarks)
}

/// A chain is not weaker when a link is gone.
pub(super) async fn middle_deleted(fixtures: &Fixtures) -> Judged {
    let (mut open, change) = short(&fixtures.plugin).await?;
    let step = open.blocks() / 16;
    open.write((0..8).map(|place| Edit::Write { start: place * step + 33, count: 4, seed: 5 }).collect())
        .await?;
    let last = open.snapshot(&fixtures.plugin).await?;
    fixtures.plugin.delete_snapshot(&change.after.id).await?;
    let remarks = check_delta(fixtures, &change.before, &last).await?;
    clear(fixtures, &open.volume.id, &[&last, &change.before]).await?;
    remarked(remarks)
}

/// A base that was deleted: not found, or answered as if it were there.
pub(super) async fn base_deleted(fixtures: &Fixtures) -> Judged {
    let (open, change) = short(&fixtures.plugin).await?;
    fixtures.plugin.delete_snapshot(&change.before.id).await?;
    let (question, options) = (change.after.since(&change.before), fixtures.options(0, 0));
    let answer = fixtures.try_ask(&question, &options).await?;
    let judged = match &answer.end {
        Ok(()) => {
            let changed = change.after.content.changed_since(&change.before.content);
            missing("that changed since the deleted base", &changed, &answer.ranges())
                .map(|()| Verdict::Allowed("a delta from a deleted base is answered, and complete".into()))
        }
        Err(status) if status.code() == Code::NotFound => Ok(Verdict::Pass),
        Err(_) => Err(unexpected(&question, &options, &answer, "NOT_FOUND")),
    };
    clear(fixtures, &open.volume.id, &[&change.after]).await?;
    judged
}

/// What it says of a deleted base is one of two contracts, and it keeps to it: asked again, and from an offset.
pub(super) async fn base_deleted_again(fixtures: &Fixtures) -> Judged {
    let (open, change) = short(&fixtures.plugin).await?;
    let question = change.after.since(&change.before);
    let whole = fixtures.ask(&question, 0, 0).await?;
    fixtures.plugin.delete_snapshot(&change.before.id).await?;
    let middle = whole.tuples().nth(whole.tuples().count() / 2).map_or(0, |(offset, _)| offset + 1);
    let mut contracts = Vec::new();
    for offset in [0, 0, middle, 0] {
        let options = fixtures.options(offset, 0);
        let answer = fixtures.try_ask(&question, &options).await?;
        contracts.push(match &answer.end {
            Ok(()) => {
                let rest = whole.ranges().within(offset as u64, u64::MAX);
                missing("of the answer before the deletion", &rest, &answer.ranges())
                    .map_err(|wrong| wrong.at(&super::answer::name(&question, &options)))?;
                "answered"
            }
            Err(status) if status.code() == Code::NotFound => "NOT_FOUND",
            Err(_) => return Err(unexpected(&question, &options, &answer, "NOT_FOUND")),
        });
    }
    clear(fixtures, &open.volume.id, &[&change.after]).await?;
    match contracts.iter().all(|contract| *contract == contracts[0]) {
        true if contracts[0] == "answered" => Ok(Verdict::Allowed(
            "its contract: bases may be deleted, their deltas stay (requireBaseSnapshotForDelta: false)"
                .into(),
        )),
        true => Ok(Verdict::Pass),
        false => Err(Wrong::new(format!("of one deleted base it said {}", contracts.join(", then ")))),
    }
}

/// A clone between two snapshots, written to, costs the delta nothing.
pub(super) async fn cloned_between(fixtures: &Fixtures) -> Judged {
    if !fixtures.plugin.claims.clone {
        return Ok(Verdict::Skip("the driver does not claim CLONE_VOLUME".into()));
    }
    let mut open = fixtures.plugin.open(None, fixtures.plugin.settings.volume_size).await?;
    open.write_places(1).await?;
    let before = open.snapshot(&fixtures.plugin).await?;
    open.write_places(4).await?;
    let mut clone =
        fixtures.plugin.open_from(Some(csi_client::from_volume(&open.volume.id)), open.size).await?;
    clone.content = open.content.clone();
    clone.write_places(8).await?;
    open.write_places(12).await?;
    let after = open.snapshot(&fixtures.plugin).await?;
    let of_clone = clone.snapshot(&fixtures.plugin).await?;
    let delta = check_delta(fixtures, &before, &after).await;
    let allocated = check_allocated(fixtures, &of_clone).await;
    clear(fixtures, &clone.volume.id, &[&of_clone]).await?;
    clear(fixtures, &open.volume.id, &[&after, &before]).await?;
    let mut remarks = delta?;
    remarks.extend(allocated?);
    remarked_once(remarks)
}

/// A size that is not a multiple of what drivers count in: the driver may round it up, and tells what it made.
pub(super) async fn tail(fixtures: &Fixtures) -> Judged {
    let bytes = fixtures.plugin.settings.volume_size + BLOCK + 512;
    let mut open = match fixtures.plugin.open(None, bytes).await {
        Ok(open) => open,
        Err(refused)
            if refused.code() == Some(Code::OutOfRange) || refused.code() == Some(Code::InvalidArgument) =>
        {
            return Ok(Verdict::Skip(format!("no volume of {bytes} bytes: {refused}")));
        }
        Err(wrong) => return Err(wrong),
    };
    let last = open.blocks() - 1;
    open.write(vec![Edit::Write { start: last, count: 1, seed: 1 }]).await?;
    let before = open.snapshot(&fixtures.plugin).await?;
    open.write(vec![Edit::Write { start: last, count: 1, seed: 2 }]).await?;
    let after = open.snapshot(&fixtures.plugin).await?;
    let mut judged = Ok(Verdict::Pass);
    for (question, snap) in [(before.allocated(), &before), (after.since(&before), &after)] {
        let answer = fixtures.ask(&question, 0, 0).await?;
        let found = missing("at the end of the volume", &snap.content.data(), &answer.ranges());
        let found = found.and_then(|()| right_capacity(&answer, snap));
        judged = judged.and_then(|verdict| found.map(|()| verdict));
    }
    clear(fixtures, &open.volume.id, &[&after, &before]).await?;
    judged
}

/// Two group snapshots of one volume: members are base and target.
pub(super) async fn group_members(fixtures: &Fixtures) -> Judged {
    if !fixtures.plugin.claims.groups {
        return Ok(Verdict::Skip("the driver does not claim CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT".into()));
    }
    let mut open = fixtures.plugin.open(None, fixtures.plugin.settings.volume_size).await?;
    let mut members = Vec::new();
    for seed in [1, 3] {
        open.write_places(seed).await?;
        let [group, id] = fixtures.plugin.create_group(&open.volume.id).await?;
        members.push((group, open.taken(id)));
    }
    // And one that was taken alone.
    open.write_places(5).await?;
    let alone = open.snapshot(&fixtures.plugin).await?;
    let (first, second) = (&members[0].1, &members[1].1);
    let mut remarks = Vec::new();
    let mut judged = Ok(());
    for (base, target) in [(first, second), (first, &alone), (second, &alone)] {
        if judged.is_ok() {
            judged = check_delta(fixtures, base, target).await.map(|more| remarks.extend(more));
        }
    }
    for (group, member) in &members {
        fixtures.plugin.delete_group(group, &member.id).await?;
    }
    clear(fixtures, &open.volume.id, &[&alone]).await?;
    judged?;
    remarked_once(remarks)
}

/// Whether this is how a driver refuses what it does not have. All else is a fault of one that has it.
fn is_not_made(refused: &Wrong) -> bool {
    use tonic::Code::{FailedPrecondition, InvalidArgument, OutOfRange, Unimplemented};
    matches!(refused.code(), Some(FailedPrecondition | InvalidArgument | OutOfRange | Unimplemented))
}

/// A volume with a filesystem is a row of blocks below it; the spec speaks of block volumes.
pub(super) async fn filesystem(fixtures: &Fixtures) -> Judged {
    let bytes = fixtures.plugin.settings.volume_size;
    let made = async {
        let volume = fixtures.plugin.create_volume(mount_capability(""), None, bytes).await?;
        let dir = fixtures.plugin.attach(&volume).await?;
        Ok::<_, Wrong>((volume, dir))
    };
    let (volume, dir) = match made.await {
        Ok(made) => made,
        Err(refused) if is_not_made(&refused) => {
            return Ok(Verdict::NotShown(format!("the driver makes no Filesystem volume: {refused}")));
        }
        Err(wrong) => return Err(wrong),
    };
    super::content::blocking(move |_| {
        let file = std::fs::File::create(dir.join("file"))?;
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 64 << 10], 0)?;
        Ok(file.sync_all()?)
    })
    .await
    .map_err(|wrong| wrong.at("write a file"))?;
    let id = fixtures.plugin.create_snapshot(&volume.id).await?;
    let (question, options) = (Question::Allocated { snapshot: id.clone() }, fixtures.options(0, 0));
    let answer = fixtures.try_ask(&question, &options).await?;
    let judged = match &answer.end {
        Ok(()) if answer.ranges().bytes() < 64 << 10 => {
            Err(unexpected(&question, &options, &answer, "as many bytes as were written"))
        }
        Ok(()) => Ok(Verdict::Pass),
        Err(status) => match status.code() {
            Code::FailedPrecondition | Code::InvalidArgument | Code::Unimplemented => {
                Ok(Verdict::Allowed(format!("not for Filesystem volumes: {}", said(status))))
            }
            _ => Err(Wrong::call("GetMetadataAllocated of a Filesystem volume", status)),
        },
    };
    fixtures.plugin.detach(&volume.id).await?;
    fixtures.plugin.delete_snapshot(&id).await?;
    fixtures.plugin.delete_volume(&volume.id).await?;
    judged
}
