//! What the rounds work on, and what must be the same before and after each of them.

use std::collections::BTreeMap;
use std::path::Path;

use csi_client::{block_capability, from_volume, mount_capability, new_volume};

use testkit::content::Content;
use testkit::{BLOCK, MIB, Rig};

/// The size of a raw volume.
pub const SIZE: i64 = 8 * MIB;
/// The size of a volume with a filesystem.
pub const FILES: i64 = 16 * MIB;
/// A file on the mounted volume, and what it says.
const MARKER: (&str, &str) = ("marker", "written before everything");

/// Volumes and snapshots that no round may harm.
pub struct Scene {
    /// A raw volume that nobody uses.
    pub origin: String,
    /// The same content again, for groups.
    pub other: String,
    /// A raw volume whose device is attached all the time.
    pub raw: String,
    /// An ext4 that is mounted all the time.
    pub files: String,
    /// A snapshot of the origin.
    pub snapshot: String,
    /// What the blocks of the origin hold.
    content: Content,
    /// The content of each volume that nobody writes.
    pub volumes: BTreeMap<String, blake3::Hash>,
    /// The content of each snapshot that was acknowledged.
    pub snapshots: BTreeMap<String, blake3::Hash>,
}

/// The hash of a whole file.
pub fn hash(path: &Path) -> Result<blake3::Hash, String> {
    let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(blake3::hash(&bytes))
}

/// The newest of some snapshots.
pub fn newest(snapshots: impl Iterator<Item = proto::Snapshot>) -> String {
    let when = |snapshot: &proto::Snapshot| {
        let time = snapshot.creation_time.expect("creation_time");
        (time.seconds, time.nanos)
    };
    snapshots.max_by_key(when).expect("a snapshot").snapshot_id
}

/// Whether an image holds a sound ext4, as it was at one moment.
pub fn check_filesystem(image: &Path) -> Result<(), String> {
    let checked = std::process::Command::new("e2fsck").args(["-f", "-n"]).arg(image).output();
    let checked = checked.map_err(|error| error.to_string())?;
    match checked.status.success() {
        true => Ok(()),
        false => Err(format!("{}: {}", image.display(), String::from_utf8_lossy(&checked.stdout))),
    }
}

impl Scene {
    pub async fn make(rig: &mut Rig) -> Self {
        let (origin, device) = rig.block_volume("origin", SIZE).await;
        let mut content = Content::default();
        content.write(&device, 0, 300, 1);
        content.write(&device, 1000, 300, 2);
        content.discard(&device, 1100, 50);
        rig.detach(&origin).await;
        let snapshot = rig.snapshot("first", &origin).await;
        let copy = |name| {
            let mut request = new_volume(name, SIZE, block_capability());
            request.volume_content_source = Some(from_volume(&origin));
            request
        };
        let other = rig.client.create_volume(copy("other")).await.expect("clone").volume_id;
        let raw = rig.client.create_volume(copy("raw")).await.expect("clone").volume_id;
        rig.attach(&raw).await;
        let request = new_volume("files", FILES, mount_capability("ext4"));
        let files = rig.client.create_volume(request).await.expect("create").volume_id;
        let kubelet = rig.kubelet();
        let target = rig.client.publish(&files, mount_capability("ext4"), false, &kubelet).await;
        let target = target.expect("publish");
        std::fs::write(target.join(MARKER.0), MARKER.1).expect("write");
        rig.snapshot("files", &files).await;
        let mut scene = Scene {
            content,
            volumes: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            snapshot,
            other,
            raw,
            files,
            origin,
        };
        let image = |id: &str| rig.pool_dir().join("volumes").join(id).join("bytes/data.img");
        let held = hash(&image(&scene.origin)).expect("hash");
        scene.check_origin(&image(&scene.origin)).expect("the origin");
        for id in [&scene.origin, &scene.other, &scene.raw] {
            scene.volumes.insert(id.clone(), held);
        }
        scene
    }

    /// Two volumes that nobody uses.
    pub fn idle(&self) -> Vec<String> {
        vec![self.origin.clone(), self.other.clone()]
    }

    /// A raw device and a filesystem.
    pub fn in_use(&self) -> Vec<String> {
        vec![self.raw.clone(), self.files.clone()]
    }

    /// Whether a file holds what was written to the origin.
    pub fn check_origin(&self, path: &Path) -> Result<(), String> {
        self.content.compare(path, 0, SIZE as u64 / BLOCK)
    }

    /// Whether the mounted volume is there and its file as it was written.
    pub fn check_files(&self, rig: &Rig) -> Result<(), String> {
        let path = rig.kubelet().join(&self.files).join("target").join(MARKER.0);
        match std::fs::read(&path) {
            Ok(bytes) if bytes == MARKER.1.as_bytes() => Ok(()),
            other => Err(format!("{}: {other:?}", path.display())),
        }
    }

    /// Unmounts and detaches what the scene holds.
    pub async fn leave(&self, rig: &mut Rig) {
        for id in [&self.raw, &self.files] {
            rig.detach(id).await;
        }
    }
}
