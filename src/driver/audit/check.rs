//! The audit of a data directory. It checks that all records are readable, that every file belongs to an object, and that
//! the records explain every loop device and mount. It changes nothing. Only [`Inspection::repair`] does, and never an
//! object.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::driver::audit::inspect::Inspection;
use crate::driver::error::Result;
use crate::store::{SnapshotRecord, VolumeRecord, VolumeState};
use crate::sys::attributes::Flag;
use crate::sys::loopdev::{FileId, LoopDevice, may_be};
use crate::sys::{blockdev, mount};
use base::{DraftFile, GroupDir, ObjectDir};
use files::Context;
use files::durable;

/// How serious a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Something that was acknowledged is not as it was written: a person must decide.
    Damage,
    /// Left by a crash. Not needed, and can be removed.
    Leftover,
    /// Not made by this driver, in a place that belongs to it. Never changed.
    Stranger,
    /// Allowed: the driver corrects it when it uses the object next.
    Note,
}

/// A finding of an audit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discovery {
    /// How serious it is.
    pub severity: Severity,
    /// The file, directory or device.
    pub path: PathBuf,
    /// What is wrong with it.
    pub what: String,
    repair: Option<Repair>,
}

/// How a finding is repaired.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Repair {
    /// Removes half-made and half-removed objects, as a start does.
    Clear,
    /// Removes an unfinished file.
    Remove,
    /// Unmounts the filesystem, if it is still that of the device with this number.
    Unmount(String),
    Detach(LoopDevice),
}

impl Discovery {
    fn new(severity: Severity, path: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Discovery { severity, path: path.into(), what: what.into(), repair: None }
    }

    fn repaired_by(mut self, repair: Repair) -> Self {
        self.repair = Some(repair);
        self
    }
}

/// What is known about a file in the data directory that a loop device serves.
enum Backing {
    Volume(VolumeState),
    Snapshot,
    Pool,
    /// The records of its object cannot be read, so it is not known whether a device may serve it.
    Unknown,
}

/// One audit of a data directory.
struct Audit<'i> {
    inspection: &'i Inspection,
    found: Vec<Discovery>,
    backing: HashMap<FileId, Backing>,
}

impl Inspection {
    /// Checks everything but the blocks, which [`Inspection::verify`] reads. The most serious findings come first.
    ///
    /// While a driver runs, the findings may include objects that a call is making or removing. Findings that a second
    /// audit a moment later repeats are real.
    pub fn check(&self) -> Result<Vec<Discovery>> {
        let mut audit = Audit { inspection: self, found: Vec::new(), backing: HashMap::new() };
        audit.data_dir()?;
        audit.records();
        audit.volumes()?;
        audit.snapshots()?;
        audit.groups()?;
        audit.devices()?;
        let mut found = audit.found;
        // The sort is stable, so mounts stay before their devices: they must be removed in this order.
        found.sort_by_key(|discovery| discovery.severity);
        Ok(found)
    }

    /// Repairs a finding, and returns whether it did. A device that is open stays.
    ///
    /// # Panics
    ///
    /// If a driver serves the directory, since it makes and removes these objects itself.
    pub fn repair(&self, discovery: &Discovery) -> Result<bool> {
        assert!(!self.is_served(), "a driver is at work here");
        let path = &discovery.path;
        match &discovery.repair {
            None => return Ok(false),
            Some(Repair::Clear) => self.store().clear_leftovers()?,
            Some(Repair::Remove) => durable::remove(path)?,
            Some(Repair::Unmount(dev)) => match mount::mounted_at(path)? {
                Some(mounted) if mounted.is_of(dev) => mount::unmount_top(path)?,
                _ => return Ok(false),
            },
            Some(Repair::Detach(_)) if blockdev::is_claimed(path)? => return Ok(false),
            Some(Repair::Detach(device)) => return Ok(device.clone().detach()?),
        }
        Ok(true)
    }
}

