//! What is left of an interrupted backup. It is noted while a backup works, so that a killed one can continue too. `--resume`
//! continues it where it is of the same data.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::Request;
use super::state::State;
use crate::device::{Device, Identity};
use crate::error::Result;
use crate::repository::index::envelope;
use crate::repository::names::time_of;
use crate::repository::verify::as_index;
use crate::repository::writer::Writer;
use crate::repository::{About, Kind, Partial, Repository};
use crate::sampled;

/// Between two notes of how far a backup is: longer and longer, so that they take no part of it that counts.
const SOONEST: Duration = Duration::from_secs(1);
const LATEST: Duration = Duration::from_secs(60);
/// The share of the time that a kill may cost.
const SHARE: u32 = 32;
/// Between two looks at whether something has become durable.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What was interrupted of the same backup, where it can be gone on with. Of others it is said why not.
pub fn interrupted(repository: &Repository, request: &Request, device: &Device) -> Result<Option<Partial>> {
    let mut found = None;
    for (name, partial) in repository.partials()? {
        let why = match partial {
            Ok(partial)
                if partial.about.volume == request.source.volume
                    && is_wished(&partial.about, request)
                    && !partial.done.is_empty() =>
            {
                let why = why_not(repository, &partial, request, device).or_else(|error| {
                    if error.is_damage() { Ok(Some(base::report(&error))) } else { Err(error) }
                })?;
                if why.is_none() {
                    found = Some(partial);
                }
                why
            }
            Ok(_) => None,
            Err(error) if error.is_damage() => Some(base::report(&error)),
            Err(error) => return Err(error),
        };
        if let Some(why) = why {
            tracing::warn!("{name} is not resumed: {why}");
        }
    }
    Ok(found)
}

fn is_wished(of: &About, request: &Request) -> bool {
    use super::Wish;
    match request.wish {
        Wish::Full => of.kind == Kind::Full,
        Wish::Incremental => of.kind == Kind::Incremental,
        Wish::Auto => true,
    }
}

/// What must be the same where no driver is asked: nothing else says then that it is the same data. A handle that was typed
/// proves nothing.
pub fn source(request: &Request, device: &Device) -> Option<Identity> {
    request.asked.is_none().then(|| device.identity().clone())
}

/// Why a backup that was interrupted is not the one that is asked for.
fn why_not(
    repository: &Repository,
    partial: &Partial,
    request: &Request,
    device: &Device,
) -> Result<Option<String>> {
    let named =
        |handle: &Option<String>| handle.clone().map_or("none".to_owned(), |handle| format!("{handle:?}"));
    let of = &partial.about;
    if of.snapshot != request.snapshot {
        let (was, is) = (named(&of.snapshot), named(&request.snapshot));
        return Ok(Some(format!("it is of snapshot {was}, and this backup of {is}")));
    }
    if partial.source != source(request, device) {
        return Ok(Some(format!(
            "it was read from {}, and that is another device, has changed since, or may have",
            of.device
        )));
    }
    // One that had lost its lock may have left what names packs that a prune has removed.
    repository.check_packs(&partial.packs, &of.id)?;
    let mut done = partial.done.clone();
    done.sort_unstable();
    // What no driver has called unused was read, and is zeros.
    let zeros = request.asked.is_none();
    let some = sampled::some(&done, 32);
    let differs = sampled::differs(repository, &as_index(partial), None, &some, zeros, device)?;
    Ok(differs.map(|offset| format!("{} holds other data at byte {offset}", device.path().display())))
}

/// Notes from time to time how far a backup is.
pub struct Noting<'n> {
    pub source: Option<Identity>,
    pub writer: &'n Writer<'n>,
    pub state: &'n State<'n>,
    pub repository: &'n Repository,
    pub about: &'n About,
}

impl Noting<'_> {
    /// Until all senders of `working` are gone.
    pub fn until_over(&self, working: Receiver<()>) {
        let (began, mut last, mut noted) = (Instant::now(), Instant::now(), self.state.done().len());
        while working.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let pause = (began.elapsed() / SHARE).clamp(SOONEST, LATEST);
            let count = self.state.done().len();
            if last.elapsed() < pause || count == noted || self.state.is_over() {
                continue;
            }
            match self.note(&working) {
                Ok(()) => noted = count,
                // If that is serious, the backup meets it, too.
                Err(error) => {
                    tracing::warn!("what is done is not noted, for --resume: {}", base::report(&error));
                }
            }
            last = Instant::now();
        }
    }

    fn note(&self, working: &Receiver<()>) -> Result<()> {
        let mut done = self.state.done();
        self.writer.flush()?;
        // The segments of this moment, once their packs are durable.
        loop {
            let (written, others) = self.writer.durable();
            if done.iter().any(|number| others.contains(number)) {
                match working.recv_timeout(POLL_INTERVAL) {
                    Err(RecvTimeoutError::Timeout) if !self.state.is_over() => continue,
                    // What is left in the end says all.
                    _ => return Ok(()),
                }
            }
            done.sort_unstable();
            let is_done = |number: u32| done.binary_search(&number).is_ok();
            let mut segments = written.segments;
            segments.retain(|of| is_done(of.number));
            self.repository.check_lock()?;
            let about = About { added: written.added, ..self.about.clone() };
            let source = self.source.clone();
            let partial = Partial { about, packs: written.packs, segments, done, source };
            return write(self.repository, &partial);
        }
    }
}

fn write(repository: &Repository, partial: &Partial) -> Result<()> {
    repository.store.replace(&name(&partial.about), envelope(partial))
}

fn name(about: &About) -> String {
    format!("partial/{}", about.id)
}

/// Whether the id of a backup says a later time than the clock did, since it comes after that of another.
fn is_behind(about: &About) -> bool {
    time_of(&about.id).is_some_and(|time| time.as_second() > about.created)
}

/// Notes the id of a backup if the clock is behind, so that backups that begin while it runs get later ones. With a right
/// clock their time is later.
pub fn reserve(repository: &Repository, about: &About) -> Result<()> {
    if !is_behind(about) {
        return Ok(());
    }
    let (packs, segments, done) = Default::default();
    write(repository, &Partial { about: about.clone(), packs, segments, done, source: None })
}

/// Removes what was only reserved.
pub fn drop_reserved(repository: &Repository, about: &About) {
    if is_behind(about) {
        drop_own(repository, about);
    }
}

/// Leaves what `--resume` continues with. Errors are only logged: the backup has failed already.
pub fn leave(repository: &Repository, partial: &Partial) {
    match write(repository, partial) {
        Ok(()) => shell::say!(
            "cbt-backup: {} segments of 128 MiB are stored; the same command with --resume continues after them",
            partial.done.len()
        ),
        Err(error) => tracing::warn!("this backup cannot be resumed: {}", base::report(&error)),
    }
}

/// Removes what was noted of a backup that is not to be continued. What stays here is removed by a prune.
pub fn drop_own(repository: &Repository, about: &About) {
    if let Err(error) = repository.store.remove(&[name(about)]) {
        tracing::warn!("what was interrupted stays until a prune: {}", base::report(&error));
    }
}

/// The same of this backup, which is whole, and of all of its volume that began before it.
pub fn drop_before(repository: &Repository, about: &About) -> Result<()> {
    for (name, partial) in repository.partials()? {
        repository.store.stop().check()?;
        if partial.is_ok_and(|Partial { about: of, .. }| of.volume == about.volume && of.id <= about.id) {
            repository.store.remove(&[name])?;
        }
    }
    Ok(())
}
