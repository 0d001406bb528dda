//! The driver in its image, as a pod runs it: with the container's own root, mount namespace and static `/dev`. The client
//! runs outside, as kubelet does. `make` unpacks the image (hack/image-rootfs.sh).

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use deltapath::sys::{self, loopdev::LoopDevice, sweep::sweep};
use nix::sys::signal::Signal;

use testkit::prelude::*;
use testkit::{leftovers, signal, wait};

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rootfs() -> PathBuf {
    testkit::needs("the unpacked image");
    let path = repository().join(".deps/image/rootfs");
    let is_there = path.join("usr/local/bin/deltapath").exists();
    assert!(is_there, "needs the unpacked image: run `make image-rootfs`");
    path
}

fn in_image(rootfs: &Path, dir: &Path) -> Command {
    let mut command = Command::new(repository().join("hack/in-image.sh"));
    command.arg(rootfs).arg(dir).stdin(Stdio::null()).env_remove("CSI_ENDPOINT").env_remove("RUST_LOG");
    command
}

struct Container {
    dir: PathBuf,
    child: Child,
}

impl Container {
    async fn start(rootfs: &Path, dir: &Path, pool: PoolKind) -> (Self, Client) {
        let log = std::fs::File::options().create(true).append(true).open(dir.join("log")).expect("log");
        let child = in_image(rootfs, dir)
            .args(["/usr/local/bin/deltapath", "driver", "--node-id", "node-1", "--pool-size", "4Gi"])
            .args(["--pool", pool.name()])
            .arg(format!("--endpoint=unix://{}", dir.join("csi/csi.sock").display()))
            .arg(format!("--data-dir={}", dir.join("data").display()))
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("start the container");
        let container = Container { dir: dir.to_owned(), child };
        let client = Client::connect(&dir.join("csi/csi.sock"), Duration::from_secs(30)).await;
        (container, client.expect("connect to the driver in the container"))
    }

    /// Stops the driver. Only the mounts of the script may be left.
    fn finish(mut self) {
        signal(self.child.id(), Signal::SIGTERM);
        let status = wait(&mut self.child, Duration::from_secs(60));
        assert!(status.success(), "the driver ended with {status}");
        let scripts = mounted_by_the_script(&self.dir);
        let left: Vec<String> =
            leftovers(&self.dir).into_iter().filter(|left| !scripts.contains(left)).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.dir.join("log")).unwrap_or_default());
        }
    }
}

/// A directory from which all mounts and devices are removed at the end.
struct Swept(tempfile::TempDir);

impl Swept {
    fn new() -> Self {
        Swept(tempfile::Builder::new().prefix("deltapath-image-").tempdir().expect("temp dir"))
    }
}

impl Drop for Swept {
    fn drop(&mut self) {
        // The kernel shows another path for the backing file of a device that a container attached, so devices
        // that are left are found by the files of volumes and of the pool.
        let _ = sweep(&self.0.path().join("kubelet"));
        for path in testkit::files_below(&self.0.path().join("data"), "img") {
            if let Ok(Some(device)) = LoopDevice::find(&path) {
                let _ = device.detach();
            }
        }
        let left = sweep(self.0.path());
        if !std::thread::panicking() {
            assert!(left.expect("sweep").is_empty(), "could not be freed");
        }
    }
}

/// The mounts that in-image.sh makes outside of the container.
fn mounted_by_the_script(dir: &Path) -> [String; 3] {
    ["kubelet", "data", "root"].map(|name| dir.join(name).display().to_string())
}

/// The same steps as `deltapath demo`: full and incremental backup, exact tuples, restore and clone.
async fn backup_story(client: &mut Client, kubelet: &Path) {
    const SIZE: i64 = 64 * MIB;
    let blocks = SIZE as u64 / 4096;
    let raw =
        client.create_volume(new_volume("raw", SIZE, block_capability())).await.expect("create").volume_id;
    let device = client.publish(&raw, block_capability(), false, kubelet).await.expect("publish");
    let mut content = Content::default();
    content.write(&device, 0, 300, 1);
    content.write(&device, 9000, 40, 2);
    let first = client.create_snapshot("first", &raw).await.expect("snapshot").snapshot_id;
    let before = content.clone();
    content.write(&device, 10, 5, 3);
    content.write(&device, 12000, 7, 4);
    content.discard(&device, 9010, 3);
    let second = client.create_snapshot("second", &raw).await.expect("snapshot").snapshot_id;

    let allocated = client.allocated(&second, 0, 0).await.expect("allocated");
    assert_eq!(blocks_of(&allocated, 4096), content.allocated(4096));
    let delta = client.delta(&first, &second, 0, 0).await.expect("delta");
    assert_eq!(blocks_of(&delta, 4096), content.changed_since(&before, 4096));

    for (name, source, expected) in [
        ("restored", from_snapshot(&first), &before),
        ("restored-again", from_snapshot(&second), &content),
        ("clone", from_volume(&raw), &content),
    ] {
        let request = new_volume_from(name, SIZE, block_capability(), source);
        let volume = client.create_volume(request).await.expect("create from a source").volume_id;
        let copy = client.publish(&volume, block_capability(), true, kubelet).await.expect("publish");
        expected.assert_equals(&copy, 0, blocks);
        client.unpublish(&volume, kubelet).await.expect("unpublish");
        client.delete_volume(&volume).await.expect("delete");
    }
    client.unpublish(&raw, kubelet).await.expect("unpublish");
    client.delete_volume(&raw).await.expect("delete");
    for snapshot in [first, second] {
        client.delete_snapshot(&snapshot).await.expect("delete");
    }
}

