//! A small file that is replaced in place: on a filesystem without room, where a new file cannot be made.

use std::fs::File;
use std::io;
use std::path::Path;

use super::attributes::Flag;
use base::DraftFile;
use files::{Context, Result, change, durable};

/// Two slots of equal length, one of which holds the content and the other the one before it.
///
/// ```text
/// slot     number, length of the content, BLAKE3 of number and content: in ASCII, blanks between them, a line feed
///          the content
///          zeros
/// ```
///
/// The content is that of the larger number whose length and hash are right: a slot that was torn by a crash is not. The
/// slots are written when the file is made, so that the filesystem has room for them from then on.
const SLOT: usize = 8 << 10;

/// A slot as it is on disk.
struct Slot {
    number: u64,
    content: Vec<u8>,
}

impl Slot {
    fn decode(bytes: &[u8]) -> Option<Self> {
        let line = bytes.iter().take(128).position(|byte| *byte == b'\n')?;
        let mut words = std::str::from_utf8(&bytes[..line]).ok()?.split(' ');
        let number = words.next()?.parse().ok()?;
        let length: usize = words.next()?.parse().ok()?;
        let slot = Slot { number, content: bytes[line + 1..].get(..length)?.to_owned() };
        (slot.hash().to_hex().as_str() == words.next()?).then_some(slot)
    }

    fn hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.number.to_le_bytes()).update(&self.content).finalize()
    }

    /// `None` where it is too long for a slot of this length.
    fn encode(&self, length: usize) -> Option<Vec<u8>> {
        let mut bytes = format!("{} {} {}\n", self.number, self.content.len(), self.hash()).into_bytes();
        bytes.extend(&self.content);
        (bytes.len() <= length).then(|| {
            bytes.resize(length, 0);
            bytes
        })
    }
}

/// The content of a file; `None` where it has none. An error where both slots are damaged.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).context("read", path),
        Ok(bytes) => match newest(&bytes) {
            Some((_, slot)) => Ok(Some(slot.content)),
            // Made, and not written yet.
            None if bytes.len() >= 2 * SLOT && bytes.iter().all(|byte| *byte == 0) => Ok(None),
            None => Err(io::Error::from(io::ErrorKind::InvalidData)).context("find a whole slot in", path),
        },
    }
}

/// The slot that holds the content, by its place.
fn newest(bytes: &[u8]) -> Option<(usize, Slot)> {
    if !bytes.len().is_multiple_of(2 * SLOT) {
        return None;
    }
    let slots = [0, 1].map(|place| Slot::decode(&bytes[place * bytes.len() / 2..][..bytes.len() / 2]));
    slots
        .into_iter()
        .enumerate()
        .filter_map(|(place, slot)| Some((place, slot?)))
        .max_by_key(|(_, slot)| slot.number)
}

/// Makes an empty file that takes content without any more room. Synced; its directory entry is the caller's to sync.
pub fn create(path: &Path) -> Result<()> {
    make(path, &[0; 2 * SLOT])
}

fn make(path: &Path, bytes: &[u8]) -> Result<()> {
    let file = change::create_new(path)?;
    // On btrfs a block is overwritten in place only if its file says so while it is empty. No other filesystem takes that.
    match Flag::OverwriteInPlace.set(&file, path, true) {
        Err(error) if !matches!(error.errno(), Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::EINVAL)) => {
            return Err(error);
        }
        _ => {}
    }
    change::write(&file, path, bytes)?;
    change::sync(&file, path)
}

/// Replaces the content of a file, which is made where it is missing.
///
/// 1. Write the slot that does not hold the content: a crash leaves it torn, and the content as it was.
/// 2. Sync it: from here on it is the content, also after a power cut.
///
/// Content that is too long for a slot takes a larger file, which is renamed into place.
pub fn write(path: &Path, content: &[u8]) -> Result<()> {
    let bytes = match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            create(path)?;
            durable::sync_dir(path.parent().unwrap_or(Path::new("/")))?;
            vec![0; 2 * SLOT]
        }
        bytes => bytes.context("read", path)?,
    };
    let newest = newest(&bytes);
    let number = newest.as_ref().map_or(0, |(_, slot)| slot.number) + 1;
    let place = newest.map_or(0, |(place, _)| 1 - place);
    let slot = Slot { number, content: content.to_owned() };
    let length = bytes.len() / 2;
    let Some(encoded) = slot.encode(length).filter(|_| length >= SLOT) else {
        let length = (content.len() + 128).next_multiple_of(SLOT);
        let mut bytes = slot.encode(length).unwrap_or_default();
        bytes.resize(2 * length, 0);
        return durable::replace_with(path, &DraftFile::New.of(path), |fresh| make(fresh, &bytes));
    };
    let file = File::options().write(true).open(path).context("open", path)?;
    change::write_at(&file, path, &encoded, (place * length) as u64)?;
    change::sync_data(&file, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_content_is_read_and_a_torn_one_is_not() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("state.json");
        assert_eq!(read(&path).expect("read"), None);
        create(&path).expect("create");
        assert_eq!(read(&path).expect("read"), None);
        for content in ["one", "two", "three"] {
            write(&path, content.as_bytes()).expect("write");
            assert_eq!(read(&path).expect("read").as_deref(), Some(content.as_bytes()));
        }
        let whole = std::fs::read(&path).expect("read");
        assert_eq!(whole.len(), 2 * SLOT);
        // "three" is in the first slot, "two" in the second.
        for cut in 0..90 {
            let mut torn = whole.clone();
            torn[cut..SLOT].fill(0);
            std::fs::write(&path, &torn).expect("write");
            let expected: &[u8] = if cut < 74 { b"two" } else { b"three" };
            assert_eq!(read(&path).expect("read").as_deref(), Some(expected), "torn at {cut}");
        }
        std::fs::write(&path, vec![b'x'; 2 * SLOT]).expect("write");
        assert!(read(&path).is_err(), "both slots are damaged");
    }

    #[test]
    fn long_content_makes_the_file_larger() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("state.json");
        for length in [10, SLOT, 5 * SLOT, 3, 7 * SLOT + 1] {
            let content = vec![b'y'; length];
            write(&path, &content).expect("write");
            assert_eq!(read(&path).expect("read"), Some(content), "{length} bytes");
        }
        assert_eq!(std::fs::read_dir(dir.path()).expect("list").count(), 1, "a draft is left");
    }
}
