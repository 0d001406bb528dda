//! The one place where errors become gRPC codes. Both matches are exhaustive on purpose: a new
//! variant does not compile until it has a code.

use tonic::{Code, Status};

use crate::driver::{Driver, Error};
use crate::{pool, store};
use base::Stopped;

/// The status of a failed call: the code of its kind, the message with all causes and what to do.
pub fn status(driver: &Driver, error: &Error) -> Status {
    Status::new(code(error), error.explain(&driver.config().data_dir))
}

/// The gRPC code of an error (CSI spec, "Error Scheme" and the error tables of each RPC).
pub fn code(error: &Error) -> Code {
    match error {
        Error::Missing { .. }
        | Error::Invalid { .. }
        | Error::UnknownParameter { .. }
        | Error::Unsupported(_) => Code::InvalidArgument,
        Error::OutOfRange { .. } => Code::OutOfRange,
        Error::NotFound { .. } => Code::NotFound,
        Error::Clash { .. } => Code::AlreadyExists,
        Error::Busy { .. } | Error::TooMany { .. } | Error::Copying { .. } | Error::BadToken { .. } => {
            Code::Aborted
        }
        Error::Unavailable(_) => Code::Unavailable,
        Error::Damaged(_) => Code::DataLoss,
        Error::Precondition(_) => Code::FailedPrecondition,
        Error::Elsewhere(_) | Error::Exhausted(_) => Code::ResourceExhausted,
        Error::Stopped(stopped) => stopped_code(*stopped),
        Error::Sys(error) => sys_code(error),
        Error::Store(error) => match error {
            store::Error::Sys(error) => sys_code(error),
            store::Error::Dead { .. } => Code::Unavailable,
            store::Error::Unreadable { .. }
            | store::Error::Impossible { .. }
            | store::Error::UnknownVersion { .. }
            | store::Error::Misplaced { .. }
            | store::Error::DuplicateSequence { .. }
            | store::Error::GroupDamaged { .. }
            | store::Error::Withheld { .. }
            | store::Error::Locked(_)
            | store::Error::Mismatch { .. } => Code::Internal,
        },
        Error::Pool(error) => match error {
            pool::Error::Sys(error) => sys_code(error),
            pool::Error::Stopped(stopped) => stopped_code(*stopped),
            pool::Error::Size { .. } => Code::ResourceExhausted,
            pool::Error::Unavailable { .. }
            | pool::Error::ImageMissing(_)
            | pool::Error::ImageUnwanted { .. }
            | pool::Error::ImageUnknown(_)
            | pool::Error::NotMounted(_)
            | pool::Error::ImageInUse(_) => Code::Internal,
        },
        Error::Cbt(error) => match error {
            cbt::Error::Sys(error) => sys_code(error),
            cbt::Error::Stopped(stopped) => stopped_code(*stopped),
            cbt::Error::Damaged { .. } => Code::DataLoss,
            cbt::Error::Lost { .. } => Code::FailedPrecondition,
            cbt::Error::UnknownVersion { .. } => Code::Internal,
        },
    }
}

fn stopped_code(stopped: Stopped) -> Code {
    match stopped {
        Stopped::Cancelled => Code::Cancelled,
        Stopped::DeadlineExceeded => Code::DeadlineExceeded,
    }
}

/// The kernel has hundreds of error numbers; only a full pool, and a path that became a link, ask something of the caller.
fn sys_code(error: &files::Error) -> Code {
    match error.errno() {
        _ if error.is_no_space() => Code::ResourceExhausted,
        Some(libc::ELOOP) => Code::FailedPrecondition,
        _ => Code::Internal,
    }
}
