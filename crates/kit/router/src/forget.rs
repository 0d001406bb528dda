//! `deltapath-router forget`: nodes that are gone for good, by the keys of their data directories.
//!
//! Only an operator can know that. Their keys stand in a file, one a line, which routers read again when it changes: in
//! Kubernetes a key of a ConfigMap, elsewhere a file of the machine.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;

use base::DataDirKey;

/// The keys in the file; none where there is no file.
pub fn read(path: &Path) -> Result<BTreeSet<DataDirKey>, String> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        Err(error) => return Err(format!("read {}: {error}", path.display())),
    };
    let lines = text.lines().enumerate();
    let keys = lines.map(|(at, line)| (at + 1, line.split('#').next().unwrap_or_default().trim()));
    keys.filter(|(_, key)| !key.is_empty())
        .map(|(line, key)| {
            key.parse().map_err(|error| format!("{}, line {line}: {key:?} is {error}", path.display()))
        })
        .collect()
}

/// Adds a key to the file. `Ok(false)`: it is there already.
pub fn add(path: &Path, key: DataDirKey) -> Result<bool, String> {
    if read(path)?.contains(&key) {
        return Ok(false);
    }
    let failed = |error: std::io::Error| format!("write {}: {error}", path.display());
    // In one write, after whatever stands there: two operators at once lose nothing of each other's.
    #[expect(clippy::disallowed_methods, reason = "no state of the driver: a file of the operator's")]
    let mut file = std::fs::File::options().create(true).append(true).open(path).map_err(failed)?;
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let begin = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    file.write_all(format!("{begin}{key}\n").as_bytes()).map_err(failed)?;
    #[expect(clippy::disallowed_methods, reason = "no state of the driver: a file of the operator's")]
    file.sync_all().map_err(failed)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_added_once_and_what_stands_there_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("forgotten");
        let key = |text: &str| text.parse::<DataDirKey>().expect("a key");
        assert_eq!(read(&path), Ok(BTreeSet::new()));
        assert_eq!(add(&path, key("0000000a")), Ok(true));
        assert_eq!(add(&path, key("0000000a")), Ok(false));
        let text = std::fs::read_to_string(&path).expect("read");
        #[expect(clippy::disallowed_methods, reason = "a test")]
        std::fs::write(&path, format!("# lost in the fire\n{text}  0000000b # the same\n\n0000000c"))
            .expect("write");
        assert_eq!(add(&path, key("0000000d")), Ok(true));
        let all = ["0000000a", "0000000b", "0000000c", "0000000d"].map(key);
        assert_eq!(read(&path), Ok(all.into()));
        #[expect(clippy::disallowed_methods, reason = "a test")]
        std::fs::write(&path, "0000000a\nnode-7\n").expect("write");
        let error = read(&path).expect_err("no key");
        assert!(error.contains("line 2: \"node-7\""), "{error}");
        assert_eq!(add(&path, key("0000000a")), Err(error));
    }
}
