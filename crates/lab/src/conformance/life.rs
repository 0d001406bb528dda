//! What happens around a snapshot: its volume grows, is written on, restored from and deleted;
//! snapshots beside it go.

use tonic::Code;

use super::answer::{Answer, missing, unexpected};
use super::case::{Judged, Verdict, Wrong, remarked, said};
use super::complete::{check_allocated, check_delta, right_capacity};
use super::content::{BLOCK, Edit, apply};
use super::history::short;
use super::lab::{Kind, Lab, Snap};
use csi_client::{Question, mount_capability};

/// A snapshot from before the expansion is as large as it was.
pub(super) async fn old_capacity(lab: &Lab) -> Judged {
    let before = &lab.expanded()?.before;
    let answer = lab.ask(&before.allocated(), 0, 0).await?;
    if answer.messages.is_empty() {
        return Err(Wrong::new("OK without a message, though the volume was written"));
    }
    right_capacity(&answer, before)?;
    remarked(check_allocated(lab, before).await?)
}

/// One from after it is as large as the volume is, and its delta has the new part.
pub(super) async fn new_capacity(lab: &Lab) -> Judged {
    let change = lab.expanded()?;
    for question in [change.after.allocated(), change.after.since(&change.before)] {
        let answer = lab.ask(&question, 0, 0).await?;
        if answer.messages.is_empty() {
            return Err(Wrong::new("OK without a message, though the volume was written"));
        }
        right_capacity(&answer, &change.after)?;
    }
    Ok(Verdict::Pass)
}

pub(super) async fn grown(lab: &Lab) -> Judged {
    let change = lab.expanded()?;
    let mut remarks = check_delta(lab, &change.before, &change.after).await?;
    remarks.extend(check_allocated(lab, &change.after).await?);
    // An offset that the base does not have.
    let (question, offset) = (change.after.since(&change.before), change.before.size + BLOCK);
    let answer = lab.ask(&question, offset as i64, 0).await?;
    let must = change.after.content.data().within(offset, u64::MAX);
    missing("in the new part", &must, &answer.ranges())?;
    remarks.truncate(1);
    remarked(remarks)
}

/// A restore between two snapshots costs the delta nothing.
pub(super) async fn restored_between(lab: &Lab) -> Judged {
    let change = lab.between()?;
    remarked(check_delta(lab, &change.before, &change.after).await?)
}

/// What a restored volume was restored with is its data, too.
pub(super) async fn of_restored(lab: &Lab) -> Judged {
    let copy = lab.between()?.copy.as_ref().ok_or_else(|| Wrong::new("no copy was made"))?;
    remarked(check_allocated(lab, copy).await?)
}

/// Both answers about the second snapshot.
async fn both(lab: &Lab, before: &Snap, after: &Snap) -> Result<Vec<(Question, Answer)>, Wrong> {
    let mut answers = Vec::new();
    for question in [after.allocated(), after.since(before)] {
        let answer = lab.ask(&question, 0, 0).await?;
        answers.push((question, answer));
    }
    Ok(answers)
}

/// The same questions, answered as before.
async fn as_before(lab: &Lab, answers: &[(Question, Answer)], what: &str) -> Result<(), Wrong> {
    for (question, was) in answers {
        let is = lab.ask(question, 0, 0).await.map_err(|wrong| wrong.at(what))?;
        missing(&format!("that were listed {what}"), &was.ranges(), &is.ranges())?;
        if is.capacity() != was.capacity() {
            let told = format!("volume_capacity_bytes {:?} became {:?}", was.capacity(), is.capacity());
            return Err(Wrong::new(told).at(what));
        }
    }
    Ok(())
}

/// The volume goes on; its snapshots do not.
pub(super) async fn written_on(lab: &Lab) -> Judged {
    let (pen, change) = short(lab).await?;
    let answers = both(lab, &change.before, &change.after).await?;
    let step = pen.blocks() / 64;
    let edits = (0..64).map(|place| Edit::Write { start: place * step + 7, count: 8, seed: 9 }).collect();
    apply(pen.content.clone(), pen.device.clone(), edits).await?;
    let same = as_before(lab, &answers, "before the volume was written on").await;
    let complete = check_delta(lab, &change.before, &change.after).await;
    clear(lab, &pen.volume.id, &[&change.after, &change.before]).await?;
    same?;
    remarked(complete?)
}

/// Detaches and deletes a volume and its snapshots.
async fn clear(lab: &Lab, volume_id: &str, snaps: &[&Snap]) -> Result<(), Wrong> {
    lab.plugin.detach(volume_id).await?;
    for snap in snaps {
        lab.plugin.delete_snapshot(&snap.id).await?;
    }
    lab.plugin.delete_volume(volume_id).await
}

