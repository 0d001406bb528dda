//! `deltapath preflight`: what a machine lacks before a driver runs on it, and what to do about it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::{Done, Output};
use crate::sys::{self, loopdev, mount, program};

/// The first kernel with everything that the driver calls; mount_setattr(2) came last.
const KERNEL: (u32, u32) = (5, 12);
/// Below this a pool is of no use; a driver makes nothing new on a disk with less than 64 MiB.
const LEAST_SPACE: u64 = 64 << 20;
const GOOD_SPACE: u64 = 1 << 30;
/// Programs that the driver calls, the Debian package of each, and the filesystem that it is for.
const PROGRAMS: [(&str, &str, Option<&str>); 9] = [
    ("blkid", "util-linux", None),
    ("mkfs.ext4", "e2fsprogs", None),
    ("e2fsck", "e2fsprogs", None),
    ("resize2fs", "e2fsprogs", None),
    ("e2undo", "e2fsprogs", None),
    ("mkfs.xfs", "xfsprogs", Some("xfs")),
    ("xfs_growfs", "xfsprogs", Some("xfs")),
    ("mkfs.btrfs", "btrfs-progs", Some("btrfs")),
    ("btrfs", "btrfs-progs", Some("btrfs")),
];

/// Say what this machine lacks for a driver, and what to do.
///
/// Looks at the kernel, loop devices, filesystems, programs, free space and how mounts are shared, and changes nothing. Runs
/// on a node, or in the driver's container, which has the programs.
///
/// Exit codes: 0 a driver can run, 1 something is missing, 2 wrong usage.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Data directory that the driver is to have.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/deltapath")]
    data_dir: PathBuf,
    /// Directory of kubelet.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// What is printed on standard output.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// A driver runs, with less than it could do.
    Limited,
    /// No driver runs, or none that pods can use.
    Missing,
}

#[derive(Debug, Serialize)]
struct Report {
    findings: Vec<Finding>,
}

/// What was looked at.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Finding {
    verdict: Verdict,
    found: String,
    /// What to do; none where all is well.
    remedy: Option<String>,
}

fn well(found: impl Into<String>) -> Finding {
    Finding { verdict: Verdict::Ok, found: found.into(), remedy: None }
}

fn lacks(verdict: Verdict, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { verdict, found: found.into(), remedy: Some(remedy.into()) }
}

