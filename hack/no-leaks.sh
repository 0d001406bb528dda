#!/usr/bin/env bash
# Runs a command and fails when it leaves a loop device, a mount or a temporary directory behind.
set -euo pipefail

state() {
    for device in /sys/block/loop*/loop/backing_file; do
        [ -e "$device" ] && echo "loop device: $(cat "$device" 2>/dev/null)"
    done
    awk '{ print "mount: " $5 }' /proc/self/mountinfo
    find "${TMPDIR:-/tmp}" -maxdepth 1 -name 'deltapath-*' -printf 'temporary: %p\n'
}

before=$(state | sort)
status=0
"$@" || status=$?
after=$(state | sort)
left=$(comm -13 <(echo "$before") <(echo "$after"))
if [ -n "$left" ]; then
    echo "left behind:" >&2
    echo "$left" >&2
    exit 1
fi
exit "$status"