pub(super) async fn source_deleted(lab: &Lab) -> Judged {
    let (pen, change) = short(lab).await?;
    let answers = both(lab, &change.before, &change.after).await?;
    lab.plugin.detach(&pen.volume.id).await?;
    if let Err(refused) = lab.plugin.delete_volume(&pen.volume.id).await {
        return match refused.code() {
            Some(Code::FailedPrecondition) => Ok(Verdict::Skip(format!("the volume stays: {refused}"))),
            _ => Err(refused),
        };
    }
    as_before(lab, &answers, "before the source volume was deleted").await?;
    let remarks = check_delta(lab, &change.before, &change.after).await?;
    lab.plugin.delete_snapshot(&change.after.id).await?;
    lab.plugin.delete_snapshot(&change.before.id).await?;
    remarked(remarks)
}

/// A chain is no weaker for a link that is gone.
pub(super) async fn middle_deleted(lab: &Lab) -> Judged {
    let (mut pen, change) = short(lab).await?;
    let step = pen.blocks() / 16;
    pen.write((0..8).map(|place| Edit::Write { start: place * step + 33, count: 4, seed: 5 }).collect())
        .await?;
    let last = pen.snapshot(lab).await?;
    lab.plugin.delete_snapshot(&change.after.id).await?;
    let remarks = check_delta(lab, &change.before, &last).await?;
    clear(lab, &pen.volume.id, &[&last, &change.before]).await?;
    remarked(remarks)
}

/// A base that was deleted: not found, or answered as if it were there.
pub(super) async fn base_deleted(lab: &Lab) -> Judged {
    let (pen, change) = short(lab).await?;
    lab.plugin.delete_snapshot(&change.before.id).await?;
    let (question, options) = (change.after.since(&change.before), lab.options(0, 0));
    let answer = lab.try_ask(&question, &options).await?;
    let judged = match &answer.end {
        Ok(()) => {
            let changed = change.after.content.changed_since(&change.before.content);
            missing("that changed since the deleted base", &changed, &answer.ranges())
                .map(|()| Verdict::Allowed("a delta from a deleted base is answered, and complete".into()))
        }
        Err(status) if status.code() == Code::NotFound => Ok(Verdict::Pass),
        Err(_) => Err(unexpected(&question, &options, &answer, "NOT_FOUND")),
    };
    clear(lab, &pen.volume.id, &[&change.after]).await?;
    judged
}

/// A volume with a filesystem is a row of blocks below it; the spec speaks of block volumes.
pub(super) async fn filesystem(lab: &Lab) -> Judged {
    let bytes = lab.plugin.settings.volume_size;
    let volume = match lab.plugin.create_volume(mount_capability(""), None, bytes).await {
        Ok(volume) => volume,
        Err(refused) if refused.is_silence() => return Err(refused),
        Err(refused) => return Ok(Verdict::Skip(format!("no Filesystem volume: {refused}"))),
    };
    let dir = lab.plugin.attach(&volume).await?;
    super::content::blocking(move |_| {
        let file = std::fs::File::create(dir.join("file"))?;
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 64 << 10], 0)?;
        Ok(file.sync_all()?)
    })
    .await
    .map_err(|wrong| wrong.at("write a file"))?;
    let id = lab.plugin.create_snapshot(&volume.id).await?;
    let (question, options) = (Question::Allocated { snapshot: id.clone() }, lab.options(0, 0));
    let answer = lab.try_ask(&question, &options).await?;
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
    lab.plugin.detach(&volume.id).await?;
    lab.plugin.delete_snapshot(&id).await?;
    lab.plugin.delete_volume(&volume.id).await?;
    judged
}

/// A snapshot that is deleted while it is streamed: the whole answer, or an error.
pub(super) async fn deleted_meanwhile(lab: &Lab, kind: Kind) -> Judged {
    let pair = lab.pair()?;
    let snap = Snap { id: lab.plugin.create_snapshot(&pair.pen.volume.id).await?, ..pair.third.clone() };
    let question = match kind {
        Kind::Allocated => snap.allocated(),
        Kind::Delta => snap.since(&pair.first),
    };
    let whole = lab.ask(&question, 0, 0).await?;
    let mut client = lab.plugin.narrow().await?;
    let options = lab.options(0, 1);
    let refused = |status| Wrong::call(&super::answer::name(&question, &options), &status);
    let mut stream = client.open_stream(&question, &options).await.map_err(refused)?;
    let mut answer = Answer { messages: Vec::new(), end: Ok(()) };
    answer.messages.extend(stream.next().await.map_err(refused)?);
    match lab.plugin.delete_snapshot(&snap.id).await {
        Ok(()) => {}
        // A snapshot in use may be kept; then its stream must be whole.
        Err(wrong) if wrong.code() == Some(Code::FailedPrecondition) => {}
        Err(wrong) => return Err(wrong),
    }
    loop {
        match stream.next().await {
            Ok(Some(message)) => answer.messages.push(message),
            Ok(None) => break,
            Err(_) => return Ok(Verdict::Pass),
        }
    }
    missing("of the whole answer", &whole.ranges(), &answer.ranges())
        .map_err(|wrong| wrong.at("ended with OK after DeleteSnapshot"))?;
    Ok(Verdict::Pass)
}
