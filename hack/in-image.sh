#!/usr/bin/env bash
# Runs a program in an unpacked image the way deploy/base/plugin.yaml has it run: a mount namespace of its own, a
# static /dev without a single loop device's node, and two directories shared with the outside, in both directions
# and under the same paths: DIR/kubelet and DIR/data. DIR/csi, for the socket, is shared as a plain directory.
#
#   in-image.sh ROOTFS DIR PROGRAM [ARGUMENT...]
#
# The caller has made DIR; what is mounted below it outside of the namespace stays until the caller unmounts it.
set -euo pipefail

if [ "${1:-}" != --inside ]; then
    rootfs=$(readlink -f "$1") dir=$(readlink -f "$2")
    shift 2
    mkdir -p "$dir"/{kubelet,data,csi,root}
    for shared in kubelet data; do
        mountpoint -q "$dir/$shared" || {
            mount --bind "$dir/$shared" "$dir/$shared"
            mount --make-shared "$dir/$shared"
        }
    done
    # Whatever is mounted below a private mount is seen in the new namespace alone.
    mountpoint -q "$dir/root" || {
        mount --bind "$dir/root" "$dir/root"
        mount --make-private "$dir/root"
    }
    exec unshare --mount --propagation unchanged -- "$0" --inside "$rootfs" "$dir" "$@"
fi

rootfs=$2 dir=$3
shift 3
mount -t tmpfs -o mode=0755 tmpfs "$dir/root"
mkdir -p "$dir/root"/{upper,work,merged}
root=$dir/root/merged
mount -t overlay -o "lowerdir=$rootfs,upperdir=$dir/root/upper,workdir=$dir/root/work" overlay "$root"
mkdir -p "$root"/{dev,proc,sys} "$root$dir"/{kubelet,data,csi}
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
mknod -m 0666 "$root/dev/null" c 1 3
mknod -m 0666 "$root/dev/zero" c 1 5
mknod -m 0666 "$root/dev/random" c 1 8
mknod -m 0666 "$root/dev/urandom" c 1 9
mknod -m 0660 "$root/dev/loop-control" c 10 237
for shared in kubelet data csi; do
    mount --rbind "$dir/$shared" "$root$dir/$shared"
done
exec chroot "$root" "$@"
