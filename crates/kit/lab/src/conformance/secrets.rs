//! The secrets file: csi-sanity's format, a YAML map a call, such as `CreateVolumeSecret`.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

/// Secrets by call. They are sent, and shown nowhere.
#[derive(Clone, Default)]
pub(crate) struct Secrets(HashMap<String, HashMap<String, String>>);

impl Secrets {
    /// Reads the file.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        // The parser's own message would quote the file.
        let parsed = serde_saphyr::from_str(&text).map_err(|_| {
            format!(
                "{} is not a secrets file: write a YAML map a call, CreateVolumeSecret: {{key: value}}",
                path.display()
            )
        })?;
        Ok(Secrets(parsed))
    }

    /// The secrets of `call`, an RPC's name or `SnapshotMetadata`. The streams get those of CreateSnapshot
    /// where they have none of their own, as the external-snapshot-metadata sidecar does it.
    pub fn of(&self, call: &str) -> HashMap<String, String> {
        let own = self.0.get(&format!("{call}Secret"));
        let own = own.or_else(|| match call {
            "SnapshotMetadata" => self.0.get("CreateSnapshotSecret"),
            _ => None,
        });
        own.cloned().unwrap_or_default()
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secrets({} calls)", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Secrets, String> {
        let file = tempfile::NamedTempFile::new().expect("temp file");
        std::fs::write(file.path(), text).expect("write");
        Secrets::read(file.path())
    }

    #[test]
    fn a_call_gets_its_own_and_a_stream_those_of_the_snapshot() {
        let secrets =
            read("CreateVolumeSecret: {a: b}\nCreateSnapshotSecret:\n  key: \"12\"\n").expect("read");
        assert_eq!(secrets.of("CreateVolume")["a"], "b");
        assert_eq!(secrets.of("SnapshotMetadata")["key"], "12");
        assert!(secrets.of("DeleteVolume").is_empty());
        let own = read("CreateSnapshotSecret: {a: b}\nSnapshotMetadataSecret: {c: d}\n").expect("read");
        assert_eq!(own.of("SnapshotMetadata")["c"], "d");
    }

    #[test]
    fn neither_an_error_nor_a_debug_print_shows_a_secret() {
        let error = read("CreateVolumeSecret: hunter2").expect_err("no map");
        assert!(error.contains("CreateVolumeSecret") && !error.contains("hunter2"), "{error}");
        let secrets = read("CreateVolumeSecret: {a: hunter2}").expect("read");
        assert_eq!(format!("{secrets:?}"), "Secrets(1 calls)");
    }
}
