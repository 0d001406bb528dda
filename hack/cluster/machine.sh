#!/usr/bin/env bash
# Prints what a cluster must leave alone on the machine, to compare before and after: sysctls, packet filters, network,
# cgroups of a cluster's programs, mounts, loop devices, device nodes. Numbers that count what happens are left out, and so is what
# other tests on this machine have in /tmp, and builds of images in .deps.
set -euo pipefail
shopt -s nullglob

find /proc/sys -type f ! -path '*/random/*' ! -path '*-state' ! -path '*-nr' ! -path '*/nf_conntrack_count' \
    ! -path '*/ns_last_pid' ! -path '*/pty/nr' ! -path '*/sched_domain/*' ! -path '*/stat_refresh' \
    ! -path '*/binfmt_misc/*' ! -path '*/perf_event_max_sample_rate' ! -path '*/slabs*' ! -path '*/quota/*' -print0 |
    sort -z | xargs -0 grep -sH '' || true
for program in iptables-save ip6tables-save; do
    if command -v "$program" >/dev/null; then { "$program" 2>/dev/null || true; } | sed -n "/^[^#:]/s/^/$program: /p"; fi
done
nft list ruleset 2>/dev/null | sed 's/^/nft: /' || true
ip -brief link | awk '{ print "link: " $1 }'
ip route show table all | sed 's/^/route: /'
for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*; do
    # Those of other programs come and go.
    find "$hierarchy" -mindepth 1 -type d -regex '.*/\(deltapath\|kube\|containerd\|cri\|k8s\).*' -printf 'cgroup: %p\n'
done | sort -u
awk '$5 !~ "^/tmp/|/[.]deps/image/" { print "mount: " $5 }' /proc/self/mountinfo
find /dev -maxdepth 1 ! -name 'loop*' ! -name dev -printf 'device: %p %M\n' | sort
# A file that is there, or was in /tmp, is of another test. Files of a cluster are in mounts of its own.
for file in /sys/block/loop*/loop/backing_file; do
    name=$(cat "$file" 2>/dev/null) || continue
    [ -f "$name" ] || [[ $name = /tmp/* ]] || echo "loop device: ${file%/loop/backing_file} $name"
done
for directory in /var/lib/{deltapath,kubelet,containerd,etcd,cni} /run/containerd /etc/cni /var/log/pods /usr/libexec/kubernetes; do
    [ ! -e "$directory" ] || echo "directory: $directory"
done
