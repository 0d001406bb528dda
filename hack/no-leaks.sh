#!/usr/bin/env bash
# Runs a command and fails when it leaves a loop device, a mount or a temporary directory behind. It gets a temporary
# directory of its own, so that runs beside each other are not taken for one another's leftovers.
set -euo pipefail

base=${TMPDIR:-/tmp}
TMPDIR=$(mktemp -d "$base/deltapath-run-XXXXXX")
chmod 0755 "$TMPDIR" # Tests run programs as other users, too.
export TMPDIR

state() {
    {
        for device in /sys/block/loop*/loop/backing_file; do
            [ -e "$device" ] && echo "loop device: $(cat "$device" 2>/dev/null)"
        done
        awk '{ print "mount: " $5 }' /proc/self/mountinfo
        find "$base" "$TMPDIR" -mindepth 1 -maxdepth 1 -name 'deltapath-*' -printf 'temporary: %p\n'
    } | awk -v own="$TMPDIR" -v other="$base/deltapath-run-" 'index($0, own "/") || !index($0, other)'
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
# Crates of others may have left files of theirs.
rm -rf --one-file-system "$TMPDIR"
exit "$status"
