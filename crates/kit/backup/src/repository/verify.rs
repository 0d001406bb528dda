//! Reading everything back against its checksums, and saying which backups damage hurts and where.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};

use parking_lot::Mutex;
use serde::Serialize;

use super::index::{self, envelope};
use super::names::pack_name;
use super::pack::{MAX_PACK, PackRef, Packs, read_table};
use super::{BLOCK, Index, MAX_NOTE, Repository, SEGMENT, SegmentRef};
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::wait::each;

/// What a verify has found.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Backups that were looked at.
    pub backups: usize,
    /// Packs that were read.
    pub packs: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of packs that no backup needs: prune removes them. Only where all backups are looked at.
    pub unused: Option<u64>,
    pub damage: Vec<Damage>,
}

/// Something that is not as it was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// The backup that cannot be restored; none where no backup needs it.
    pub backup: Option<String>,
    /// What, and how it shows.
    pub what: String,
    /// The bytes of the volume that it is about, where it is about some alone. The last of very many ranges of a backup reaches
    /// to the end of what is damaged.
    pub start: Option<u64>,
    /// The byte after the last of them.
    pub end: Option<u64>,
}

impl Damage {
    fn of(backup: Option<&str>, error: &Error) -> Self {
        Damage { backup: backup.map(str::to_owned), what: base::report(error), start: None, end: None }
    }
}

/// Which chunks of a pack are in use.
#[derive(Clone, Debug)]
pub struct Use {
    pub pack: PackRef,
    chunks: Vec<u64>,
}

impl Use {
    /// Of none. An index may name many packs of which it needs nothing, so they take no room yet.
    pub fn new(pack: PackRef) -> Self {
        Use { pack, chunks: Vec::new() }
    }

    /// Marks a chunk; one that the table does not have is ignored.
    pub fn mark(&mut self, chunk: u32) {
        let word = chunk as usize / 64;
        if chunk < self.pack.rows {
            self.chunks.resize(self.chunks.len().max(word + 1), 0);
            self.chunks[word] |= 1 << (chunk % 64);
        }
    }

    /// Whether a chunk is in use.
    pub fn is_marked(&self, chunk: u32) -> bool {
        self.chunks.get(chunk as usize / 64).is_some_and(|word| word & 1 << (chunk % 64) != 0)
    }
}

/// The maps of segments that several backups share, each looked at once.
type Seen = HashMap<([u8; 32], u32), Option<Damage>>;

/// Checks some backups, or all of them and all else in the repository.
pub fn verify(repository: &Repository, ids: Option<&[String]>, threads: usize) -> Result<Report> {
    let mut report = Report::default();
    let before = repository.store.list("backups")?;
    let all = repository.ids()?;
    let chosen: &[String] = ids.unwrap_or(&all);
    let mut uses: BTreeMap<[u8; 32], Use> = BTreeMap::new();
    let mut seen = Seen::new();
    for id in chosen {
        repository.store.stop().check()?;
        report.backups += 1;
        let found = repository.index(id).and_then(|index| look(repository, &index, &mut uses, &mut seen));
        match found {
            Ok(damage) => report.damage.extend(damage),
            Err(error) if error.is_damage() => report.damage.push(Damage::of(Some(id), &error)),
            Err(error) => return Err(error),
        }
    }
    if ids.is_none() {
        others(repository, &mut report, &mut uses, &mut seen)?;
    }
    let packs: Vec<Use> = uses.into_values().collect();
    let total = packs.iter().map(|of| u64::from(of.pack.bytes)).sum();
    let broken = read_packs(repository, &packs, total, threads)?;
    report.packs = packs.len();
    report.bytes = total;
    if ids.is_none() {
        let mut unused: u64 = broken.unused;
        let known: HashSet<String> = packs.iter().map(|of| pack_name(&of.pack)).collect();
        let there = repository.store.list("packs")?;
        unused +=
            there.iter().filter(|of| !known.contains(of.location.as_ref())).map(|of| of.size).sum::<u64>();
        report.unused = Some(unused);
    }
    if !broken.is_empty() {
        let mut reported = HashSet::new();
        for id in chosen {
            if let Ok(index) = repository.index(id) {
                report.damage.extend(hurt(repository, &index, &broken, &mut reported)?);
            }
        }
        let partials = ids.is_none().then(|| repository.partials()).transpose()?;
        for (_, partial) in partials.into_iter().flatten() {
            repository.store.stop().check()?;
            if let Ok(partial) = partial {
                report.damage.extend(hurt(repository, &as_index(&partial), &broken, &mut reported)?);
            }
        }
        // What hurts no backup is damage all the same.
        let whole = broken.packs.iter().map(|(pack, why)| ((*pack, None), why));
        let chunks = broken.chunks.iter().map(|((pack, chunk), why)| ((*pack, Some(*chunk)), why));
        for ((pack, _), why) in whole.chain(chunks).filter(|(key, _)| !reported.contains(key)) {
            let pack = blake3::Hash::from(pack).to_hex();
            let what = format!("pack {pack}: {why}");
            report.damage.push(Damage { backup: None, what, start: None, end: None });
        }
    }
    // What a prune does meanwhile looks like damage.
    repository.was_held()?;
    if !report.damage.is_empty() && !repository.has_lock() {
        let after = repository.store.list("backups")?;
        if before.iter().any(|index| !after.contains(index)) {
            return Err(Error::refused(
                "a prune has worked on the repository meanwhile, so what is missing may be no loss: run verify again",
            ));
        }
    }
    note(repository, chosen, &report);
    Ok(report)
}

