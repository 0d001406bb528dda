//! What can go wrong, as one enum. A message says what was wrong, with which value, and what to do.

use std::path::PathBuf;

use object_store::path::Path as Name;
use snapshot_metadata_client::Advice;

/// A command that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or device.
    #[error(transparent)]
    File(#[from] files::Error),
    /// The repository's storage.
    #[error("{operation} {name} in the repository")]
    Store {
        /// What was attempted, such as `read`.
        operation: &'static str,
        name: Name,
        /// What the storage said.
        source: object_store::Error,
    },
    /// Bytes of the repository are not as they were written.
    #[error("{what} is damaged: {why}")]
    Damaged {
        /// The object, or the part of it.
        what: String,
        /// How that shows.
        why: String,
    },
    /// The CSI driver, or the way to it.
    #[error("{error}{}", to_do(error.advice()))]
    Driver {
        /// What the client library says, with its causes.
        error: snapshot_metadata_client::Error,
    },
    /// The Kubernetes API server.
    #[error("{operation} {what}")]
    Kubernetes {
        /// What was attempted, such as `create`.
        operation: &'static str,
        what: String,
        /// What the API server said.
        source: Box<kube::Error>,
    },
    /// A run of the same claim works, or was killed.
    #[error(
        "{what} is there already: another run of this claim works; if none does, one was killed: `cbt-backup run --clean-up` \
         removes what it left"
    )]
    AnotherRun { what: String },
    /// Another may have had the repository meanwhile, and may have removed what this command relies on.
    #[error(
        "the lock on the repository is lost: {why}. Another command may have worked at the same time, so this one ends: run it \
         again; a backup continues with --resume"
    )]
    LockLost {
        /// How that shows.
        why: String,
    },
    /// What was read is partly from before a change and partly from after it.
    #[error("{} changed while it was read, so no backup is made: back up a snapshot, or an image at rest", path.display())]
    Changed {
        /// The image.
        path: PathBuf,
    },
    /// A device differs from the backup that is the base, in a place that the driver does not list as changed.
    #[error(
        "{} holds other data at byte {offset} than backup {base}, and the driver does not list that block as changed: it is not the \
         device of that snapshot, or the delta is not complete. Check --device; if it is right, make a full backup", path.display()
    )]
    Unlisted { path: PathBuf, base: String, offset: u64 },
    /// What is asked is wrong in itself.
    #[error(transparent)]
    Usage(#[from] shell::Usage),
    /// What is asked cannot be done as things are.
    #[error("{0}")]
    Refused(String),
    /// Ctrl-C. A lock that was lost stops a command too, and is [`Error::LockLost`] in the end.
    #[error("interrupted")]
    Stopped,
}

/// What everything here returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An [`Error::Refused`], in the words of [`format!`].
macro_rules! refused {
    ($($why:tt)*) => {
        $crate::error::Error::refused(format!($($why)*))
    };
}
pub(crate) use refused;

impl Error {
    /// A reason in words.
    pub fn refused(why: impl Into<String>) -> Self {
        Error::Refused(why.into())
    }

    /// A command line that is wrong, whatever there is.
    pub fn usage(why: impl Into<String>) -> Self {
        Error::Usage(shell::Usage(why.into()))
    }

    /// Bytes that are not as they were written.
    pub fn damaged(what: impl Into<String>, why: impl Into<String>) -> Self {
        Error::Damaged { what: what.into(), why: why.into() }
    }

    /// Whether the repository's content is at fault, and not its storage or its user.
    pub fn is_damage(&self) -> bool {
        matches!(self, Error::Damaged { .. }) || self.is_not_found()
    }

    /// Whether an object is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Store { source: object_store::Error::NotFound { .. }, .. })
    }

    /// Whether a full backup can be made where an incremental one failed with this: its base is damaged, or the driver
    /// has no whole delta.
    pub fn is_of_increment(&self) -> bool {
        match self {
            Error::Driver { error } => error.advice() == Advice::FullBackup,
            _ => self.is_damage(),
        }
    }
}

/// What to do about an error of the driver, as the end of its message.
fn to_do(advice: Advice) -> &'static str {
    match advice {
        Advice::Retry => "; try again later",
        Advice::FullBackup => "; make a full backup",
        Advice::Stop => "",
    }
}

impl From<snapshot_metadata_client::Error> for Error {
    fn from(error: snapshot_metadata_client::Error) -> Self {
        Error::Driver { error }
    }
}

impl From<base::Stopped> for Error {
    fn from(_: base::Stopped) -> Self {
        Error::Stopped
    }
}
