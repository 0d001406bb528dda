//! The UNIX socket of a server without privileges. (The driver's own is made by `src/csi/server.rs`, in steps at which tests
//! fail it.)

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

/// The file of a socket. Dropped, it is removed.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    #[expect(clippy::disallowed_methods, reason = "no state of the driver: a socket of this process")]
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Binds the socket for its owner and group. One that a killed process has left behind is taken over, one in use is not.
#[expect(clippy::disallowed_methods, reason = "no state of the driver: a socket of this process")]
pub async fn bind(path: &Path) -> std::io::Result<(UnixListener, SocketFile)> {
    if let Ok(metadata) = std::fs::symlink_metadata(path) {
        if !metadata.file_type().is_socket() {
            return Err(std::io::Error::other("a file that is no socket is there: move it away"));
        }
        if UnixStream::connect(path).await.is_ok() {
            return Err(std::io::Error::other("another process serves there"));
        }
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    let file = SocketFile(path.to_owned());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    Ok((listener, file))
}