pub(super) fn run(arguments: Arguments) -> Done {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let known = std::fs::read_to_string("/proc/filesystems")?;
    let modules = Path::new("/lib/modules").join(release.trim());
    let loadable: String = ["modules.dep", "modules.builtin"]
        .into_iter()
        .filter_map(|name| std::fs::read_to_string(modules.join(name)).ok())
        .collect();
    let mut findings =
        vec![root(sys::is_root()), kernel(release.trim()), loop_devices(Path::new(loopdev::CONTROL))];
    findings.extend(["ext4", "xfs", "btrfs"].map(|name| filesystem(name, &known, &loadable)));
    findings
        .extend(PROGRAMS.map(|(name, package, of)| found_program(name, package, of, program::exists(name))));
    findings.push(space(&arguments.data_dir)?);
    findings.push(shared_mounts(&arguments.kubelet_dir)?);
    let report = Report { findings };
    shell::show(arguments.output == Output::Json, &report, || text(&report.findings))?;
    let is_missing = report.findings.iter().any(|finding| finding.verdict == Verdict::Missing);
    Ok(if is_missing { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn root(is_root: bool) -> Finding {
    match is_root {
        true => well("root"),
        false => lacks(Verdict::Missing, "not root", "run the driver as root, in a privileged container"),
    }
}

fn kernel(release: &str) -> Finding {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (major, minor) = KERNEL;
    match version >= KERNEL {
        true => well(format!("Linux {release}")),
        false => lacks(
            Verdict::Missing,
            format!("Linux {release}"),
            format!("install a kernel from {major}.{minor} on"),
        ),
    }
}

fn loop_devices(control: &Path) -> Finding {
    match control.exists() {
        true => well(format!("loop devices, by {}", control.display())),
        false => lacks(
            Verdict::Missing,
            format!("no {}", control.display()),
            "modprobe loop, and write \"loop\" into /etc/modules-load.d/loop.conf; a container needs the /dev of its node",
        ),
    }
}

/// `known` is /proc/filesystems, `loadable` the lists of modules: which may be missing in a container.
fn filesystem(name: &str, known: &str, loadable: &str) -> Finding {
    let is_known = known.lines().any(|line| line.split('\t').next_back() == Some(name));
    if is_known || loadable.contains(&format!("/{name}.ko")) {
        return well(format!("the filesystem {name}"));
    }
    lacks(
        Verdict::Limited,
        format!("{name} is not loaded, and no module of it is seen here"),
        format!("modprobe {name} on the node, or make no claims with it"),
    )
}

fn found_program(name: &str, package: &str, of: Option<&str>, is_there: bool) -> Finding {
    match (is_there, of) {
        (true, _) => well(name),
        (false, None) => lacks(Verdict::Missing, format!("no {name}"), format!("install {package}")),
        (false, Some(filesystem)) => lacks(
            Verdict::Limited,
            format!("no {name}"),
            format!("install {package}, or make no claims with {filesystem}"),
        ),
    }
}

/// Of the filesystem that the data directory is on, or will be.
fn space(data_dir: &Path) -> files::Result<Finding> {
    if let Some(found) = super::no_directory(data_dir) {
        return Ok(lacks(Verdict::Missing, found, super::ANOTHER_DIR));
    }
    let place = data_dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("/"));
    let free = sys::space(place)?.available;
    let found = format!("{} MiB free for {}", free >> 20, data_dir.display());
    let remedy = format!("mount a disk of its own at {}", data_dir.display());
    Ok(match free {
        GOOD_SPACE.. => well(found),
        LEAST_SPACE.. => lacks(Verdict::Limited, found, remedy),
        _ => lacks(Verdict::Missing, found, remedy),
    })
}

/// What the driver mounts pods see only where the mount below is shared. In the driver's container it is that of `pods` alone.
fn shared_mounts(kubelet_dir: &Path) -> files::Result<Finding> {
    let pods = kubelet_dir.join("pods");
    let Ok(pods) = pods.canonicalize() else {
        return Ok(lacks(
            Verdict::Missing,
            format!("no kubelet has its pods at {}", pods.display()),
            "start kubelet, or name its directory with --kubelet-dir; manifests name it too",
        ));
    };
    let below = mount::holding(&pods)?;
    Ok(match below.filter(|mount| !mount.shared) {
        None => well(format!("mounts in {} are shared", pods.display())),
        Some(mount) => lacks(
            Verdict::Missing,
            format!("mounts in {} are private: pods would not see volumes", pods.display()),
            format!("mount --make-rshared {}, at each boot", mount.mount_point.display()),
        ),
    })
}

fn text(findings: &[Finding]) -> String {
    let mut text = String::new();
    for Finding { verdict, found, remedy } in findings {
        let verdict = match verdict {
            Verdict::Ok => "ok",
            Verdict::Limited => "limited",
            Verdict::Missing => "missing",
        };
        let remedy = remedy.as_ref().map(|remedy| format!(": {remedy}")).unwrap_or_default();
        text += &format!("{verdict:<8} {found}{remedy}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The image has what the driver calls, and another test holds that.
    #[test]
    fn the_programs_are_those_of_the_image() {
        let dockerfile = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/Dockerfile"));
        let dockerfile = dockerfile.expect("the Dockerfile");
        let listed = dockerfile.split("ENV PROGRAMS=\"").nth(1).and_then(|rest| rest.split('"').next());
        let mut listed: Vec<&str> = listed.expect("a list of programs").split_whitespace().collect();
        listed.sort_unstable();
        let mut ours = PROGRAMS.map(|(name, ..)| name);
        ours.sort_unstable();
        assert_eq!(ours[..], listed[..]);
    }

    #[test]
    fn kernels_are_compared_by_numbers() {
        for (release, verdict) in [
            ("5.11.22", Verdict::Missing),
            ("5.12.0", Verdict::Ok),
            ("5.4.0-200-generic", Verdict::Missing),
            ("6.1.0-26-amd64", Verdict::Ok),
            ("10.0", Verdict::Ok),
            ("unknown", Verdict::Missing),
        ] {
            assert_eq!(kernel(release).verdict, verdict, "{release}");
        }
    }

    #[test]
    fn a_filesystem_is_loaded_or_can_be() {
        let known = "nodev\tsysfs\n\text4\n\tfuseblk\n";
        let loadable = "kernel/fs/xfs/xfs.ko.zst: kernel/lib/libcrc32c.ko\n";
        assert_eq!(filesystem("ext4", known, "").verdict, Verdict::Ok);
        assert_eq!(filesystem("xfs", known, loadable).verdict, Verdict::Ok);
        assert_eq!(filesystem("ext", known, loadable).verdict, Verdict::Limited);
        let lacking = filesystem("btrfs", known, loadable);
        assert!(lacking.remedy.expect("a remedy").contains("modprobe btrfs"));
    }

    #[test]
    fn a_file_is_no_data_directory_and_holds_none() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        for place in [file.path(), &file.path().join("data")] {
            let found = format!("{} is a file, not a directory", file.path().display());
            let finding = space(place).expect("looked");
            assert_eq!(finding, lacks(Verdict::Missing, found, "name another --data-dir"));
        }
    }

    #[test]
    fn what_is_missing_has_a_remedy() {
        assert_eq!(found_program("blkid", "util-linux", None, false).verdict, Verdict::Missing);
        assert_eq!(found_program("btrfs", "btrfs-progs", Some("btrfs"), false).verdict, Verdict::Limited);
        assert_eq!(loop_devices(Path::new("/no/such/device")).verdict, Verdict::Missing);
        assert_eq!(root(false).verdict, Verdict::Missing);
        let none = shared_mounts(Path::new("/no/such/directory")).expect("looked");
        assert_eq!(none.verdict, Verdict::Missing);
        let said = text(&[none, well("blkid")]);
        assert!(said.contains("missing  no kubelet") && said.contains("--kubelet-dir"), "{said}");
        assert!(said.ends_with("ok       blkid\n"), "{said}");
    }
}
