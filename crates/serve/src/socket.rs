//! The UNIX socket of a server. Each change is a step, at which tests fail the driver.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use files::{change, step};
use tokio::net::{UnixListener, UnixStream};

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The path is there, and is not a socket.
    #[error("a file that is not a socket is there: move it away")]
    NotASocket,
    /// Another process answers there.
    #[error("another process serves there")]
    Live,
    /// The kernel refused.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<files::Error> for Error {
    fn from(error: files::Error) -> Self {
        Error::Io(error.source)
    }
}

/// The file of a socket. Dropped, it is removed.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = change::remove_file(&self.0);
    }
}

/// Binds the socket for its owner and group. One that a killed process has left behind is taken over, one in use is not: two
/// servers would share its clients. The directory of the socket is made where it is missing.
pub async fn bind(path: &Path) -> Result<(UnixListener, SocketFile), Error> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // One directory alone: a path with a typing error must not grow a tree.
            if let Some(parent) = path.parent()
                && !parent.exists()
            {
                change::create_dir(parent, 0o755)?;
            }
        }
        Err(error) => return Err(error.into()),
        Ok(found) if !found.file_type().is_socket() => return Err(Error::NotASocket),
        Ok(_) if UnixStream::connect(path).await.is_ok() => return Err(Error::Live),
        Ok(_) => change::remove_file(path)?,
    }
    #[expect(clippy::disallowed_methods, reason = "this is the step")]
    let listener = step("bind", path, || UnixListener::bind(path))?;
    let file = SocketFile(path.to_owned());
    change::set_mode(path, 0o660)?;
    Ok((listener, file))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Promise: a socket needs no directory of its own to be there, and a path with a typing error grows no tree.
    #[tokio::test]
    async fn the_directory_of_a_socket_is_made_and_no_more() {
        let dir = tempfile::tempdir().expect("temp dir");
        let path = dir.path().join("made/it.sock");
        for _ in 0..2 {
            let (_listener, _file) = bind(&path).await.expect("bind");
            UnixStream::connect(&path).await.expect("connect");
            let mode = |path: &Path| path.metadata().expect("it is there").permissions().mode() & 0o777;
            assert_eq!((mode(&path), mode(&dir.path().join("made"))), (0o660, 0o755));
            assert!(bind(&path).await.expect_err("it is live").to_string().contains("another process"));
        }
        assert!(!path.exists(), "an end removes it");
        bind(&dir.path().join("one/two/it.sock")).await.expect_err("two directories");
        assert!(!dir.path().join("one").exists());
    }
}
