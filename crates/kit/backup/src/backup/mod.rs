//! A backup: full or incremental, over which base, after what was interrupted. [`copy`] then reads and stores.
//!
//! No temporary error makes a backup full: `auto` follows the advice of the client library.

mod copy;
mod partial;
mod state;

use snapshot_metadata_client::{Advice, Blocks, Client};
use tonic::Code;

use crate::arguments::Source;
use crate::device::Device;
use crate::error::{Error, Result, refused};
use crate::repository::{About, Index, Kind, Partial, Repository};
use copy::store;

/// What a volume may have grown by in any case for an incremental backup to be made.
const MOST_GROWN: u64 = 1 << 30;

/// What a user asks for.
#[derive(Debug)]
pub struct Request {
    /// What is read, and how.
    pub source: Source,
    /// Who says what is allocated and changed.
    pub asked: Option<Asked>,
    /// The CSI handle of the snapshot that the device holds.
    pub snapshot: Option<String>,
    /// That of the snapshot to start from, where it is named.
    pub base: Option<String>,
    /// What is made.
    pub wish: Wish,
}

/// Who says what is allocated and changed.
#[derive(Debug)]
pub struct Asked {
    /// A driver's socket, or a namespace of a cluster.
    pub client: Client,
    /// What the snapshot is called there.
    pub snapshot: String,
}

/// What kind of backup is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    Full,
    /// Incremental, or none.
    Incremental,
    /// Incremental where that can be, else full.
    Auto,
}

/// A backup that is decided.
struct Job {
    about: About,
    base: Option<Index>,
    ranges: Ranges,
    done: Option<Partial>,
}

/// Where the ranges come from that are read.
enum Ranges {
    /// The holes of an image.
    File,
    /// A driver.
    Stream(Box<Blocks>),
}

/// Why there is no incremental backup.
enum Not {
    /// A full one can be made.
    Possible(String),
    /// Nothing can.
    Failed(Error),
}

impl From<Error> for Not {
    fn from(error: Error) -> Self {
        match error {
            Error::Driver { error } if error.advice() == Advice::FullBackup => {
                Not::Possible(format!("the driver's delta ended early: {error}"))
            }
            error if error.is_damage() => Not::Possible(base::report(&error)),
            error => Not::Failed(error),
        }
    }
}

/// Makes a backup, and says what was made.
pub fn run(repository: &Repository, request: &Request) -> Result<Index> {
    let device = Device::open_alone(&request.source.device)?;
    repository.check_disk()?;
    if request.wish != Wish::Full
        && let (Some(_), Some(snapshot)) = (&request.asked, &request.snapshot)
        && let Some(made) = made_of(repository, &request.source.volume, snapshot)?
    {
        let already = format!("snapshot {snapshot} is backed up already, as {}", made.about.id);
        if request.wish == Wish::Incremental {
            return Err(refused!("{already}; take a new snapshot"));
        }
        shell::say!("cbt-backup: {already}");
        return Ok(made);
    }
    let partial = match request.source.resume {
        true => partial::interrupted(repository, request, &device)?,
        false => None,
    };
    let wish = match partial.as_ref().map(|partial| partial.about.kind) {
        Some(Kind::Full) => Wish::Full,
        _ => request.wish,
    };
    let why = match wish {
        Wish::Full => partial.as_ref().and_then(|partial| partial.about.why.clone()),
        Wish::Incremental | Wish::Auto => {
            let made = incremental(repository, request, &device, partial.clone())
                .and_then(|job| Ok(store(repository, request, &device, job)?));
            match made {
                Ok(index) => return Ok(index),
                Err(Not::Possible(why)) if wish == Wish::Auto => Some(why),
                Err(Not::Possible(why)) => {
                    return Err(refused!(
                        "no incremental backup can be made: {why}; make a full one, or use `auto`"
                    ));
                }
                Err(Not::Failed(error)) => return Err(error),
            }
        }
    };
    if let Some(why) = &why {
        tracing::warn!("a full backup: {why}");
    }
    let partial = partial.filter(|partial| partial.about.kind == Kind::Full);
    let job = full(repository, request, &device, why, partial)?;
    store(repository, request, &device, job)
}

fn about(repository: &Repository, request: &Request, kind: Kind, size: u64) -> Result<About> {
    let now = jiff::Timestamp::now();
    let (id, later) = repository.next_id(now)?;
    if let Some(later) = later {
        tracing::warn!(
            "the clock says {now}, which is before the last backup began, {later}: one of the two is wrong. The name of this backup \
             comes after that one, so it is the latest"
        );
    }
    Ok(About {
        id,
        volume: request.source.volume.clone(),
        created: now.as_second(),
        kind,
        snapshot: request.snapshot.clone(),
        device: request.source.device.display().to_string(),
        size,
        ..About::default()
    })
}

fn full(
    repository: &Repository,
    request: &Request,
    device: &Device,
    why: Option<String>,
    partial: Option<Partial>,
) -> Result<Job> {
    let (ranges, size) = match &request.asked {
        Some(Asked { client, snapshot }) => {
            match repository.store.wait(client.allocated(snapshot))? {
                Ok(blocks) => {
                    let capacity = blocks.capacity();
                    (Ranges::Stream(Box::new(blocks)), capacity)
                }
                // A driver that cannot say what is allocated: the device is read whole.
                Err(error) if error.advice() == Advice::FullBackup => {
                    tracing::warn!("all of the device is read: {error}");
                    (Ranges::File, device.size())
                }
                Err(error) => return Err(error.into()),
            }
        }
        None => (Ranges::File, device.size()),
    };
    fits(device, size)?;
    let done = of_size(partial, size);
    Ok(Job {
        about: About { why, ..about(repository, request, Kind::Full, size)? },
        base: None,
        ranges,
        done,
    })
}

