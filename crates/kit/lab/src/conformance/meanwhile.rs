//! What is done while a snapshot is streamed: its volume is modified, expanded or cloned, or it is deleted itself.

use tonic::Code;

use super::answer::{Answer, missing, name};
use super::complete::check_delta;
use super::content::Edit;
use super::fixtures::Fixtures;
use super::history::expand;
use super::life::{as_before, clear};
use super::rest::{Held, Rest, not_shown};
use super::subject::{Kind, Subject};
use super::verdict::{Judged, Verdict, Wrong, remarked};
use super::volume::{OpenVolume, Snap};
use csi_client::block_capability;

/// A published volume with two snapshots and changes between them.
async fn written(fixtures: &Fixtures) -> Result<(OpenVolume, Snap, Snap), Wrong> {
    let mut open = fixtures.plugin.open(None, fixtures.plugin.settings.volume_size).await?;
    open.write(edits(&open, 1)).await?;
    let before = open.snapshot(&fixtures.plugin).await?;
    open.write(edits(&open, 3)).await?;
    let after = open.snapshot(&fixtures.plugin).await?;
    Ok((open, before, after))
}

fn edits(open: &OpenVolume, seed: u64) -> Vec<Edit> {
    let step = open.blocks() / 512;
    (1..500).map(|place| Edit::Write { start: place * step + seed, count: 1, seed }).collect()
}

/// What is done while a snapshot is streamed: to its volume, or to itself.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    Modify,
    Expand,
    Clone,
    Delete,
}

impl Work {
    /// What was done, and how one calls that.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Work::Modify => ("modified", "modification"),
            Work::Expand => ("expanded", "expansion"),
            Work::Clone => ("cloned", "clone"),
            Work::Delete => ("deleted", "deletion"),
        }
    }

    async fn run(self, fixtures: &Fixtures, open: &mut OpenVolume, snapshot: &str) -> Result<(), Wrong> {
        let plugin = &fixtures.plugin;
        match self {
            Work::Modify => plugin.modify_volume(&open.volume.id).await,
            Work::Expand => {
                // Whole MiB, for drivers that count in them.
                let wanted = open.size + (open.size / 8).next_multiple_of(1 << 20);
                expand(plugin, open, wanted).await
            }
            Work::Clone => {
                let source = csi_client::from_volume(&open.volume.id);
                let clone = plugin.create_volume(block_capability(), Some(source), open.size).await?;
                plugin.delete_volume(&clone.id).await
            }
            Work::Delete => match plugin.delete_snapshot(snapshot).await {
                // A snapshot in use may be kept; then its stream must be whole.
                Err(wrong) if wrong.code() == Some(Code::FailedPrecondition) => Ok(()),
                ended => ended,
            },
        }
    }
}

/// Does the work while an answer with very many tuples is read: it loses nothing and tells no other capacity, and neither does the
/// same answer afterwards. A snapshot that is deleted may also end its stream with an error.
///
/// What a driver, or anything before it, has handed over cannot be seen from here, however small the window is, so a stream that
/// waits for its reader may be over. It passes only where such a stream was seen to stay open, so that the work fell into it.
async fn whole_meanwhile(fixtures: &Fixtures, kind: Kind, work: Work) -> Judged {
    let dense = fixtures.dense()?;
    let mut open = dense.open.lock().await;
    let target = match work {
        Work::Delete => Snap { id: open.snapshot(&fixtures.plugin).await?.id, ..dense.after.clone() },
        _ => dense.after.clone(),
    };
    let question = match kind {
        Kind::Allocated => target.allocated(),
        Kind::Delta => target.since(&dense.before),
    };
    let was = fixtures.ask(&question, 0, 0).await?;
    let Held { rests, at, waits } = fixtures.held(kind)?;
    let rest = &rests[*at].of_same_length(&question, &was);
    let is = meanwhile(fixtures, rest, work.run(fixtures, &mut open, &target.id)).await?;
    let (done, what) = work.names();
    if is.end.is_err() && work == Work::Delete {
        // It was open: one that was over would have ended with OK.
        return Ok(Verdict::Pass);
    }
    let is = is.ok(&question, &rest.options(fixtures))?;
    let place = format!("{done} while it was streamed");
    missing("that were listed before", &rest.must, &is.ranges()).map_err(|wrong| wrong.at(&place))?;
    if is.messages.iter().any(|message| Some(message.capacity) != was.capacity()) {
        return Err(Wrong::new(format!("{place}: another volume_capacity_bytes")));
    }
    if work != Work::Delete {
        as_before(fixtures, &[(question, was)], &format!("before the volume was {done}")).await?;
    }
    match *waits {
        true => Ok(Verdict::Pass),
        false => Ok(not_shown::<Fixtures>(rests, what)),
    }
}

