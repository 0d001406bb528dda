//! Files that a run writes at its end, and reads of an earlier run.

use std::io::Write;
use std::path::Path;

use nix::unistd::{AccessFlags, access};

fn dir_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// An error where no file can be written, so that it is known before the run.
pub(crate) fn check(path: &Path) -> Result<(), String> {
    let dir = dir_of(path);
    let why = match access(dir, AccessFlags::W_OK) {
        _ if !dir.is_dir() => "its directory does not exist",
        Ok(()) if path.is_dir() => "it is a directory",
        Ok(()) => return Ok(()),
        Err(errno) => errno.desc(),
    };
    Err(format!("{} cannot be written: {why}", path.display()))
}

/// Reads what `--compare` names.
pub(crate) fn before<T: serde::de::DeserializeOwned>(path: &Path, what: &str) -> Result<T, String> {
    let failed = |why: &dyn std::fmt::Display| format!("--compare {}: {why}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| failed(&error))?;
    serde_json::from_str(&text).map_err(|error| failed(&format!("no {what}: {error}")))
}

/// Writes a whole file, or leaves the one that is there.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("write {}: {error}", path.display());
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    let mut file = tempfile::Builder::new()
        .prefix(".cbt-lab-")
        .permissions(readable)
        .tempfile_in(dir_of(path))
        .map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    file.persist(path).map(drop).map_err(|error| failed(error.error))
}
