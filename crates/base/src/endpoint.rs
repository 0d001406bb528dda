//! Where a CSI driver listens.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Bytes of a socket's path that Linux takes (`sun_path` of unix(7), without its zero).
const LONGEST: usize = 107;

/// A socket path, written `unix:///path` (also `unix:/path`, or the path alone).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(PathBuf);

impl Endpoint {
    /// The socket.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The socket at `path`, which must be absolute.
    pub fn at(path: &Path) -> Self {
        Endpoint(path.to_owned())
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:")).unwrap_or(text);
        match path.starts_with('/') {
            true if path.len() <= LONGEST => Ok(Endpoint(path.into())),
            true => Err(format!("{text:?} is too long: the path of a socket has at most {LONGEST} bytes")),
            false => Err(format!("{text:?} is not an endpoint: write unix:///run/deltapath/csi.sock")),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.0.display())
    }
}