/// The same of both streams.
async fn both_meanwhile(fixtures: &Fixtures, work: Work) -> Judged {
    let mut verdict = Verdict::Pass;
    for kind in [Kind::Allocated, Kind::Delta] {
        match whole_meanwhile(fixtures, kind, work).await? {
            Verdict::Pass => {}
            other => verdict = other,
        }
    }
    Ok(verdict)
}

/// A volume that is modified between two snapshots, and once more while they are streamed: its attributes change, and no answer
/// about its blocks does.
pub(super) async fn modified(fixtures: &Fixtures) -> Judged {
    let plugin = &fixtures.plugin;
    if !plugin.claims.modify {
        return Ok(Verdict::Skip("the driver does not claim MODIFY_VOLUME".into()));
    }
    if plugin.settings.attributes.is_empty() {
        return Ok(Verdict::Skip("modified to what? --modify-parameter KEY=VALUE says it".into()));
    }
    let (mut open, before, middle) = written(fixtures).await?;
    plugin.modify_volume(&open.volume.id).await?;
    open.write(edits(&open, 5)).await?;
    let after = open.snapshot(&fixtures.plugin).await?;
    let complete = check_delta(fixtures, &before, &after).await;
    clear(fixtures, &open.volume.id, &[&after, &middle, &before]).await?;
    let remarks = complete?;
    match both_meanwhile(fixtures, Work::Modify).await? {
        Verdict::Pass => remarked(remarks),
        other => Ok(other),
    }
}

/// A volume that grows while its snapshots are streamed: they stay as large as they were.
pub(super) async fn expanded(fixtures: &Fixtures) -> Judged {
    match fixtures.plugin.claims.expand {
        true => both_meanwhile(fixtures, Work::Expand).await,
        false => Ok(Verdict::Skip("the driver does not claim EXPAND_VOLUME".into())),
    }
}

/// A volume that is cloned while its snapshots are streamed.
pub(super) async fn cloned(fixtures: &Fixtures) -> Judged {
    match fixtures.plugin.claims.clone {
        true => both_meanwhile(fixtures, Work::Clone).await,
        false => Ok(Verdict::Skip("the driver does not claim CLONE_VOLUME".into())),
    }
}

/// A snapshot that is deleted while it is streamed: the whole answer, or an error.
pub(super) async fn deleted(fixtures: &Fixtures, kind: Kind) -> Judged {
    whole_meanwhile(fixtures, kind, Work::Delete).await
}

/// An answer after whose first message something is done, while the stream waits for its reader.
async fn meanwhile(
    fixtures: &Fixtures,
    rest: &Rest,
    work: impl Future<Output = Result<(), Wrong>>,
) -> Result<Answer, Wrong> {
    let mut client = fixtures.plugin.narrow().await?;
    let (question, options) = (&rest.question, rest.options(fixtures));
    let call = name(question, &options);
    let refused = |status| Wrong::call(&call, &status);
    let mut stream = client.open_stream(question, &options).await.map_err(refused)?;
    let first = stream.next().await.map_err(refused)?;
    work.await?;
    let mut answer = Answer::read(Ok(stream), &call).await?;
    answer.messages.splice(..0, first);
    Ok(answer)
}