/// Each filesystem is made, written from outside, and grown while mounted and while not. Together they need every program
/// of the image.
async fn filesystem_story(client: &mut Client, kubelet: &Path) {
    let may_grow_ext4 = sys::has_capability(sys::CAP_SYS_RESOURCE).expect("capabilities");
    for fs_type in ["ext4", "xfs", "btrfs"] {
        let capability = mount_capability(fs_type);
        let request = new_volume(fs_type, 320 * MIB, capability.clone());
        let volume = client.create_volume(request).await.expect("create").volume_id;
        let target = client.publish(&volume, capability.clone(), false, kubelet).await.expect("publish");
        std::fs::write(target.join("file"), fs_type).expect("write from outside of the container");
        let size = |path: &Path| nix::sys::statvfs::statvfs(path).map(|fs| fs.blocks() * fs.fragment_size());
        let small = size(&target).expect("statvfs");
        client.expand_volume(&volume, 640 * MIB).await.expect("expand");
        match client.node.node_expand_volume(requests::node_expand(&volume, &target)).await {
            Ok(_) => {}
            // Growing a mounted ext4 takes a capability that even root may lack on some machines.
            Err(status) if fs_type == "ext4" && !may_grow_ext4 => {
                assert!(status.message().contains("CAP_SYS_RESOURCE"), "{status}");
                client.unpublish(&volume, kubelet).await.expect("unpublish");
                client.publish(&volume, capability.clone(), false, kubelet).await.expect("publish");
            }
            Err(status) => panic!("expand the mounted filesystem: {status}"),
        }
        let large = size(&target).expect("statvfs");
        assert!(large > small + small / 2, "{fs_type} did not grow: {small} to {large}");

        let snapshot = client.create_snapshot(fs_type, &volume).await.expect("snapshot").snapshot_id;
        let (name, source) = (format!("{fs_type}-larger"), from_snapshot(&snapshot));
        let request = new_volume_from(&name, 900 * MIB, capability.clone(), source);
        let larger = client.create_volume(request).await.expect("restore").volume_id;
        let copy = client.publish(&larger, capability.clone(), false, kubelet).await.expect("publish");
        assert_eq!(std::fs::read(copy.join("file")).expect("read"), fs_type.as_bytes());
        assert!(size(&copy).expect("statvfs") > large, "{fs_type} did not grow when it was staged");
        for volume in [&volume, &larger] {
            client.unpublish(volume, kubelet).await.expect("unpublish");
            client.delete_volume(volume).await.expect("delete");
        }
        client.delete_snapshot(&snapshot).await.expect("delete");
    }
}

#[apply(every_pool)]
async fn the_demos_steps_pass_against_the_container_from_outside(pool: PoolKind) {
    let rootfs = rootfs();
    let swept = Swept::new();
    let dir = swept.0.path();
    let kubelet = dir.join("kubelet");
    let (container, mut client) = Container::start(&rootfs, dir, pool).await;
    backup_story(&mut client, &kubelet).await;
    filesystem_story(&mut client, &kubelet).await;
    container.finish();
}

