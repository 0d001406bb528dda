//! Files that a command writes for its user: they can be written, and are neither the device nor of the repository.

use std::path::{Path, PathBuf};

use crate::error::{Result, refused};
use crate::{Context, absolute, device, restore};

/// The file of `--report`: one that can be written, and holds nothing that is needed.
pub fn report_of(context: &Context, report: &Path, device: &device::Device) -> Result<PathBuf> {
    let file = file_to_write(context, report)?;
    if device.is_at(&file) {
        return Err(refused!("{} (--report) is what is backed up: name another file", report.display()));
    }
    device::check_writable(&file)?;
    Ok(file)
}

/// The file that a path means, and that may be written.
pub fn file_to_write(context: &Context, path: &Path) -> Result<PathBuf> {
    let file = restore::target_of(&absolute(path)?)?;
    outside(context, &file).map(|()| file)
}

/// An error where a file that is written would be one of the repository.
pub fn outside(context: &Context, path: &Path) -> Result<()> {
    let real = |path: &Path| -> Option<PathBuf> {
        let through_parent = || Some(path.parent()?.canonicalize().ok()?.join(path.file_name()?));
        path.canonicalize().ok().or_else(through_parent)
    };
    let repository = context.url.as_deref().filter(|url| !url.starts_with("s3://"));
    match (repository.and_then(|dir| real(&absolute(Path::new(dir)).ok()?)), real(path)) {
        (Some(dir), Some(path)) if path.starts_with(&dir) => {
            Err(refused!("{} is in the repository: name a file elsewhere", path.display()))
        }
        _ => Ok(()),
    }
}
