//! Whose lock is gone, and what a filesystem without locks says.

use super::*;

/// A shell in a container may never ask how its child has ended.
#[test]
fn a_process_that_has_ended_and_is_not_waited_for_is_gone() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
    let wanted = Wanted { mode: Mode::Exclusive, command: "prune", wait: Duration::ZERO, is_reader: false };
    let holder = Holder { pid: child.id(), started: started(child.id()), ..Holder::new(&wanted) };
    assert!(!holder.is_gone());
    child.kill().expect("kill");
    while state(child.id()).is_none_or(|state| state != "Z") {
        std::thread::yield_now();
    }
    assert!(holder.is_gone());
    child.wait().expect("wait");
}

#[test]
fn a_filesystem_without_locks_can_be_read() {
    let error = |code| {
        let source = std::io::Error::from_raw_os_error(code);
        Error::from(files::Error { operation: "lock", path: "lock".into(), at: None, source })
    };
    use nix::libc::{EIO, ENOLCK, ENOSYS, EOPNOTSUPP, EROFS};
    assert!([EROFS, ENOLCK, ENOSYS, EOPNOTSUPP].iter().all(|code| is_refused(&error(*code))));
    assert!(!is_refused(&error(EIO)));
}