/// The maps of a backup.
fn look(
    repository: &Repository,
    index: &Index,
    uses: &mut BTreeMap<[u8; 32], Use>,
    seen: &mut Seen,
) -> Result<Vec<Damage>> {
    for pack in &index.packs {
        uses.entry(pack.id).or_insert_with(|| Use::new(*pack));
    }
    let mut damage = Vec::new();
    for segment in &index.segments {
        repository.store.stop().check()?;
        let key = (index.packs[segment.pack as usize].id, segment.chunk);
        let found = match seen.entry(key) {
            Entry::Occupied(seen) => seen.get().clone(),
            Entry::Vacant(unseen) => {
                let found = match mark(repository, index, segment, uses) {
                    Ok(()) => None,
                    Err(error) if error.is_damage() => {
                        let start = u64::from(segment.number) * SEGMENT;
                        let end = index.about.size.min(start + SEGMENT);
                        Some(Damage { start: Some(start), end: Some(end), ..Damage::of(None, &error) })
                    }
                    Err(error) => return Err(error),
                };
                unseen.insert(found).clone()
            }
        };
        damage.extend(found.map(|of| Damage { backup: Some(index.about.id.clone()), ..of }));
    }
    Ok(damage)
}

/// Marks what a segment uses, and checks that it is there.
fn mark(
    repository: &Repository,
    index: &Index,
    of: &SegmentRef,
    uses: &mut BTreeMap<[u8; 32], Use>,
) -> Result<()> {
    let mut packs = Packs::default();
    let segment = repository.segment(index, of, &mut packs)?;
    let used = |uses: &mut BTreeMap<[u8; 32], Use>, pack: &PackRef, chunk: u32| match uses.get_mut(&pack.id) {
        Some(of) if chunk < of.pack.rows && of.pack == *pack => {
            of.mark(chunk);
            Ok(())
        }
        _ => Err(Error::damaged("the map of a segment", "it names what the index does not")),
    };
    used(uses, &index.packs[of.pack as usize], of.chunk)?;
    for extent in &segment.extents {
        let pack = *packs.get(extent.pack);
        used(uses, &pack, extent.chunk)?;
        let table = repository.table(&pack)?;
        let needed = u64::from(extent.skip + extent.blocks) * BLOCK;
        if u64::from(table[extent.chunk as usize].raw) < needed {
            return Err(Error::damaged("the map of a segment", "a chunk is too short for it"));
        }
    }
    Ok(())
}

/// What is not a backup.
fn others(
    repository: &Repository,
    report: &mut Report,
    uses: &mut BTreeMap<[u8; 32], Use>,
    seen: &mut Seen,
) -> Result<()> {
    report.note(repository.config().map(drop))?;
    for object in repository.store.list("damaged")? {
        let name = object.location.to_string();
        match repository.store.get(&name, MAX_NOTE).and_then(|bytes| index::open::<String>(&bytes, &name)) {
            // Another verify has found that the backup is sound again.
            Err(error) if error.is_not_found() => {}
            note => report.note(note.map(drop))?,
        }
    }
    for (_, partial) in repository.partials()? {
        match partial {
            Ok(partial) => {
                let index = as_index(&partial);
                report.damage.extend(look(repository, &index, uses, seen)?);
            }
            Err(error) => report.note(Err(error))?,
        }
    }
    Ok(())
}

impl Report {
    /// Adds damage to the report; any other error is returned.
    fn note(&mut self, found: Result<()>) -> Result<()> {
        match found {
            Err(error) if error.is_damage() => {
                self.damage.push(Damage::of(None, &error));
                Ok(())
            }
            found => found,
        }
    }
}

/// What was interrupted, as if it were a backup.
pub fn as_index(partial: &super::Partial) -> Index {
    Index {
        about: partial.about.clone(),
        packs: partial.packs.clone(),
        segments: partial.segments.clone(),
        changed: Vec::new(),
    }
}

/// A pack that is broken as a whole, or a chunk of one.
type Key = ([u8; 32], Option<u32>);

/// What is broken, and why. Of a pack with no table nothing is said chunk by chunk: an index may name many that are missing.
#[derive(Default)]
struct Broken {
    packs: BTreeMap<[u8; 32], String>,
    chunks: BTreeMap<([u8; 32], u32), String>,
    /// Bytes of chunks that are not in use.
    unused: u64,
}

impl Broken {
    fn is_empty(&self) -> bool {
        self.packs.is_empty() && self.chunks.is_empty()
    }

