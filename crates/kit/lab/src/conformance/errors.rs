//! Requests that have to be refused, and with which code.

use tonic::Code;

use super::answer::unexpected;
use super::fixtures::Fixtures;
use super::subject::Kind;
use super::subject::Subject;
use super::verdict::{Judged, Verdict, Wrong, code_name, remarked, remarked_once, said, without_message};
use csi_client::{Options, Question, block_capability};

/// Ids that no driver has given to anything.
pub(super) const NO_IDS: [&str; 3] =
    ["no-such-snapshot", "../../etc/passwd", "00000000-0000-0000-0000-000000000000"];

pub(super) async fn claimed(fixtures: &Fixtures) -> Judged {
    match fixtures.plugin.claims.metadata {
        true => Ok(Verdict::Pass),
        false => Err(Wrong::new(
            "the service is served, but GetPluginCapabilities does not list SNAPSHOT_METADATA_SERVICE: no sidecar \
             will use it",
        )),
    }
}

pub(super) async fn served(subject: &impl Subject, kind: Kind) -> Judged {
    let question = subject.question(kind)?;
    subject.ask(&question, 0, 0).await?;
    Ok(Verdict::Pass)
}

/// Each question must be refused with `code`; codes that the spec allows besides are remarked.
pub(super) async fn refused(
    subject: &impl Subject,
    questions: &[Question],
    options: &Options,
    code: Code,
    also: &[Code],
) -> Judged {
    let mut remarks = Vec::new();
    for question in questions {
        let answer = subject.try_ask(question, options).await?;
        match &answer.end {
            Err(status) if status.code() == code => {}
            Err(status) if also.contains(&status.code()) => {
                let remark = format!("{}, where {} is the plain answer", said(status), code_name(code));
                remarks.push(remark);
            }
            _ => return Err(unexpected(question, options, &answer, &code_name(code))),
        }
    }
    remarked_once(remarks)
}

fn delta(base: &str, target: &str) -> Question {
    Question::Delta { base: base.to_owned(), target: target.to_owned() }
}

fn allocated(snapshot: &str) -> Question {
    Question::Allocated { snapshot: snapshot.to_owned() }
}

pub(super) async fn missing_id(fixtures: &Fixtures, kind: Kind) -> Judged {
    let id = &fixtures.pair()?.second.id;
    let questions = match kind {
        Kind::Allocated => vec![allocated("")],
        Kind::Delta => vec![delta("", ""), delta("", id), delta(id, "")],
    };
    refused(fixtures, &questions, &fixtures.options(0, 0), Code::InvalidArgument, &[]).await
}

/// An id that was good until its snapshot was deleted.
pub(super) async fn deleted_id(fixtures: &Fixtures, kind: Kind) -> Judged {
    let pair = fixtures.pair()?;
    let id = fixtures.plugin.create_snapshot(&pair.open.volume.id).await?;
    fixtures.plugin.delete_snapshot(&id).await?;
    let question = match kind {
        Kind::Allocated => allocated(&id),
        Kind::Delta => delta(&pair.first.id, &id),
    };
    refused(fixtures, &[question], &fixtures.options(0, 0), Code::NotFound, &[]).await
}

/// Ids that are none: a driver may also say that they cannot be one.
pub(super) async fn unknown_id(fixtures: &Fixtures, kind: Kind) -> Judged {
    let id = &fixtures.pair()?.first.id;
    let questions: Vec<Question> = match kind {
        Kind::Allocated => NO_IDS.iter().map(|none| allocated(none)).collect(),
        Kind::Delta => NO_IDS.iter().flat_map(|none| [delta(none, id), delta(id, none)]).collect(),
    };
    refused(fixtures, &questions, &fixtures.options(0, 0), Code::NotFound, &[Code::InvalidArgument]).await
}

/// A negative bound: refused, or taken for none.
pub(super) async fn negative_bound(subject: &impl Subject, kind: Kind) -> Judged {
    let question = subject.question(kind)?;
    let whole = subject.ask(&question, 0, 0).await?;
    let mut remarks = Vec::new();
    for max_results in [-1, i32::MIN] {
        let options = subject.options(0, max_results);
        let answer = subject.try_ask(&question, &options).await?;
        match &answer.end {
            Err(status) if status.code() == Code::InvalidArgument => {}
            Ok(()) if answer.ranges() == whole.ranges() => {
                remarks.push(format!("max_results {max_results} is taken for 0"));
            }
            Err(status) if status.code() == Code::OutOfRange => {
                remarks.push(format!("max_results {max_results}: {}", said(status)));
            }
            _ => {
                return Err(unexpected(&question, &options, &answer, &code_name(Code::InvalidArgument)));
            }
        }
    }
    remarked(remarks)
}

pub(super) async fn reversed(subject: &impl Subject) -> Judged {
    let questions = subject.reversed()?;
    let also = [Code::FailedPrecondition, Code::OutOfRange];
    refused(subject, &questions, &subject.options(0, 0), Code::InvalidArgument, &also).await
}

pub(super) async fn other_volume(fixtures: &Fixtures) -> Judged {
    let pair = fixtures.pair()?;
    let bytes = fixtures.plugin.settings.volume_size;
    let volume = fixtures.plugin.create_volume(block_capability(), None, bytes).await?;
    let other = fixtures.plugin.create_snapshot(&volume.id).await?;
    let questions = [delta(&pair.first.id, &other), delta(&other, &pair.second.id)];
    let also = [Code::FailedPrecondition];
    let judged = refused(fixtures, &questions, &fixtures.options(0, 0), Code::InvalidArgument, &also).await;
    fixtures.plugin.delete_snapshot(&other).await?;
    fixtures.plugin.delete_volume(&volume.id).await?;
    judged
}

/// The spec wants a target that is newer than its base; nothing has changed since itself.
pub(super) async fn same_snapshot(subject: &impl Subject) -> Judged {
    let question = subject.same()?;
    let options = subject.options(0, 0);
    let answer = subject.try_ask(&question, &options).await?;
    let tuples = answer.tuples().count();
    match &answer.end {
        Ok(()) if tuples > 0 => {
            Ok(Verdict::Allowed(format!("{tuples} tuples: more than has changed, nothing")))
        }
        Ok(()) if answer.messages.is_empty() => without_message(),
        Ok(()) => Ok(Verdict::Pass),
        Err(status) if status.code() == Code::InvalidArgument => {
            Ok(Verdict::Allowed(format!("refused: {}", said(status))))
        }
        Err(_) => Err(unexpected(&question, &options, &answer, "OK without tuples")),
    }
}
