//! What lies in the directory of a repository, read without following a link below its top.

use std::fs::Metadata;
use std::io::ErrorKind;
use std::path::Path;
use std::time::SystemTime;

use files::Context;
use object_store::ObjectMeta;

use crate::error::{Error, Result, refused};

pub fn walk(dir: &Path, name: &str, depth: usize, found: &mut Vec<(String, Metadata)>) -> Result<()> {
    let path = dir.join(name);
    let entries = match path.read_dir() {
        // What a link at the top names is on another disk, and that it is not there does not mean that there is nothing.
        Err(error) if error.kind() == ErrorKind::NotFound && path.is_symlink() => {
            return Err(refused!(
                "{} is a symbolic link to what is not there: mount the disk that it names",
                path.display()
            ));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries.context("list", &path)?,
    };
    for entry in entries {
        let entry = entry.context("list", &path)?;
        // Ours are letters and digits, and others may have any bytes.
        let Some(name) = Path::new(name).join(entry.file_name()).to_str().map(str::to_owned) else {
            continue;
        };
        match entry.metadata() {
            Ok(of) if of.is_dir() && depth > 0 => walk(dir, &name, depth - 1, found)?,
            Ok(of) if of.is_dir() => {}
            Ok(of) => found.push((name, of)),
            // Removed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error).context("look at", &entry.path()).map_err(Error::from),
        }
    }
    Ok(())
}

pub fn meta(name: &str, of: &Metadata) -> ObjectMeta {
    let last_modified = of.modified().unwrap_or(SystemTime::UNIX_EPOCH).into();
    ObjectMeta { location: name.into(), last_modified, size: of.len(), e_tag: None, version: None }
}