    /// Whether anything of a pack is.
    fn has(&self, pack: &PackRef) -> bool {
        let chunks = (pack.id, 0)..=(pack.id, u32::MAX);
        self.packs.contains_key(&pack.id) || self.chunks.range(chunks).next().is_some()
    }

    fn find(&self, pack: &PackRef, chunk: u32) -> Option<(Key, &String)> {
        let whole = self.packs.get(&pack.id).map(|why| ((pack.id, None), why));
        whole.or_else(|| Some(((pack.id, Some(chunk)), self.chunks.get(&(pack.id, chunk))?)))
    }
}

fn read_packs(repository: &Repository, packs: &[Use], total: u64, threads: usize) -> Result<Broken> {
    let progress = Progress::new("verify", total);
    let broken = Mutex::new(Broken::default());
    each(packs.len(), threads, repository.store.stop(), |number| {
        let of = &packs[number];
        let found = read_pack(repository, of)?;
        let mut broken = broken.lock();
        broken.unused += found.unused;
        broken.packs.extend(found.packs);
        broken.chunks.extend(found.chunks);
        progress.by(of.pack.bytes.into(), of.pack.bytes.into());
        Ok(())
    })?;
    Ok(broken.into_inner())
}

/// Every byte of a pack.
fn read_pack(repository: &Repository, of: &Use) -> Result<Broken> {
    let mut broken = Broken::default();
    let bytes = match repository.store.get(&pack_name(&of.pack), MAX_PACK) {
        Ok(bytes) => bytes,
        Err(error) if error.is_damage() => {
            broken.packs.insert(of.pack.id, base::report(&error));
            return Ok(broken);
        }
        Err(error) => return Err(error),
    };
    let table = of.pack.table();
    let name = of.pack.name();
    let table = match bytes.get(table.start as usize..).filter(|_| bytes.len() == of.pack.bytes as usize) {
        Some(table) => read_table(&of.pack, table),
        None => Err(Error::damaged(
            format!("pack {name}"),
            format!("it has {} bytes instead of {}", bytes.len(), of.pack.bytes),
        )),
    };
    match table {
        Ok(rows) => {
            for (chunk, row) in (0..).zip(&rows) {
                repository.store.stop().check()?;
                if !of.is_marked(chunk) {
                    broken.unused += u64::from(row.stored);
                }
                let stored = &bytes[row.start as usize..row.range().end as usize];
                if let Err(error) = row.open(stored) {
                    let error = super::read::in_pack(error, &of.pack, chunk);
                    broken.chunks.insert((of.pack.id, chunk), base::report(&error));
                }
            }
        }
        Err(error) => drop(broken.packs.insert(of.pack.id, base::report(&error))),
    }
    Ok(broken)
}

/// Ranges of a backup that are reported one by one.
const TOLD: usize = 1000;

/// The bytes of a backup that lie in broken chunks. What is broken and reported, here or by [`look`], is added to `reported`.
fn hurt(
    repository: &Repository,
    index: &Index,
    broken: &Broken,
    reported: &mut HashSet<Key>,
) -> Result<Vec<Damage>> {
    let mut damage: Vec<Damage> = Vec::new();
    for of in &index.segments {
        repository.store.stop().check()?;
        let mut needed = std::iter::once(&of.pack).chain(&of.packs);
        if !needed.any(|pack| broken.has(&index.packs[*pack as usize])) {
            continue;
        }
        let mut packs = Packs::default();
        let segment = match repository.segment(index, of, &mut packs) {
            Ok(segment) => segment,
            Err(error) if error.is_damage() => {
                reported.extend(broken.find(&index.packs[of.pack as usize], of.chunk).map(|(key, _)| key));
                continue;
            }
            Err(error) => return Err(error),
        };
        for extent in &segment.extents {
            let Some((key, why)) = broken.find(packs.get(extent.pack), extent.chunk) else { continue };
            reported.insert(key);
            let start = u64::from(of.number) * SEGMENT + u64::from(extent.start) * BLOCK;
            let end = start + u64::from(extent.blocks) * BLOCK;
            let is_full = damage.len() == TOLD;
            match damage.last_mut().filter(|last| is_full || last.end == Some(start) && last.what == *why) {
                Some(last) => last.end = Some(end),
                None => damage.push(Damage {
                    backup: Some(index.about.id.clone()),
                    what: why.clone(),
                    start: Some(start),
                    end: Some(end),
                }),
            }
        }
    }
    Ok(damage)
}

/// Leaves a note at each damaged backup, so that none is made over it, and takes it away from those that are sound.
fn note(repository: &Repository, chosen: &[String], report: &Report) {
    let mark = |id: &String| {
        let name = format!("damaged/{id}");
        let what = report.damage.iter().find(|damage| damage.backup.as_ref() == Some(id));
        match (what, repository.known_damage(id)?) {
            (Some(damage), _) => repository.store.replace(&name, envelope(&damage.what)),
            (None, Some(_)) => repository.store.remove(&[name]),
            (None, None) => Ok(()),
        }
    };
    if let Some(error) = chosen.iter().filter_map(|id| mark(id).err()).next() {
        tracing::warn!("what was found is not noted in the repository: {}", base::report(&error));
    }
}
