#!/usr/bin/env bash
# What outlives the processes of a cluster and is the machine's: loop devices and cgroups. Detaches and removes those of
# one cluster, after its end, however it ended, or of one of its nodes. With --list it prints the loop devices and leaves
# all as it is. sweep.sh [--list] DIRECTORY NAME [NODE]
#
# A loop device is known by the file that it serves (device and inode number), never by a path: the mounts that the path
# went through are gone. Files in a pool are seen by mounting the pool once more, in a mount namespace of our own.
set -euo pipefail
if [ "${1-}" != inside ]; then exec unshare --mount --propagation private "$0" inside "$@"; fi
shift
list=no
if [ "$1" = --list ]; then list=yes && shift; fi
dir=$1 name=$2 node=${3-}
cgroups=deltapath-$name${node:+/$node}
shopt -s nullglob
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=hack/cluster/mounts.sh
. "$here/mounts.sh"
leave_mounts_of_others "$dir" "$here"

# Prints "device inode number-of-the-device-that-the-file-is" of a loop device (LOOP_GET_STATUS64).
status_of() {
    perl -e 'open my $device, "<", "/dev/$ARGV[0]" or exit 1;
        my $status = "\0" x 232;
        ioctl $device, 0x4C05, $status or exit 1;
        printf "%u %u %u\n", unpack "QQQ", $status' "$1" 2>/dev/null
}
# Each attached loop device whose file is not plainly another's: "loopN/SEQUENCE device inode number". The sequence is that of
# what is attached: a number may come to serve another file.
attached() {
    local entry loop file sequence
    for entry in /sys/block/loop*/loop/backing_file; do
        loop=${entry#/sys/block/} loop=${loop%%/*}
        file=$(cat "$entry" 2>/dev/null) || continue
        [ ! -f "$file" ] || [ "${file#"$dir"/}" != "$file" ] || continue
        sequence=$(cat "/sys/block/$loop/diskseq" 2>/dev/null) || continue
        echo "$loop/$sequence $(status_of "$loop")"
    done
}
files_in() { find "$1" -type f -printf '%D %i\n' 2>/dev/null || true; }
# Those whose file is in a list: among LIST.
among() { awk 'NR == FNR { ours[$1 " " $2] = 1; next } ($2 " " $3) in ours { print $1 }' "$1" -; }
gone() { [ "$(cat "/sys/block/$1/diskseq" 2>/dev/null)" != "$2" ] || [ ! -e "/sys/block/$1/loop" ]; }
detach() {
    local loop sequence
    for loop in "$@"; do
        sequence=${loop#*/} loop=${loop%/*}
        ! gone "$loop" "$sequence" || continue
        losetup --detach "/dev/$loop" 2>/dev/null || true
        for _ in $(seq 100); do
            gone "$loop" "$sequence" && continue 2
            sleep 0.1
        done
        echo "/dev/$loop is in use and stays attached" >&2
        failed=yes
    done
}

# Its processes are gone when its cgroups can be removed: on a busy machine with many volumes that takes its time.
for _ in $(seq 600); do
    left=()
    [ "$list" = no ] || break
    for cgroup in "/sys/fs/cgroup/$cgroups" /sys/fs/cgroup/*/"$cgroups"; do
        find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null || true
        [ ! -e "$cgroup" ] || left+=("$cgroup")
    done
    [ "${#left[@]}" -gt 0 ] || break
    sleep 0.1
done
[ "${#left[@]}" -eq 0 ] || { echo "processes are left in ${left[*]}" >&2 && exit 1; }

failed=no
scratch=$(mktemp -d)
trap 'rm -rf --one-file-system "$scratch"' EXIT
for place in "$dir"/${node:-node*}/; do
    files_in "$place/var/lib/deltapath" >"$scratch/files"
    mapfile -t direct < <(attached | among "$scratch/files")
    mapfile -t mounted < <(
        for loop in "${direct[@]}"; do
            mkdir -p "$scratch/pool"
            mount "/dev/${loop%/*}" "$scratch/pool" 2>/dev/null || continue
            files_in "$scratch/pool" >"$scratch/files"
            attached | among "$scratch/files"
            umount "$scratch/pool"
        done
    )
    # kubelet holds each Block volume by a loop device over the driver's.
    upper=()
    for loop in "${direct[@]}" "${mounted[@]}"; do
        number=${loop#loop} number=${number%/*}
        # Major 7, as the kernel writes numbers of devices.
        number=$((number & 255 | 7 << 8 | (number & ~255) << 12))
        mapfile -O "${#upper[@]}" -t upper < <(attached | awk -v number="$number" '$4 == number { print $1 }')
    done
    if [ "$list" = yes ]; then
        for loop in "${upper[@]}" "${mounted[@]}" "${direct[@]}"; do echo "/dev/${loop%/*} $(cat "/sys/block/${loop%/*}/loop/backing_file")"; done
    else
        detach "${upper[@]}" "${mounted[@]}" "${direct[@]}"
    fi
done

[ "$failed" = no ]