fn incremental(
    repository: &Repository,
    request: &Request,
    device: &Device,
    partial: Option<Partial>,
) -> Result<Job, Not> {
    let (Some(asked), Some(snapshot)) = (&request.asked, &request.snapshot) else {
        return Err(Not::Possible("no driver to ask what changed: give --endpoint or --namespace".into()));
    };
    let base = base_of(repository, request, partial.as_ref())?;
    let Some(handle) = &base.about.snapshot else {
        return Err(Not::Possible(format!("backup {} has no snapshot handle", base.about.id)));
    };
    let delta = asked.client.delta(handle, &asked.snapshot);
    let blocks = match repository.store.wait(delta)? {
        Ok(blocks) => blocks,
        // The user did not name this base: it is the last backup of that name, and the next one would be refused as this one is.
        Err(error) if request.base.is_none() && error.code() == Some(Code::InvalidArgument) => {
            return Err(Not::Possible(format!(
                "the driver does not accept {handle} (backup {}) as a base of {snapshot}; the volume was probably deleted and \
                 created again: {error}",
                base.about.id
            )));
        }
        Err(error) if error.advice() == Advice::FullBackup => {
            return Err(Not::Possible(format!("the driver gives no delta from {handle}: {error}")));
        }
        Err(error) => return Err(Not::Failed(error.into())),
    };
    let size = blocks.capacity();
    // All behind the old end is read. Where that is more than the volume holds, a full backup is quicker.
    let grown = size.saturating_sub(base.about.size);
    let is_too_large = grown > base.about.data.max(MOST_GROWN) || grown > 0 && device.size() < size;
    if size < base.about.size || is_too_large {
        return Err(Not::Possible(format!(
            "the volume has {size} bytes, and had {} in {}",
            base.about.size, base.about.id
        )));
    }
    fits(device, size)?;
    let base_id = Some(base.about.id.clone());
    let done = of_size(partial.filter(|partial| partial.about.base == base_id), size);
    let about = About { base: base_id, ..about(repository, request, Kind::Incremental, size)? };
    Ok(Job { about, base: Some(base), ranges: Ranges::Stream(Box::new(blocks)), done })
}

/// What was interrupted, where the volume has the same size.
fn of_size(partial: Option<Partial>, size: u64) -> Option<Partial> {
    let partial = partial?;
    let About { id, size: had, .. } = &partial.about;
    if *had != size {
        tracing::warn!("partial/{id} is not resumed: the volume had {had} bytes, and has {size}");
        return None;
    }
    Some(partial)
}

/// A sound backup of a snapshot, also where others came after it.
fn made_of(repository: &Repository, volume: &str, snapshot: &str) -> Result<Option<Index>> {
    let found = repository.each_index(|_, index| match index {
        Ok(Index { about, .. }) => {
            let is_it = about.volume == volume && about.snapshot.as_deref() == Some(snapshot);
            Ok(is_it.then_some(about.id))
        }
        Err(error) if error.is_damage() => Ok(None),
        Err(error) => Err(error),
    })?;
    for id in found.into_iter().rev() {
        let Some(id) = id? else { continue };
        let index = repository.index(&id)?;
        if repository.known_damage(&id)?.is_none() && repository.has_packs(&index.packs, &id)? {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

/// The backup that an incremental one is made over: of the snapshot that is named, or the last one of the volume.
fn base_of(repository: &Repository, request: &Request, partial: Option<&Partial>) -> Result<Index, Not> {
    let mut damaged = None;
    let base = repository.last(
        |index| {
            let About { id, volume, snapshot, .. } = &index.about;
            let of_partial = partial.is_none_or(|partial| partial.about.base.as_ref() == Some(id));
            let of_base = request.base.is_none() || *snapshot == request.base;
            (*volume == request.source.volume && of_base && of_partial).then_some(index)
        },
        |error| match error.is_damage() {
            true => {
                damaged.get_or_insert(base::report(&error));
                Ok(())
            }
            false => Err(error),
        },
    );
    if let Some(index) = base? {
        let id = &index.about.id;
        if let Some(what) = repository.known_damage(id)? {
            return Err(Not::Possible(format!("the last backup, {id}, is damaged: {what}")));
        }
        repository.check_packs(&index.packs, id)?;
        return Ok(index);
    }
    if let Some(base) = partial.and_then(|partial| partial.about.base.as_ref()) {
        return Err(Not::Possible(format!("{base}, on which the interrupted backup is based, is gone")));
    }
    Err(Not::Possible(match (damaged, &request.base) {
        (Some(damaged), _) => damaged,
        (None, Some(base)) => format!("no backup of {} is of snapshot {base}", request.source.volume),
        (None, None) => format!("there is no earlier backup of {}", request.source.volume),
    }))
}

/// A larger device is not an error, since drivers may round up; but a driver that tells too small a capacity would make a backup
/// that is short.
fn fits(device: &Device, size: u64) -> Result<()> {
    let (path, has) = (device.path().display(), device.size());
    if has < size {
        return Err(refused!(
            "{path} has {has} bytes, and the snapshot has {size}: it is not the device of that snapshot"
        ));
    }
    if has > size {
        tracing::warn!("{path} has {has} bytes, and the snapshot has {size}: the rest is not read");
    }
    Ok(())
}
