//! Removing backups that are not to be kept, and then whatever nothing needs.
//!
//! The order: indexes are removed, and that is made durable. What the others need is marked. Packs that nothing names are
//! removed. Of packs in which too much is unused the rest is copied into new ones, and the indexes are replaced, one by one,
//! each as one step; then nothing names the old packs, and they are removed as before. So at each moment every index that is there names packs that are
//! there, and a prune that was killed is gone on with by the next. One that loses its lock ends before it removes or replaces
//! anything more: others may be at work by then.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use jiff::Timestamp;
use object_store::ObjectMeta;
use serde::Serialize;

use super::index::envelope;
use super::keep::kept;
use super::names::{is_ours, pack_name};
use super::pack::{Chunk, MAX_PACK, PackRef, Packs, read_table};
use super::verify::{Use, as_index};
use super::writer::{Writer, gather};
use super::{About, Index, Partial, Repository, SegmentRef};
use crate::arguments::PruneArguments;
use crate::error::{Error, Result, refused};

/// Chunks that are moved in one go: 64 MB of memory.
const MOVED: usize = 1 << 20;
/// What was interrupted is kept so long.
const PARTIAL_DAYS: i64 = 7;

/// What a prune did.
#[derive(Debug, Default, Serialize)]
pub struct Pruned {
    pub removed: Vec<String>,
    pub kept: Vec<String>,
    /// Bytes of packs that are gone.
    pub freed: u64,
    /// Bytes that were copied into new packs for it.
    pub moved: u64,
}

