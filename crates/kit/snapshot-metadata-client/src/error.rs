//! What can go wrong, and what to do about it.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tonic::{Code, Status};

use crate::answer::Violation;

/// The call of the SnapshotMetadata service that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// GetMetadataAllocated.
    Allocated,
    /// GetMetadataDelta.
    Delta,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Call::Allocated => "GetMetadataAllocated",
            Call::Delta => "GetMetadataDelta",
        })
    }
}

/// What a backup tool does after an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// The same call may succeed later: keep the base, and run the backup again.
    Retry,
    /// This answer cannot be had, now or later, but the snapshot can be backed up without it. After a delta: ask for the
    /// allocated blocks. After that too: read the whole device.
    FullBackup,
    /// A person has to look: the request is wrong, rights are missing, or the data is damaged.
    Stop,
}

/// Why there is no answer, or no whole one. [`Error::advice`] says what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is not the address of a socket. Advice: stop.
    #[error("{0:?} is not an endpoint of a CSI driver: write it as unix:///run/csi/csi.sock")]
    Endpoint(String),
    /// There is no connection to the server: no process listens, or its certificate is not trusted. Tried again by itself.
    /// Advice: retry.
    #[error("cannot connect to {to}: {}", causes(&**source))]
    Connect {
        /// The socket or the address.
        to: String,
        /// What the transport says.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The server ended the call with an error of its own. The advice depends on the code:
    ///
    /// | Code | Meaning, in the CSI specification or KEP-3314 | By itself | Advice |
    /// | --- | --- | --- | --- |
    /// | `UNAVAILABLE` | the server, the driver or an object is not there yet | tried again | retry |
    /// | `RESOURCE_EXHAUSTED` | the server is busy | tried again | retry |
    /// | `ABORTED` | another operation is under way, or the client read too slowly | tried again | retry |
    /// | `CANCELLED`, `DEADLINE_EXCEEDED` | the server's time for one stream is over | tried again | retry |
    /// | `UNAUTHENTICATED` | the token is not valid, or the rights are missing | once, with a new token | stop |
    /// | `PERMISSION_DENIED` | the caller may not read the snapshot | no | stop |
    /// | `NOT_FOUND` | a snapshot does not exist: of a delta, most likely the base | no | full backup; stop where the allocated blocks were asked for |
    /// | `FAILED_PRECONDITION` | there is no change tracking for this volume or pair | no | full backup |
    /// | `UNIMPLEMENTED` | the driver does not have this call | no | full backup |
    /// | `INVALID_ARGUMENT` | the request is wrong: snapshots of two volumes, in the wrong order, of another driver | no | stop |
    /// | `OUT_OF_RANGE` | the offset is not in the volume, or a message is larger than 16 MiB | no | stop |
    /// | `DATA_LOSS` | the driver cannot read what it kept | no | full backup; stop where the allocated blocks were asked for |
    /// | `INTERNAL`, `UNKNOWN` | the server failed, or ended the stream without a status | tried again | full backup; stop where the allocated blocks were asked for |
    /// | `ALREADY_EXISTS`, `OK` | no meaning here | no | stop |
    #[error("{call}: the server answered {:?}: {}", status.code(), status.message())]
    Server {
        /// Which of the two calls it was.
        call: Call,
        /// The server's answer.
        status: Box<Status>,
    },
    /// The connection was lost in the middle. Tried again by itself. Advice: retry.
    #[error("{call}: the connection was lost: {}", causes(&**status))]
    Lost {
        /// Which of the two calls it was.
        call: Call,
        /// What the transport says.
        status: Box<Status>,
    },
    /// No message came for too long ([`Policy::idle`](crate::Policy::idle)). Tried again by itself. Advice: retry.
    #[error("{call}: no message came for {} s", idle.as_secs_f64())]
    Silent {
        /// Which of the two calls it was.
        call: Call,
        /// How long it was.
        idle: Duration,
    },
    /// The answer breaks the contract, so nothing in it can be trusted. Advice: full backup, or stop where the allocated
    /// blocks were asked for. Report it to the driver's authors.
    #[error("{call}: the answer of the server is not valid: {violation}")]
    Invalid {
        /// Which of the two calls it was.
        call: Call,
        /// What is wrong.
        violation: Violation,
    },
    /// An object of Kubernetes does not exist. Advice: stop.
    #[error("{what} does not exist")]
    Missing {
        /// The object.
        what: String,
    },
    /// An object of Kubernetes is not ready to be used. Advice: retry.
    #[error("{what} cannot be used: {why}")]
    NotReady {
        /// The object.
        what: String,
        /// What it lacks.
        why: &'static str,
    },
    /// There is no SnapshotMetadataService for the driver: in this cluster it has no metadata. Advice: full backup, of the
    /// whole device.
    #[error("there is no SnapshotMetadataService for the CSI driver {driver}")]
    NoService {
        /// The driver.
        driver: String,
    },
    /// The SnapshotMetadataService of the driver cannot be used. Advice: stop.
    #[error("the SnapshotMetadataService {driver} cannot be used: {problem}")]
    BadService {
        /// The driver.
        driver: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// The Kubernetes API server refused, or did not answer. It is tried again by itself where it did not answer, was busy
    /// or failed, and then the advice is to retry. Otherwise rights are missing: stop.
    #[error("the Kubernetes API server did not give {what}: {}", causes(&**source))]
    Api {
        /// The object.
        what: String,
        /// The HTTP status, if there was an answer.
        code: Option<u16>,
        /// What it said, or what the transport says.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The caller is not a service account, so it can have no token of its own. Advice: stop.
    #[error("{user:?} is not a service account: name one whose tokens are to be used")]
    NoAccount {
        /// The caller, as the API server calls it.
        user: String,
    },
    /// The file with the token cannot be read, or is empty. Advice: stop.
    #[error("cannot read the token in {}: {source}", path.display())]
    TokenFile {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The call failed several times in a row without any progress. The advice is that of the last error.
    #[error("{call} failed {tries} times in a row at byte {at}, the last time with: {source}")]
    GaveUp {
        /// Which of the two calls it was.
        call: Call,
        /// Up to which byte everything is known.
        at: u64,
        /// How often it failed there.
        tries: u32,
        /// The last error.
        source: Box<Error>,
    },
}

impl Error {
    /// What a backup tool does now.
    pub fn advice(&self) -> Advice {
        match self {
            Error::Endpoint(_)
            | Error::Missing { .. }
            | Error::BadService { .. }
            | Error::NoAccount { .. }
            | Error::TokenFile { .. } => Advice::Stop,
            Error::Connect { .. } | Error::Lost { .. } | Error::Silent { .. } | Error::NotReady { .. } => {
                Advice::Retry
            }
            Error::NoService { .. } => Advice::FullBackup,
            Error::Api { .. } if self.is_passing() => Advice::Retry,
            Error::Api { .. } => Advice::Stop,
            Error::Server { call, status } => of_code(*call, status.code()),
            Error::Invalid { call, .. } => without_delta(*call),
            Error::GaveUp { source, .. } => source.advice(),
        }
    }

    /// The gRPC code of the server's answer, where that is the reason.
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Server { status, .. } => Some(status.code()),
            Error::GaveUp { source, .. } => source.code(),
            _ => None,
        }
    }

    /// A call that ended with this status.
    pub(crate) fn of_status(call: Call, status: Status) -> Self {
        let status = Box::new(status);
        // A status with a cause was made here, from an error of the transport. What a server sends has none.
        match std::error::Error::source(&*status) {
            Some(_) => Error::Lost { call, status },
            None => Error::Server { call, status },
        }
    }

    /// Whether the same call may succeed in a moment.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Error::Connect { .. } | Error::Lost { .. } | Error::Silent { .. } => true,
            Error::Server { status, .. } => matches!(
                status.code(),
                Code::Unavailable
                    | Code::ResourceExhausted
                    | Code::Aborted
                    | Code::Cancelled
                    | Code::DeadlineExceeded
                    | Code::Internal
                    | Code::Unknown
            ),
            Error::Api { code, .. } => code.is_none_or(|code| matches!(code, 408 | 429 | 500..)),
            Error::Endpoint(_)
            | Error::Invalid { .. }
            | Error::Missing { .. }
            | Error::NotReady { .. }
            | Error::NoService { .. }
            | Error::BadService { .. }
            | Error::NoAccount { .. }
            | Error::TokenFile { .. }
            | Error::GaveUp { .. } => false,
        }
    }
}

