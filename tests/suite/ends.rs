//! How all commands of all programs end where standard output is closed or full, and servers by each signal.

use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use testkit::running::Running;
use testkit::{PoolKind, Rig, until_caught};

use crate::commands::{PROGRAMS, ROUTES, SERVES, command, files, run, said};

/// What a command is for: to print something, or to do something and to say so.
#[derive(Clone, Copy, PartialEq)]
enum For {
    Printing,
    Doing,
}

/// Seen in these programs: `| head` ended them with a panic, and a backup that was stored was reported as failed.
#[apply(device_test)]
async fn output_that_nobody_takes_ends_no_work() {
    use For::{Doing, Printing};
    let mut rig = Rig::start(PoolKind::Dir).await;
    let (volume, _) = rig.block_volume("v", testkit::MIB).await;
    rig.snapshot("s", &volume).await;
    let dir = testkit::temp_dir();
    let dir = dir.path();
    files(dir);
    std::os::unix::fs::symlink(rig.dir.path(), dir.join("rig")).expect("a link");
    let json = "--endpoint unix://@/rig/csi.sock --runs 1 --size 64Mi --data 1Mi --changed 1 --snapshots 0 --settle 0 \
                --write-time 0 --output json --json @/bench.json";
    for (flag, tells) in [("", true), (" --quiet", false)] {
        let output = run(&format!("cbt-lab bench {json}{flag}"), dir);
        assert_eq!(output.status.code(), Some(0));
        assert_eq!(said(&output).contains("step 1 of "), tells, "{flag}: {}", said(&output));
    }
    let suite =
        "cbt-lab conformance --endpoint unix://@/rig/csi.sock --volume-size 64Mi --focus ^delta-served$";
    let mut rows = Vec::new();
    for output in ["text", "json"] {
        let line = format!("deltapath preflight --data-dir @ --output {output}");
        // What it finds here counts, not who reads it.
        let found = run(&line, dir).status.code();
        rows.push((line, Printing, found));
        for (line, is_for) in [
            ("deltapath check --data-dir @/rig/data", Printing),
            ("deltapath verify --data-dir @/rig/data", Printing),
            ("deltapath demo --size 64Mi --pool dir --work-dir @/dir", Printing),
            ("cbt-lab faults --list", Printing),
            ("cbt-lab conformance --list", Printing),
            ("cbt-lab conformance --kubernetes --list", Printing),
            (suite, Printing),
            ("cbt-lab bench --compare @/bench.json", Printing),
        ] {
            rows.push((format!("{line} --output {output}"), is_for, Some(0)));
        }
    }
    rows.push(("deltapath-router forget 0123abcd --forgotten @/forgotten".into(), Doing, Some(0)));
    let delete = "deltapath-router delete-volume vol-00000000-0000-0000-0000-000000000000 --endpoint unix://@/rig/csi.sock";
    rows.push((delete.into(), Doing, Some(0)));
    for (program, commands) in PROGRAMS {
        for page in ["--version", "--help", "-h", "help", "completions bash", "man"] {
            rows.push((format!("{program} {page}"), Printing, Some(0)));
        }
        for command in commands {
            rows.push((format!("{program} {command} --help"), Printing, Some(0)));
        }
    }
    let pipe = || {
        let (_, closed) = std::io::pipe().expect("a pipe");
        Stdio::from(closed)
    };
    let full = || Stdio::from(std::fs::File::options().write(true).open("/dev/full").expect("open"));
    for (line, is_for, code) in rows {
        let closed = command(&line, dir).stdout(pipe()).output().expect("run");
        assert_eq!(closed.status.code(), code, "{line}, closed: {}", said(&closed));
        for word in ["panicked", "Broken pipe", "write"] {
            assert!(!said(&closed).contains(word), "{line}, closed: {}", said(&closed));
        }
        let filled = command(&line, dir).stdout(full()).output().expect("run");
        let told = said(&filled);
        let code_if_full = if is_for == Printing { Some(1) } else { code };
        assert_eq!(filled.status.code(), code_if_full, "{line}, full: {told}");
        assert!(!told.contains("panicked"), "{line}, full: {told}");
        assert_eq!(told.matches("No space left on device").count(), 1, "{line}, full: {told}");
        // What is said on standard error may find nobody either.
        let silent = command(&line, dir).stdout(pipe()).stderr(pipe()).output().expect("run");
        assert_eq!(silent.status.code(), code, "{line}, with both closed");
    }
    assert_eq!(std::fs::read_to_string(dir.join("forgotten")).expect("read"), "0123abcd\n");
    testkit::nothing_left(&dir.join("dir"));
    assert_eq!(testkit::names(&dir.join("dir")), [""; 0]);
    rig.detach_and_finish(&volume).await;
}

/// A hang-up is a SIGTERM to every server, unless it was started to survive one. Each makes the directory of its socket.
#[apply(device_test)]
async fn every_server_ends_in_order_by_each_signal() {
    let dir = testkit::temp_dir();
    let dir = dir.path();
    files(dir);
    let started = |mut command: Command| Running::start(command.stdout(Stdio::null()), &dir.join("log"));
    let servers = [
        "deltapath driver --node-id n --pool xfs --pool-size 1Gi --data-dir @/data --endpoint unix://@/a/csi.sock".to_owned(),
        format!("deltapath-router {ROUTES} --http-endpoint 127.0.0.1:0 --endpoint unix://@/b/router.sock"),
        "deltapath-router certificates --namespace n --kubeconfig @/kubeconfig".into(),
        "deltapath-router node-certificate --dir @/dir --csi-address @/none.sock --kubeconfig @/kubeconfig".into(),
        format!("deltapath-gateway {SERVES} --csi-address @/none.sock --audience a"),
        format!("cbt-earlier differential {SERVES} --namespace n --csi-address @/none.sock --socket @/c/s --service-address a:1"),
        format!("cbt-earlier aggregated {SERVES} --namespace n"),
        format!("cbt-earlier cbt-http {SERVES} --namespace n --csi-address @/none.sock --socket @/d/s --service a/b"),
        "cbt-lab faults --listen unix://@/e/front.sock --upstream unix://@/none.sock".into(),
        "cbt-lab mock --listen unix://@/f/mock.sock".into(),
    ];
    for line in &servers {
        for by in [Signal::SIGHUP, Signal::SIGTERM, Signal::SIGINT] {
            let mut child = started(command(line, dir));
            until_caught(child.pid());
            child.signal(by);
            assert_eq!(child.ended().await, Some(0), "{line}, {by}: {}", child.log());
            testkit::nothing_left(dir);
        }
        let mut ignoring = Command::new("sh");
        ignoring.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]);
        let wrapped = command(line, dir);
        ignoring.arg(wrapped.get_program()).args(wrapped.get_args()).current_dir(dir);
        let mut child = started(ignoring);
        until_caught(child.pid());
        child.signal(Signal::SIGHUP);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(child.is_alive(), "{line} ends by a SIGHUP that it was to ignore");
        assert!(child.stop().success(), "{line}: {}", child.log());
    }
}