impl Audit<'_> {
    fn add(&mut self, severity: Severity, path: impl Into<PathBuf>, what: impl Into<String>) {
        self.found.push(Discovery::new(severity, path, what));
    }

    /// Checks the names in the data directory and at the top of the pool.
    fn data_dir(&mut self) -> Result<()> {
        let dir = self.inspection.data_dir().clone();
        let (pool, image) = (dir.pool(), dir.pool_image());
        let known =
            [dir.manifest(), dir.lock(), image.clone(), dir.untried(), dir.reserve(), pool.path().into()];
        self.names(dir.path(), &known.each_ref().map(PathBuf::as_path))?;
        let parts = [pool.volumes(), pool.snapshots(), pool.groups(), pool.staging(), pool.reserve()];
        self.names(pool.path(), &parts.each_ref().map(PathBuf::as_path))?;
        if image.exists() {
            self.backing.insert(FileId::of(&image)?, Backing::Pool);
        }
        // A running driver makes and removes objects there.
        if !self.inspection.is_served() {
            let transfers = self.inspection.store().transfers()?;
            for path in list(&pool.staging())? {
                if transfers.iter().any(|record| path.ends_with(record.id.as_str())) {
                    let what =
                        "a volume that is being copied from another node; the driver continues or removes it";
                    self.add(Severity::Note, path, what);
                    continue;
                }
                let what = "half made or half removed; the next start removes it";
                let found = Discovery::new(Severity::Leftover, path, what);
                self.found.push(found.repaired_by(Repair::Clear));
            }
        }
        Ok(())
    }

    /// Reports the files of a directory that are not in `known`.
    fn names(&mut self, dir: &Path, known: &[&Path]) -> Result<()> {
        for path in list(dir)? {
            // mkfs.ext4 makes this directory at the root.
            if known.contains(&&*path) || path.file_name().is_some_and(|name| name == "lost+found") {
                continue;
            }
            let is_draft_of = |file: &&Path| DraftFile::ALL.iter().any(|draft| draft.of(file) == path);
            self.found.push(match known.iter().any(is_draft_of) {
                // A running driver may be writing them, and a comparison or a check may take long.
                true if self.inspection.is_served() => continue,
                true => Discovery::new(Severity::Leftover, path, "a file that was not written to its end")
                    .repaired_by(Repair::Remove),
                false => Discovery::new(Severity::Stranger, path, "not a file of this driver"),
            });
        }
        Ok(())
    }

    /// Reports the records that cannot be read.
    fn records(&mut self) {
        let store = self.inspection.store();
        let retained = store.damaged_retained().iter().map(|damage| (damage, "a deleted snapshot: "));
        for (damage, whose) in store.damaged().iter().map(|damage| (damage, "")).chain(retained) {
            self.add(Severity::Damage, &damage.path, format!("{whose}{}", base::report(&damage.error)));
            if let Ok(file) = FileId::of(&ObjectDir::new(&damage.path).data()) {
                self.backing.insert(file, Backing::Unknown);
            }
        }
    }

    fn volumes(&mut self) -> Result<()> {
        let store = self.inspection.store();
        let records: Vec<_> = store.read(|index| index.volumes_after(None).cloned().collect());
        for record in records {
            self.volume(&record)?;
        }
        Ok(())
    }

    fn volume(&mut self, record: &VolumeRecord) -> Result<()> {
        let store = self.inspection.store();
        let dir = store.dir().volume(&record.id);
        let ungrown = dir.ungrown();
        self.names(dir.path(), &[&dir.record(), &dir.state(), &dir.bytes(), ungrown.path()])?;
        if ungrown.path().exists() && !self.inspection.is_served() {
            let what = "the growth of its filesystem was cut short; the next start undoes it";
            self.add(Severity::Note, ungrown.path(), what);
        }
        match length(&dir)? {
            Some(length) if length > record.capacity => {
                let what = format!(
                    "{length} bytes, its record says {}: an expansion was cut short",
                    record.capacity
                );
                self.add(Severity::Note, dir.data(), what);
            }
            length => self.content(&dir, length, record.capacity)?,
        }
        let is_synchronous = |file: fs::File| Flag::Synchronous.is_set(&file, &dir.data()).ok();
        if fs::File::open(dir.data()).ok().and_then(is_synchronous) == Some(true) {
            let what = "an interrupted copy left synchronous writes on; the next start turns them off";
            self.add(Severity::Note, dir.data(), what);
        }
        let state = store.volume_state(&record.id);
        match &state {
            Ok(VolumeState { frozen: Some(_), .. }) => {
                self.add(
                    Severity::Note,
                    dir.state(),
                    "a freeze that was not undone; the next start thaws it",
                );
            }
            Ok(_) => {}
            Err(error) => self.add(Severity::Damage, dir.state(), base::report(error)),
        }
        if let Ok(file) = FileId::of(&dir.data()) {
            self.backing.insert(file, state.map_or(Backing::Unknown, Backing::Volume));
        }
        Ok(())
    }

    fn snapshots(&mut self) -> Result<()> {
        let store = self.inspection.store();
        let lines: Vec<_> =
            store.read(|index| index.lines().flat_map(|volume| index.line(volume)).cloned().collect());
        for record in lines {
            let retained = store.read(|index| index.retained(&record.id).is_some());
            self.snapshot(&record, &store.snapshot_dir(&record), retained)?;
        }
        Ok(())
    }

    fn snapshot(&mut self, record: &SnapshotRecord, dir: &ObjectDir, retained: bool) -> Result<()> {
        let maps = [dir.allocated(), dir.changed(), dir.pending(), dir.hashes()];
        let mut known = vec![dir.record(), dir.bytes()];
        if record.group.is_none() {
            known.push(dir.deleted());
        }
        known.extend(maps);
        known.extend(ObjectDir::SKIPS.map(|level| dir.skip(level)));
        self.names(dir.path(), &known.iter().map(PathBuf::as_path).collect::<Vec<_>>())?;
        match length(dir)? {
            // The bytes of a deleted snapshot may have been freed.
            None if retained && !dir.bytes().exists() => {}
            length => self.content(dir, length, record.capacity)?,
        }
        if let Ok(file) = FileId::of(&dir.data()) {
            self.backing.insert(file, Backing::Snapshot);
        }
        match cbt::check_maps(dir, record.block_size, record.capacity, record.tracking) {
            Ok(findings) => {
                for cbt::Finding { what, range } in findings {
                    let place = range.map(|range| format!(", bytes {} to {}", range.start, range.end));
                    self.add(Severity::Damage, dir.path(), what + &place.unwrap_or_default());
                }
            }
            Err(error) => self.add(Severity::Damage, dir.path(), base::report(&error)),
        }
        Ok(())
    }

    /// Checks that the bytes of an object are one file, of the size in its record.
    fn content(&mut self, dir: &ObjectDir, length: Option<u64>, capacity: u64) -> Result<()> {
        if dir.bytes().exists() {
            self.names(&dir.bytes(), &[&dir.data()])?;
        }
        match length {
            None => self.add(Severity::Damage, dir.data(), "its blocks are missing"),
            Some(length) if length != capacity => {
                self.add(Severity::Damage, dir.data(), format!("{length} bytes, its record says {capacity}"));
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Checks the names in the directories of groups, except for those of the members' files.
    fn groups(&mut self) -> Result<()> {
        for path in list(&self.inspection.store().dir().groups())? {
            let group = GroupDir::new(&path);
            self.names(&path, &[&group.record(), &group.members(), &group.deleted()])?;
            if group.deleted().exists() && list(&group.members())?.is_empty() {
                let what = "a deleted group without members; the next start removes it";
                let found = Discovery::new(Severity::Leftover, path, what);
                self.found.push(found.repaired_by(Repair::Clear));
            }
        }
        Ok(())
    }

    /// Checks the loop devices on files of the data directory, and where they are mounted.
    fn devices(&mut self) -> Result<()> {
        let mounts = mount::mounts()?;
        let dir = self.inspection.data_dir().clone();
        // It may have been attached in another mount namespace, where the path is different.
        let may_be_ours = |path: &Path| {
            path.starts_with(dir.path()) || may_be(path, &dir.pool_image()) || self.names_an_object(path)
        };
        for device in LoopDevice::all_on(may_be_ours)? {
            let Some((severity, what)) = self.unexplained(&device) else {
                self.places(&device, &mounts)?;
                continue;
            };
            if severity != Severity::Leftover {
                self.add(severity, device.path(), what);
                continue;
            }
            let dev = device.dev()?;
            for mounted in mounts.iter().rev().filter(|mounted| mounted.is_of(&dev)) {
                let what = format!("mounted from {}, which {what}", device.path().display());
                let found = Discovery::new(severity, &mounted.mount_point, what);
                self.found.push(found.repaired_by(Repair::Unmount(dev.clone())));
            }
            let found = Discovery::new(severity, device.path(), what);
            self.found.push(found.repaired_by(Repair::Detach(device)));
        }
        Ok(())
    }

    /// Whether the end of a path is that of an object's file.
    fn names_an_object(&self, path: &Path) -> bool {
        let id =
            path.parent().and_then(Path::parent).and_then(Path::file_name).and_then(|name| name.to_str());
        let store = self.inspection.store();
        id.is_some_and(|id| {
            let volume = id.parse().is_ok_and(|id| store.read(|index| index.volume(&id)).is_some());
            volume || id.parse().is_ok_and(|id| store.read(|index| index.known(&id)).is_some())
        })
    }

    /// Reports mounts of a volume at places that its record does not name. Kubelet makes such mounts for a pod that mounts a
    /// part of a volume (`subPath`), so they are not undone.
    fn places(&mut self, device: &LoopDevice, mounts: &[mount::Mount]) -> Result<()> {
        let Some(Backing::Volume(state)) = device.backing().and_then(|file| self.backing.get(&file)) else {
            return Ok(());
        };
        let dev = device.dev()?;
        let path = device.path();
        let elsewhere = |mounted: &&mount::Mount| state.place(&mounted.mount_point).is_none();
        for mounted in mounts.iter().filter(|mounted| mounted.is_of(&dev)).filter(elsewhere) {
            let what =
                format!("mounted from {}, where its volume was neither staged nor published", path.display());
            self.found.push(Discovery::new(Severity::Note, &mounted.mount_point, what));
        }
        Ok(())
    }

    /// What is wrong with a device that no record explains; `None` if one does, or if the device is not ours. A file is
    /// identified by its device and inode number, since a file of another node may have the same path.
    fn unexplained(&self, device: &LoopDevice) -> Option<(Severity, &'static str)> {
        let serves = device.backing()?;
        match self.backing.get(&serves) {
            Some(Backing::Pool | Backing::Unknown) => return None,
            Some(Backing::Volume(state)) if !state.is_idle() => return None,
            Some(Backing::Volume(_)) => {
                return Some((Severity::Leftover, "serves a volume that is staged nowhere"));
            }
            Some(Backing::Snapshot) => {
                let what = "serves the blocks of a snapshot: a write to it changes the snapshot";
                return Some((Severity::Stranger, what));
            }
            None => {}
        }
        let dir = self.inspection.data_dir();
        let path = device.backing_path().filter(|path| path.starts_with(dir.path()))?;
        Some(match FileId::of(&path) {
            Ok(file) if file == serves && path.starts_with(dir.pool().staging()) => {
                (Severity::Leftover, "serves a half-made or half-removed volume")
            }
            Ok(file) if file == serves => (Severity::Stranger, "serves a file that belongs to no object"),
            // The deleted data is still in the device, so a person must decide to detach it.
            _ => (Severity::Note, "its backing file was removed, or belongs to another node"),
        })
    }
}

/// The length of an object's file in bytes; `None` if it does not exist.
fn length(dir: &ObjectDir) -> Result<Option<u64>> {
    match fs::metadata(dir.data()) {
        Ok(meta) => Ok(Some(meta.len())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context("stat", &dir.data()).map_err(Into::into),
    }
}

/// The paths in a directory; none if it was removed meanwhile.
fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.context("list", dir)?,
    };
    let mut paths =
        entries.map(|entry| Ok(entry.context("list", dir)?.path())).collect::<Result<Vec<PathBuf>>>()?;
    paths.sort();
    Ok(paths)
}