fn of_code(call: Call, code: Code) -> Advice {
    match code {
        Code::Unavailable
        | Code::ResourceExhausted
        | Code::Aborted
        | Code::Cancelled
        | Code::DeadlineExceeded => Advice::Retry,
        Code::FailedPrecondition | Code::Unimplemented => Advice::FullBackup,
        Code::NotFound | Code::DataLoss | Code::Internal | Code::Unknown => without_delta(call),
        Code::Unauthenticated
        | Code::PermissionDenied
        | Code::InvalidArgument
        | Code::OutOfRange
        | Code::AlreadyExists
        | Code::Ok => Advice::Stop,
    }
}

/// A delta can be done without. The allocated blocks come from the snapshot itself, so there something is wrong with it.
fn without_delta(call: Call) -> Advice {
    match call {
        Call::Delta => Advice::FullBackup,
        Call::Allocated => Advice::Stop,
    }
}

/// An error with its causes, each once. A status of tonic says its cause by a dump, which is left out.
fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let words = |error: &(dyn std::error::Error + 'static)| match error.source() {
        Some(cause) => error.to_string().replace(&format!(", source: {cause:?}"), ""),
        None => error.to_string(),
    };
    let mut text = words(error);
    let mut next = error.source();
    while let Some(cause) = next {
        let said = words(cause);
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_in_words() {
        let status = tonic::Status::from_error(Box::new(std::io::Error::other("the socket is gone")));
        let text = causes(&status);
        assert!(text.contains("the socket is gone") && !text.contains("Custom {"), "{text}");
    }

    #[test]
    fn every_code_has_an_advice_for_each_call() {
        use Advice::{FullBackup, Retry, Stop};
        // The code, whether it is tried again, and the advice for a delta and for allocated blocks.
        for (code, passes, delta, allocated) in [
            (Code::Ok, false, Stop, Stop),
            (Code::Cancelled, true, Retry, Retry),
            (Code::Unknown, true, FullBackup, Stop),
            (Code::InvalidArgument, false, Stop, Stop),
            (Code::DeadlineExceeded, true, Retry, Retry),
            (Code::NotFound, false, FullBackup, Stop),
            (Code::AlreadyExists, false, Stop, Stop),
            (Code::PermissionDenied, false, Stop, Stop),
            (Code::ResourceExhausted, true, Retry, Retry),
            (Code::FailedPrecondition, false, FullBackup, FullBackup),
            (Code::Aborted, true, Retry, Retry),
            (Code::OutOfRange, false, Stop, Stop),
            (Code::Unimplemented, false, FullBackup, FullBackup),
            (Code::Internal, true, FullBackup, Stop),
            (Code::Unavailable, true, Retry, Retry),
            (Code::DataLoss, false, FullBackup, Stop),
            (Code::Unauthenticated, false, Stop, Stop),
        ] {
            for (call, advice) in [(Call::Delta, delta), (Call::Allocated, allocated)] {
                let error = Error::of_status(call, Status::new(code, "said"));
                assert_eq!((error.advice(), error.is_passing()), (advice, passes), "{code:?} {call}");
                let error = Error::GaveUp { call, at: 0, tries: 3, source: Box::new(error) };
                assert_eq!((error.advice(), error.is_passing(), error.code()), (advice, false, Some(code)));
            }
        }
    }

    #[test]
    fn a_broken_connection_is_no_answer_of_the_server() {
        let broken = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let error = Error::of_status(Call::Delta, Status::from_error(broken.into()));
        assert!(matches!(error, Error::Lost { .. }), "{error:?}");
        assert_eq!((error.advice(), error.is_passing(), error.code()), (Advice::Retry, true, None));
    }

    #[test]
    fn the_api_server_is_asked_again_where_that_helps() {
        for (code, advice) in [
            (None, Advice::Retry),
            (Some(429), Advice::Retry),
            (Some(503), Advice::Retry),
            (Some(401), Advice::Stop),
            (Some(403), Advice::Stop),
            (Some(422), Advice::Stop),
        ] {
            let error = Error::Api { what: "it".into(), code, source: "no".into() };
            assert_eq!((error.advice(), error.is_passing()), (advice, advice == Advice::Retry), "{code:?}");
        }
    }
}
