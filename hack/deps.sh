#!/usr/bin/env bash
# Installs what the driver and its tests call, and nothing that is there already.
set -euo pipefail

# program:package. Pinned to the series of Debian 12.
needs=(
    "mkfs.xfs:xfsprogs=6.1.*"
    "mkfs.btrfs:btrfs-progs=6.2*"
    "mkfs.ext4:e2fsprogs=1.47.*"
    "blkid:util-linux=2.38.*"
    "cc:gcc"
)

missing=()
for need in "${needs[@]}"; do
    command -v "${need%%:*}" >/dev/null || missing+=("${need#*:}")
done
# Debian's gcc can be there without what it links programs with.
[ -e /usr/include/stdio.h ] || missing+=(libc6-dev)
if [ "${#missing[@]}" -gt 0 ]; then
    if [ "$(id -u)" -ne 0 ]; then
        echo "deps: missing ${missing[*]}: run as root, or install them" >&2
        exit 1
    fi
    echo "deps: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
command -v cargo >/dev/null || {
    echo "deps: cargo is missing: install Rust 1.90 or later" >&2
    exit 1
}
if ! [ -e /dev/loop-control ]; then
    modprobe loop 2>/dev/null || echo "deps: no /dev/loop-control; the kernel needs the loop module" >&2
fi
