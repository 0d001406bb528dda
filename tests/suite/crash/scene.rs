//! The objects that the rounds work on, and those that must be the same before and after each round.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use base::ByteRange;
use files::DataRanges;

use super::cases::{
    FILESYSTEM, FIRST, NAMES, OF_FILES, ORIGIN, OTHER, RAW, publish, snapshot, stage, target, unpublish,
    unstage, volume,
};
use crate::model::calls::{Access, Call, From, MountPath, Name, Ref, Step};
use crate::model::life::{self, Known, Life};
use crate::model::names::Asked;
use crate::model::rounds::Event;
use crate::model::wire::{Answer, make};
use crate::model::world::{Bytes, MARK, World};
use testkit::prelude::*;
use testkit::subject::{Site, Subject};

/// The size of a raw volume.
pub const SIZE: i64 = 8 * MIB;
/// The size of a volume with a filesystem.
pub const FILES: i64 = 16 * MIB;
/// The content of the file on the mounted volume.
const MARKED: u8 = 7;

/// Volumes and snapshots that no round may damage, and the model of all objects.
pub struct Scene {
    /// The ids of the volumes: see `cases.rs`.
    pub origin: String,
    pub other: String,
    pub raw: String,
    pub files: String,
    /// A snapshot of the origin.
    pub snapshot: String,
    /// The content of the origin's blocks.
    content: Content,
    /// The hash of each volume that is not written.
    pub volumes: BTreeMap<String, blake3::Hash>,
    /// The hash of each acknowledged snapshot.
    pub snapshots: BTreeMap<String, blake3::Hash>,
    known: Known,
    tally: life::Tally,
    is_mounted: bool,
}

/// A hash of the content of a file, whether its zeros are holes or not.
pub fn hash(path: &Path) -> Result<blake3::Hash, String> {
    let file = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    // Whole blocks in a row are hashed many at once, so their places come last.
    let (mut hasher, mut places) = (blake3::Hasher::new(), length.to_le_bytes().to_vec());
    for range in DataRanges::of(&file, path, ByteRange { start: 0, end: length }) {
        let range = range.map_err(|error| error.to_string())?;
        let mut data = vec![0; range.len() as usize];
        file.read_exact_at(&mut data, range.start).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut kept = 0;
        for start in (0..data.len()).step_by(BLOCK as usize) {
            let block = start..data.len().min(start + BLOCK as usize);
            if data[block.clone()] != [0; BLOCK as usize][..block.len()] {
                places.extend((range.start + start as u64).to_le_bytes());
                data.copy_within(block.clone(), kept);
                kept += block.len();
            }
        }
        hasher.update(&data[..kept]);
    }
    hasher.update(&places);
    Ok(hasher.finalize())
}

#[test]
fn a_hash_is_of_content_and_its_place_and_not_of_holes() {
    let dir = testkit::temp_dir();
    let made = |name: &str, pieces: &[(u64, u8)]| {
        let path = dir.path().join(name);
        let file = File::create(&path).expect("create");
        file.set_len(SIZE as u64).expect("set_len");
        for (block, byte) in pieces {
            file.write_all_at(&[*byte; BLOCK as usize], block * BLOCK).expect("write");
        }
        hash(&path).expect("hash")
    };
    let first = made("first", &[(3, 7)]);
    assert_eq!(first, made("zeros", &[(2, 0), (3, 7), (100, 0)]));
    for other in [&[][..], &[(4, 7)], &[(3, 8)], &[(3, 7), (4, 7)]] {
        assert_ne!(first, made("other", other), "{other:?}");
    }
}

/// Checks that an image holds a sound ext4 as of one moment.
pub fn check_filesystem(image: &Path) -> Result<(), String> {
    let checked = std::process::Command::new("e2fsck").args(["-f", "-n"]).arg(image).output();
    let checked = checked.map_err(|error| error.to_string())?;
    match checked.status.success() {
        true => Ok(()),
        false => Err(format!("{}: {}", image.display(), String::from_utf8_lossy(&checked.stdout))),
    }
}

/// Writes and syncs the first block of a published device.
pub fn write_first_block(target: &Path) -> std::io::Result<()> {
    let file = File::options().write(true).open(target)?;
    file.write_all_at(&[7; BLOCK as usize], 0).and_then(|()| file.sync_all())
}

impl Scene {
    pub async fn make(rig: &mut Rig) -> Self {
        let (volumes, snapshots, content) = Default::default();
        let [origin, other, raw, files, snapshot] = Default::default();
        let known = Known::new(NAMES, rig.kubelet(), World::new(true, [Site::alone()].into(), 0));
        let tally = life::Tally::default();
        let mut scene = Scene {
            origin,
            other,
            raw,
            files,
            snapshot,
            content,
            volumes,
            snapshots,
            known,
            tally,
            is_mounted: true,
        };
        scene.live(rig, &steps()).await.unwrap_or_else(|said| panic!("the scene: {said}"));
        [scene.origin, scene.other, scene.raw, scene.files] =
            [ORIGIN, OTHER, RAW, FILESYSTEM].map(|name| scene.volume(name));
        scene.snapshot = scene.known.names.snapshot(&Ref::Last(FIRST));
        let Bytes::Raw(content) = &scene.known.worlds[0].volumes[&scene.origin].bytes else {
            panic!("the origin is a device")
        };
        scene.content = content.clone();
        let image = |id: &str| rig.volume_dir(id).data();
        let held = hash(&image(&scene.origin)).expect("hash");
        scene.check_origin(&image(&scene.origin)).expect("the origin");
        for id in [&scene.origin, &scene.other, &scene.raw] {
            scene.volumes.insert(id.clone(), held);
        }
        scene
    }