/// The container dies with a volume in use. The pod that uses the volume continues, and the next container finds
/// everything.
#[apply(every_pool)]
async fn a_volume_in_use_outlives_its_container(pool: PoolKind) {
    let rootfs = rootfs();
    let swept = Swept::new();
    let dir = swept.0.path();
    let kubelet = dir.join("kubelet");
    let (container, mut client) = Container::start(&rootfs, dir, pool).await;
    let request = new_volume("raw", 16 * MIB, block_capability());
    let raw = client.create_volume(request).await.expect("create").volume_id;
    let device = client.publish(&raw, block_capability(), false, &kubelet).await.expect("publish");
    let request = new_volume("files", 64 * MIB, mount_capability("ext4"));
    let files = client.create_volume(request).await.expect("create").volume_id;
    let target = client.publish(&files, mount_capability("ext4"), false, &kubelet).await.expect("publish");
    let mut content = Content::default();
    content.write(&device, 1, 20, 1);
    let first = client.create_snapshot("first", &raw).await.expect("snapshot").snapshot_id;
    let before = content.clone();
    drop(container);

    content.write(&device, 100, 5, 2);
    std::fs::write(target.join("meanwhile"), "written").expect("write without a driver");

    let (container, mut client) = Container::start(&rootfs, dir, pool).await;
    let again = client.publish(&raw, block_capability(), false, &kubelet).await.expect("publish again");
    assert_eq!(again, device);
    content.write(&device, 200, 5, 3);
    let second = client.create_snapshot("second", &raw).await.expect("snapshot").snapshot_id;
    let delta = client.delta(&first, &second, 0, 0).await.expect("delta");
    assert_eq!(blocks_of(&delta, 4096), content.changed_since(&before, 4096));
    for volume in [&raw, &files] {
        client.unpublish(volume, &kubelet).await.expect("unpublish");
        client.delete_volume(volume).await.expect("delete");
    }
    container.finish();
}

/// Loop device nodes for kubelet, as the init container of components/kind makes them.
#[test_with::root]
#[test]
fn the_init_container_makes_loop_device_nodes() {
    let rootfs = rootfs();
    let text = std::fs::read_to_string(repository().join("deploy/components/kind/kustomization.yaml"))
        .expect("read");
    let script: String = text
        .lines()
        .skip_while(|line| line.trim() != "- |")
        .skip(1)
        .take_while(|line| !line.contains("securityContext"))
        .map(|line| format!("{}\n", line.trim()))
        .collect();
    assert!(script.contains("mknod"), "no script in the init container:\n{text}");
    let swept = Swept::new();
    let output = in_image(&rootfs, swept.0.path())
        .args([
            "/bin/sh",
            "-ec",
            &format!("{script}\n{script}\nls /dev | grep -c '^loop[0-9]'; test -b /dev/loop255"),
        ])
        .output()
        .expect("run");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said.trim(), "256");
}

/// The Dockerfile installs exactly the programs that the driver calls.
#[test_with::root]
#[test]
fn the_image_holds_the_programs_that_the_driver_calls_and_no_others() {
    let dockerfile = std::fs::read_to_string(repository().join("Dockerfile")).expect("read");
    let listed = dockerfile.split("ENV PROGRAMS=\"").nth(1).and_then(|rest| rest.split('"').next());
    let mut listed: Vec<&str> = listed.expect("a list of programs").split_whitespace().collect();
    let mut called = Vec::new();
    for path in testkit::files_below(&repository().join("src"), "rs") {
        let source = std::fs::read_to_string(&path).expect("read");
        for marker in ["program::run(\"", "program::run_with(\"", "program::exists(\""] {
            called.extend(
                source.split(marker).skip(1).map(|rest| rest.split('"').next().expect("a name").to_owned()),
            );
        }
    }
    called.sort();
    called.dedup();
    listed.sort();
    assert_eq!(listed, called, "ENV PROGRAMS of the Dockerfile, and what src calls");
    let deps = std::fs::read_to_string(repository().join("hack/deps.sh")).expect("read");
    let pinned: Vec<&str> =
        dockerfile.split('"').filter(|word| word.ends_with('*') && word.contains('=')).collect();
    assert_eq!(pinned.len(), 4, "{pinned:?}");
    for package in pinned {
        assert!(
            deps.contains(&format!(":{package}\"")),
            "hack/deps.sh installs another version than {package}"
        );
    }
    let rootfs = rootfs();
    for program in &called {
        let output = Command::new("chroot")
            .arg(&rootfs)
            .args(["/bin/sh", "-c", &format!("command -v {program} && ldd $(command -v {program})")])
            .output()
            .expect("run");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{program} is not in the image:\n{said}");
        assert!(!said.contains("not found"), "{program} lacks a library:\n{said}");
    }
}

/// It runs as the pod's user, without a shell and without any program of Debian.
#[rstest::rstest]
#[case::gateway("gateway", "deltapath-gateway")]
#[case::router("router", "deltapath-router")]
#[case::earlier("earlier", "cbt-earlier")]
#[test_with::root]
#[test]
fn an_image_of_one_program_needs_nothing_else(#[case] directory: &str, #[case] program: &str) {
    let image = rootfs().with_file_name(directory);
    // The programs of a release are static, which `make dist` checks. These have their libraries.
    assert_eq!(testkit::names(&image), [program, "lib", "lib64"]);
    let output = Command::new("chroot")
        .args(["--userspec=65532:65532", "--groups="])
        .arg(&image)
        .args([&format!("/{program}"), "--version"])
        .output()
        .expect("run chroot");
    let said = String::from_utf8_lossy(&output.stdout);
    let version = format!("{program} {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(said, version, "{}", String::from_utf8_lossy(&output.stderr));
}