/// Prunes. The caller has the repository alone.
pub fn prune(repository: &Repository, rules: &PruneArguments) -> Result<Pruned> {
    let mut removed =
        rules.remove.iter().map(|wanted| repository.named(wanted)).collect::<Result<BTreeSet<String>>>()?;
    let is_of = |about: &About| rules.volume.as_ref().is_none_or(|volume| about.volume == *volume);
    let (mut abouts, mut damaged, mut is_known) = (Vec::new(), Vec::new(), rules.volume.is_none());
    let found = repository.each_index(|id, index| (id.to_owned(), index.map(|index| index.about)))?;
    let is_empty = found.is_empty();
    for (id, about) in found {
        is_known |= about.as_ref().is_ok_and(is_of);
        match about {
            _ if removed.contains(&id) => {}
            Ok(about) => abouts.push(about),
            // The rules may be kept to without it, but not what it needs.
            Err(error) if error.is_damage() && rules.volume.is_some() => {
                tracing::warn!(
                    "{}: nothing is freed, since prune cannot know what that backup needs. If it cannot be restored any \
                     more, continue without it: `cbt-backup prune --remove {id}`",
                    base::report(&error)
                );
                damaged.push(id);
            }
            Err(error) if error.is_damage() => {
                return Err(refused!(
                    "{}: prune cannot know what that backup needs. If it cannot be restored any more, continue without it: \
                     `cbt-backup prune --remove {id}`",
                    base::report(&error)
                ));
            }
            Err(error) => return Err(error),
        }
    }
    if let Some(volume) = rules.volume.as_ref().filter(|_| !is_known) {
        return Err(refused!("there is no backup of {volume}: `cbt-backup list` names all volumes"));
    }
    let (of_volume, others): (Vec<_>, Vec<_>) = abouts.into_iter().partition(is_of);
    let mut keeps = kept(&of_volume, rules.keep);
    keeps.extend(others.iter().map(|about| about.id.clone()).chain(damaged.iter().cloned()));
    removed.extend(of_volume.iter().map(|about| about.id.clone()).filter(|id| !keeps.contains(id)));
    let mut pruned = Pruned {
        removed: removed.into_iter().collect(),
        kept: keeps.into_iter().collect(),
        ..Pruned::default()
    };
    // What cannot be listed is found before anything is removed.
    let packs = repository.store.list("packs")?;
    if let Some(backups) = repository.store.dir().map(|dir| dir.join("backups"))
        && is_empty
        && !packs.is_empty()
        && backups.exists()
    {
        return Err(refused!(
            "{0} is empty, and there are packs: if it is on another disk, mount that disk. If no backup is left, and packs are to \
             be removed, remove the empty directory {0} and run prune again",
            backups.display()
        ));
    }
    repository.check_disk()?;
    if rules.dry_run {
        if damaged.is_empty() {
            pruned.freed =
                unused(repository, rules, &pruned.kept, packs)?.iter().map(|object| object.size).sum();
        }
        return Ok(pruned);
    }
    let names =
        |prefix: &str, ids: &[String]| ids.iter().map(|id| format!("{prefix}/{id}")).collect::<Vec<_>>();
    repository.remove(&names("backups", &pruned.removed))?;
    repository.store.sync_removals("backups")?;
    if !damaged.is_empty() {
        return Ok(pruned);
    }
    remove_partials(repository, &pruned.kept, &of_volume)?;
    for object in repository.store.list("damaged")? {
        if !object.location.filename().is_some_and(|id| pruned.kept.iter().any(|kept| kept == id)) {
            repository.remove(&[object.location.to_string()])?;
        }
    }
    remove_drafts(repository)?;
    // Packs that are damaged are not touched.
    let mut left = HashSet::new();
    loop {
        repository.store.stop().check()?;
        pruned.freed += sweep(repository, rules, &pruned.kept)?;
        match repack(repository, &pruned.kept, rules.max_unused.into(), &mut left) {
            Ok(Some(moved)) => pruned.moved += moved,
            Ok(None) => return Ok(pruned),
            Err(error) if error.is_damage() => {
                tracing::warn!(
                    "{}: run `cbt-backup verify`; unused parts of packs stay until then",
                    base::report(&error)
                );
                return Ok(pruned);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Removes packs that nothing names: the bytes of them.
fn sweep(repository: &Repository, rules: &PruneArguments, kept: &[String]) -> Result<u64> {
    let unused = unused(repository, rules, kept, repository.store.list("packs")?)?;
    let names: Vec<String> = unused.iter().map(|object| object.location.to_string()).collect();
    repository.remove(&names)?;
    Ok(unused.iter().map(|object| object.size).sum())
}

/// Those of some packs that neither a backup which is kept nor an interrupted one names.
fn unused(
    repository: &Repository,
    rules: &PruneArguments,
    kept: &[String],
    mut packs: Vec<ObjectMeta>,
) -> Result<Vec<ObjectMeta>> {
    let mut missing: BTreeSet<&str> = kept.iter().map(String::as_str).collect();
    let kept = missing.clone();
    let names = |id: &str, index: Result<Index>| {
        let id = *kept.get(id)?;
        Some(index.map(|index| (id, index.packs.iter().map(pack_name).collect::<Vec<_>>())))
    };
    let mut named = HashSet::new();
    for names in repository.each_index(names)?.into_iter().flatten() {
        let (id, names) = names?;
        missing.remove(id);
        named.extend(names);
    }
    // A disk can go away at any time.
    if let Some(id) = missing.first() {
        return Err(refused!(
            "backup {id} is gone while prune works: nothing more is removed. Run prune again"
        ));
    }
    for (_, partial) in repository.partials()? {
        match partial {
            // The prune removes it before.
            Err(error) if error.is_damage() && rules.dry_run => {}
            partial => named.extend(partial?.packs.iter().map(pack_name)),
        }
    }
    packs.retain(|object| !named.contains(object.location.as_ref()));
    Ok(packs)
}

/// Removes what was interrupted and cannot be gone on with any more, or is old.
fn remove_partials(repository: &Repository, kept: &[String], abouts: &[About]) -> Result<()> {
    let now = Timestamp::now().as_second();
    for (name, partial) in repository.partials()? {
        let is_needed = match &partial {
            Ok(Partial { about, packs, .. }) => {
                let is_over = |of: &About| of.volume == about.volume && of.id > about.id;
                now.saturating_sub(about.created) < PARTIAL_DAYS * 86400
                    && about.base.as_ref().is_none_or(|base| kept.contains(base))
                    && !abouts.iter().any(is_over)
                    && repository.has_packs(packs, &about.id)?
            }
            Err(error) if error.is_damage() => false,
            Err(_) => true,
        };
        if !is_needed {
            repository.remove(&[name])?;
        }
        partial.map(drop).or_else(|error| if error.is_damage() { Ok(()) } else { Err(error) })?;
    }
    repository.store.sync_removals("partial")
}

/// Files that were being written when a process ended: the store writes NAME#NUMBER next to NAME, and lists none of them.
fn remove_drafts(repository: &Repository) -> Result<()> {
    let Some(dir) = repository.store.dir() else { return Ok(()) };
    for top in ["packs", "backups", "partial", "damaged", ""] {
        let is_draft = |name: &str| {
            let parts = name.rsplit_once('#').filter(|(name, _)| is_ours(name));
            parts.is_some_and(|(_, number)| {
                !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
            })
        };
        for (name, _) in repository.store.files(top)?.iter().filter(|(name, _)| is_draft(name)) {
            files::change::remove_file(&dir.join(name))?;
        }
    }
    Ok(())
}

/// What is in use of each pack: data, and maps of segments.
#[derive(Default)]
struct Uses {
    data: HashMap<[u8; 32], Use>,
    maps: HashMap<[u8; 32], Use>,
}

/// Moves what is used out of packs that are not used enough: the bytes that were written for it; `None` where there are no
/// such packs. The old ones stay, with no name left to them.
fn repack(
    repository: &Repository,
    kept: &[String],
    max_unused: u64,
    left: &mut HashSet<[u8; 32]>,
) -> Result<Option<u64>> {
    let mut uses = Uses::default();
    let mut seen = HashSet::new();
    let partials: Vec<(String, Partial)> =
        repository.partials()?.map(|(name, partial)| Ok((name, partial?))).collect::<Result<_>>()?;
    type Named<'p> = Result<(String, Index, Option<&'p Partial>)>;
    let indexes = || {
        let backup =
            |id: &String| -> Named<'_> { Ok((format!("backups/{id}"), repository.index(id)?, None)) };
        let backups = kept.iter().map(backup);
        let partials =
            partials.iter().map(|(name, partial)| Ok((name.clone(), as_index(partial), Some(partial))));
        backups.chain(partials)
    };
    for index in indexes() {
        let (_, index, _) = index?;
        mark(repository, &index, &mut uses, &mut seen)?;
    }
    let mut victims: HashMap<[u8; 32], PackRef> = HashMap::new();
    let mut chunks = 0;
    let packs: BTreeMap<[u8; 32], PackRef> =
        uses.data.iter().chain(&uses.maps).map(|(id, of)| (*id, of.pack)).collect();
    for (id, pack) in packs {
        if left.contains(&id) || chunks + pack.rows as usize > MOVED && chunks > 0 {
            continue;
        }
        let table = match repository.table(&pack) {
            Ok(table) => table,
            Err(error) if error.is_damage() => {
                left.insert(id);
                continue;
            }
            Err(error) => return Err(error),
        };
        let is_used = |chunk| {
            [&uses.data, &uses.maps].iter().any(|of| of.get(&id).is_some_and(|of| of.is_marked(chunk)))
        };
        let unused: u64 = (0..)
            .zip(table.iter())
            .filter(|(chunk, _)| !is_used(*chunk))
            .map(|(_, row)| u64::from(row.stored))
            .sum();
        if unused * 100 > max_unused * u64::from(pack.bytes) {
            chunks += pack.rows as usize;
            victims.insert(id, pack);
        }
    }
    if victims.is_empty() {
        return Ok(None);
    }
    let writer = Writer::new(repository, &[], &[]);
    let mut places: HashMap<([u8; 32], u32), (u32, u32)> = HashMap::new();
    for (id, pack) in victims.clone() {
        repository.store.stop().check()?;
        match copy(repository, &pack, uses.data.get(&id), &writer)? {
            Some(copied) => places.extend(copied.into_iter().map(|(chunk, place)| ((id, chunk), place))),
            None => {
                tracing::warn!("pack {} is damaged and stays as it is: run `cbt-backup verify`", pack.name());
                left.insert(id);
                victims.remove(&id);
            }
        }
    }
    // The maps that name a victim or lie in one, each once.
    let mut tokens: HashMap<([u8; 32], u32), u32> = HashMap::new();
    let key = |index: &Index, of: &SegmentRef| (index.packs[of.pack as usize].id, of.chunk);
    for index in indexes() {
        let (_, index, _) = index?;
        for of in &index.segments {
            repository.store.stop().check()?;
            let touches = |pack: &u32| victims.contains_key(&index.packs[*pack as usize].id);
            if !touches(&of.pack) && !of.packs.iter().any(touches) || tokens.contains_key(&key(&index, of)) {
                continue;
            }
            let mut segment = writer.read(&index.packs, of)?;
            for extent in &mut segment.extents {
                let moved = writer.id(extent.pack).and_then(|id| places.get(&(id, extent.chunk)));
                if let Some((pack, chunk)) = moved {
                    (extent.pack, extent.chunk) = (*pack, *chunk);
                }
            }
            let token = tokens.len() as u32;
            tokens.insert(key(&index, of), token);
            writer.segment(token, segment)?;
        }
    }
    let written = writer.finish()?;
    repository.store.stop().check()?;
    let new_packs = Packs::of(&written.packs);
    for index in indexes() {
        let (name, index, partial) = index?;
        let old_packs = Packs::of(&index.packs);
        let segments: Vec<(bool, SegmentRef)> = index
            .segments
            .iter()
            .map(|of| match tokens.get(&key(&index, of)) {
                // Every token was given to a segment that holds data, so each has one.
                Some(token) => {
                    (true, SegmentRef { number: of.number, ..written.segments[*token as usize].clone() })
                }
                None => (false, of.clone()),
            })
            .collect();
        if segments.iter().all(|(is_new, _)| !is_new) {
            continue;
        }
        let of =
            segments.iter().map(|(is_new, segment)| (if *is_new { &new_packs } else { &old_packs }, segment));
        let (packs, segments) = gather(of);
        let bytes = match partial {
            Some(partial) => envelope(&Partial { packs, segments, ..partial.clone() }),
            None => envelope(&Index { packs, segments, ..index }),
        };
        repository.hold()?;
        repository.store.replace(&name, bytes)?;
    }
    Ok(Some(written.added))
}

fn mark(
    repository: &Repository,
    index: &Index,
    uses: &mut Uses,
    seen: &mut HashSet<([u8; 32], u32)>,
) -> Result<()> {
    for of in &index.segments {
        repository.store.stop().check()?;
        let map = index.packs[of.pack as usize];
        if !seen.insert((map.id, of.chunk)) {
            continue;
        }
        uses.maps.entry(map.id).or_insert_with(|| Use::new(map)).mark(of.chunk);
        let mut packs = Packs::default();
        let segment = repository.segment(index, of, &mut packs)?;
        for extent in &segment.extents {
            let pack = *packs.get(extent.pack);
            if extent.chunk >= pack.rows {
                return Err(Error::damaged("the map of a segment", "it names a chunk that no pack has"));
            }
            uses.data.entry(pack.id).or_insert_with(|| Use::new(pack)).mark(extent.chunk);
        }
    }
    Ok(())
}

/// Chunks of a pack, and the pack and chunk that each is now.
type Copies = Vec<(u32, (u32, u32))>;

/// Copies the data in use; `None` where some of it is damaged.
fn copy(
    repository: &Repository,
    pack: &PackRef,
    used: Option<&Use>,
    writer: &Writer<'_>,
) -> Result<Option<Copies>> {
    let Some(used) = used else { return Ok(Some(Vec::new())) };
    let bytes = repository.store.get(&pack_name(pack), MAX_PACK);
    let read = bytes.and_then(|bytes| {
        let table = bytes.get(pack.table().start as usize..).unwrap_or_default();
        let rows = read_table(pack, table)?;
        let (mut numbers, mut chunks) = (Vec::new(), Vec::new());
        for (number, row) in (0..).zip(&rows).filter(|(number, _)| used.is_marked(*number)) {
            let stored = &bytes[row.start as usize..row.range().end as usize];
            row.open(stored)?;
            numbers.push(number);
            chunks.push(Chunk::copied(row, stored.to_vec()));
        }
        Ok((numbers, chunks))
    });
    match read {
        Ok((numbers, chunks)) => Ok(Some(numbers.into_iter().zip(writer.chunks(&chunks)?).collect())),
        Err(error) if error.is_damage() => Ok(None),
        Err(error) => Err(error),
    }
}