    pub fn volume(&self, name: Name) -> String {
        self.known.names.volume(&Ref::Last(name))
    }

    pub fn path(&self, place: MountPath) -> PathBuf {
        self.known.names.path(place).into()
    }

    /// Makes some steps, and compares each with the model.
    pub async fn live(&mut self, rig: &mut Rig, steps: &[Step]) -> Result<(), String> {
        let mut lent = Subject::lent(rig);
        let mut life = Life::begin(&mut lent, &mut self.tally, &mut self.known).await;
        for step in steps {
            let lived = life.step(step).await;
            lived.map_err(|said| format!("{step:?}: {}", life.known.names.spelled(&said)))?;
        }
        Ok(())
    }

    /// A call with the ids that its names have now.
    pub fn asked(&self, call: &Call) -> Asked {
        Asked { call: call.clone(), names: self.known.names.clone() }
    }

    /// Updates the model with the end of a call. An interrupted call may have left any state from which a retry continues. With
    /// `look`, the lists, the kernel and the devices tell which.
    pub async fn ended(
        &mut self,
        rig: &mut Rig,
        asked: Asked,
        answer: Answer,
        look: bool,
    ) -> Result<(), String> {
        let mut lent = Subject::lent(rig);
        let mut life = Life::begin(&mut lent, &mut self.tally, &mut self.known).await;
        let mut outcome = life.cut(&[Event { asked, answer }]).await;
        if look && outcome.is_ok() {
            outcome = life.look().await;
        }
        outcome.map_err(|said| life.known.names.spelled(&said))
    }

    /// Makes calls that the model does not follow.
    async fn call(&self, client: &mut Client, calls: &[Call]) {
        for call in calls {
            let answer = make(client, &self.asked(call)).await;
            assert!(matches!(answer, Answer::Done(_)), "{call:?}: {answer}");
        }
    }

    /// Stages and publishes the volumes if they are not, as kubelet does after a reboot.
    pub async fn use_again(&self, rig: &mut Rig) {
        let calls = [RAW, FILESYSTEM].map(|name| [stage(name), publish(name, false)]);
        self.call(&mut rig.client, calls.as_flattened()).await;
    }

    /// Unmounts the filesystem, since it could not write its journal on a full pool.
    pub async fn unmount(&mut self, rig: &mut Rig) {
        let calls = [unpublish(FILESYSTEM), unstage(FILESYSTEM)].map(Step::One);
        self.live(rig, &calls).await.unwrap_or_else(|said| panic!("{said}"));
        self.is_mounted = false;
    }

    /// Unmounts and detaches the scene's volumes.
    pub async fn leave(&self, rig: &mut Rig) {
        let calls = [RAW, FILESYSTEM].map(|name| [unpublish(name), unstage(name)]);
        self.call(&mut rig.client, calls.as_flattened()).await;
    }

    /// Checks that a file has the content of the origin.
    pub fn check_origin(&self, path: &Path) -> Result<(), String> {
        self.content.compare(path, 0, SIZE as u64 / BLOCK)
    }

    /// Checks that the volume is mounted and its file has the written content.
    pub fn check_files(&self) -> Result<(), String> {
        if !self.is_mounted {
            return Ok(());
        }
        let path = self.path(target(FILESYSTEM)).join(MARK);
        match std::fs::read(&path) {
            Ok(bytes) if bytes == [MARKED] => Ok(()),
            other => Err(format!("{}: {other:?}", path.display())),
        }
    }
}

fn steps() -> Vec<Step> {
    let origin = || From::Volume(Ref::Last(ORIGIN));
    let device = |name, from| volume(name, Access::Block, SIZE, from);
    let mut steps: Vec<Step> =
        [device(ORIGIN, From::Nothing), stage(ORIGIN), publish(ORIGIN, false)].map(Step::One).into();
    steps.extend([
        Step::Write { volume: ORIGIN, block: 0, count: 300, fill: 1 },
        Step::Write { volume: ORIGIN, block: 1000, count: 300, fill: 2 },
        Step::Discard { volume: ORIGIN, block: 1100, count: 50 },
    ]);
    let calls = [
        unpublish(ORIGIN),
        unstage(ORIGIN),
        snapshot(FIRST, ORIGIN),
        device(OTHER, origin()),
        device(RAW, origin()),
        stage(RAW),
        publish(RAW, false),
        volume(FILESYSTEM, Access::Fs("ext4"), FILES, From::Nothing),
        stage(FILESYSTEM),
        publish(FILESYSTEM, false),
    ];
    steps.extend(calls.map(Step::One));
    steps.push(Step::Write { volume: FILESYSTEM, block: 0, count: 1, fill: MARKED });
    steps.push(Step::One(snapshot(OF_FILES, FILESYSTEM)));
    steps
}
