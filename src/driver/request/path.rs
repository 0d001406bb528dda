//! Paths that a client names.

use std::path::{Path, PathBuf};

use crate::driver::error::{Error, Result, shown};
use crate::sys;

/// A path from a client, resolved as the kernel shows it. Fails if a mount call could not take it, or if it is a link itself: where
/// kubelet's directory was moved the links are among its parents.
pub(in crate::driver) fn checked_path(field: &'static str, path: &Path) -> Result<PathBuf> {
    if path.as_os_str().is_empty() {
        return Err(Error::Missing { field });
    }
    if !sys::mount::is_plain_absolute(path) {
        let value = shown(&path.to_string_lossy());
        return Err(Error::Invalid { field, value, want: "an absolute path without `..`".into() });
    }
    // What Linux takes (PATH_MAX with its zero, NAME_MAX).
    if path.as_os_str().len() > 4095 || path.components().any(|name| name.as_os_str().len() > 255) {
        let (value, want) =
            (shown(&path.to_string_lossy()), "at most 4095 bytes, and 255 in each name".into());
        return Err(Error::Invalid { field, value, want });
    }
    let path = sys::mount::resolved(path);
    match sys::mount::is_link(&path) {
        true => Err(Error::Invalid {
            field,
            value: format!("{}, which is a symbolic link", path.display()),
            want: "the path itself, since links are not followed".into(),
        }),
        false => Ok(path),
    }
}
