//! What is done while a snapshot is streamed: its volume is modified, expanded or cloned, or it is deleted itself.

use tonic::Code;

use super::answer::{Answer, missing};
use super::case::{Judged, Verdict, Wrong, remarked};
use super::complete::check_delta;
use super::content::Edit;
use super::fixtures::{Fixtures, Kind, OpenVolume, Snap};
use super::history::expand;
use super::life::{as_before, both, clear};
use csi_client::{Question, block_capability};

/// A published volume with two snapshots, and more tuples between them than a server sends ahead of its reader.
async fn written(fixtures: &Fixtures) -> Result<(OpenVolume, Snap, Snap), Wrong> {
    let mut open = fixtures.open(None, fixtures.plugin.settings.volume_size).await?;
    open.write(edits(&open, 1)).await?;
    let before = open.snapshot(fixtures).await?;
    open.write(edits(&open, 3)).await?;
    let after = open.snapshot(fixtures).await?;
    Ok((open, before, after))
}

fn edits(open: &OpenVolume, seed: u64) -> Vec<Edit> {
    let step = open.blocks() / 512;
    (1..500).map(|place| Edit::Write { start: place * step + seed, count: 1, seed }).collect()
}

/// What is done to a volume whose snapshots are streamed.
#[derive(Clone, Copy)]
enum Work {
    Modify,
    Expand,
    Clone,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Work::Modify => "modified",
            Work::Expand => "expanded",
            Work::Clone => "cloned",
        }
    }

    async fn run(self, fixtures: &Fixtures, open: &mut OpenVolume) -> Result<(), Wrong> {
        let plugin = &fixtures.plugin;
        match self {
            Work::Modify => plugin.modify_volume(&open.volume.id).await,
            Work::Expand => {
                let wanted = open.size + open.size / 4;
                expand(fixtures, open, wanted).await
            }
            Work::Clone => {
                let source = csi_client::from_volume(&open.volume.id);
                let clone = plugin.create_volume(block_capability(), Some(source), open.size).await?;
                plugin.delete_volume(&clone.id).await
            }
        }
    }
}

/// Streams both answers about `after`, does the work while each is read, and asks again: no answer loses anything or tells
/// another capacity.
async fn whole_meanwhile(
    fixtures: &Fixtures,
    open: &mut OpenVolume,
    (before, after): (&Snap, &Snap),
    work: Work,
) -> Result<(), Wrong> {
    let (answers, what) = (both(fixtures, before, after).await?, work.name());
    for (question, was) in &answers {
        let is = meanwhile(fixtures, question, work.run(fixtures, open)).await?;
        let is = is.ok(question, &fixtures.options(0, 1))?;
        let found = missing("that were listed before", &was.ranges(), &is.ranges());
        found.map_err(|wrong| wrong.at(&format!("{what} while it was streamed")))?;
        if is.messages.iter().any(|message| Some(message.capacity) != was.capacity()) {
            return Err(Wrong::new(format!("{what} while it was streamed: another volume_capacity_bytes")));
        }
    }
    as_before(fixtures, &answers, &format!("before the volume was {what}")).await
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
    let after = open.snapshot(fixtures).await?;
    let complete = check_delta(fixtures, &before, &after).await;
    let whole = whole_meanwhile(fixtures, &mut open, (&before, &after), Work::Modify).await;
    clear(fixtures, &open.volume.id, &[&after, &middle, &before]).await?;
    whole?;
    remarked(complete?)
}

/// A volume that grows while its snapshots are streamed: they stay as large as they were.
pub(super) async fn expanded(fixtures: &Fixtures) -> Judged {
    match fixtures.plugin.claims.expand {
        true => beside(fixtures, Work::Expand).await,
        false => Ok(Verdict::Skip("the driver does not claim EXPAND_VOLUME".into())),
    }
}

/// A volume that is cloned while its snapshots are streamed.
pub(super) async fn cloned(fixtures: &Fixtures) -> Judged {
    match fixtures.plugin.claims.clone {
        true => beside(fixtures, Work::Clone).await,
        false => Ok(Verdict::Skip("the driver does not claim CLONE_VOLUME".into())),
    }
}

async fn beside(fixtures: &Fixtures, work: Work) -> Judged {
    let (mut open, before, after) = written(fixtures).await?;
    let whole = whole_meanwhile(fixtures, &mut open, (&before, &after), work).await;
    clear(fixtures, &open.volume.id, &[&after, &before]).await?;
    whole?;
    Ok(Verdict::Pass)
}

/// A snapshot that is deleted while it is streamed: the whole answer, or an error.
pub(super) async fn deleted(fixtures: &Fixtures, kind: Kind) -> Judged {
    let pair = fixtures.pair()?;
    let snap =
        Snap { id: fixtures.plugin.create_snapshot(&pair.open.volume.id).await?, ..pair.third.clone() };
    let question = match kind {
        Kind::Allocated => snap.allocated(),
        Kind::Delta => snap.since(&pair.first),
    };
    let whole = fixtures.ask(&question, 0, 0).await?;
    let delete = async {
        match fixtures.plugin.delete_snapshot(&snap.id).await {
            // A snapshot in use may be kept; then its stream must be whole.
            Err(wrong) if wrong.code() == Some(Code::FailedPrecondition) => Ok(()),
            ended => ended,
        }
    };
    let answer = meanwhile(fixtures, &question, delete).await?;
    if answer.end.is_ok() {
        missing("of the whole answer", &whole.ranges(), &answer.ranges())
            .map_err(|wrong| wrong.at("ended with OK after DeleteSnapshot"))?;
    }
    Ok(Verdict::Pass)
}

/// An answer after whose first message something is done, while the stream waits for its reader.
async fn meanwhile(
    fixtures: &Fixtures,
    question: &Question,
    work: impl Future<Output = Result<(), Wrong>>,
) -> Result<Answer, Wrong> {
    let mut client = fixtures.plugin.narrow().await?;
    let options = fixtures.options(0, 1);
    let refused = |status| Wrong::call(&super::answer::name(question, &options), &status);
    let mut stream = client.open_stream(question, &options).await.map_err(refused)?;
    let mut answer = Answer { messages: Vec::new(), end: Ok(()) };
    answer.messages.extend(stream.next().await.map_err(refused)?);
    work.await?;
    loop {
        match stream.next().await {
            Ok(Some(message)) => answer.messages.push(message),
            Ok(None) => return Ok(answer),
            Err(status) => return Ok(Answer { end: Err(status), ..answer }),
        }
    }
}
