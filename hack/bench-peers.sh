#!/usr/bin/env bash
# Measures deltapath on btrfs and xfs, and each driver of PEERS, by one workload, one after the other, and prints one table:
# PEERS="NAME=SOCKET[,DIR] ..." RUNS=3 hack/bench-peers.sh. A driver whose GetCapacity does not tell what it takes is measured by
# what the filesystem of DIR, where it stores, has left. A peer's wrong answers are in the table; ours fail the run.
set -euo pipefail
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"
cd "$root"

work=$(mktemp -d "${TMPDIR:-/tmp}/deltapath-peers-XXXXXX")
driver=
unmeasured=
# The driver unmounts and detaches its pool when it ends.
stop() {
    [ -z "$driver" ] || { kill "$driver" && wait "$driver"; } || true
    driver=
}
trap 'stop; rm -rf --one-file-system "$work"' EXIT
results=target/peers
rm -rf "$results"
mkdir -p "$results"

# measure NAME SOCKET FLAG...
measure() {
    say "$1"
    target/release/cbt-lab bench --endpoint "unix://$2" --size 1Gi,4Gi,8Gi --data 1Gi --changed 1 --snapshots 0 \
        --runs "${RUNS:-3}" --json "$results/$1.json" "${@:3}" >/dev/null
}

for peer in ${PEERS:-}; do
    place=${peer#*=}
    [ -S "${place%,*}" ] || fail "PEERS: $peer: there is no socket ${place%,*}"
done
for pool in btrfs xfs; do
    target/release/deltapath driver --endpoint "unix://$work/csi.sock" --data-dir "$work/$pool" --node-id bench \
        --pool "$pool" --pool-size 40G >"$work/log" 2>&1 &
    driver=$!
    await 30 "deltapath is ready" test -S "$work/csi.sock" || fail "deltapath did not start: $(tail -n 3 "$work/log")"
    measure "deltapath-$pool" "$work/csi.sock"
    stop
    rm -rf --one-file-system "${work:?}/$pool"
done
for peer in ${PEERS:-}; do
    name=${peer%%=*} place=${peer#*=} dir=()
    [ "$place" = "${place%,*}" ] || dir=(--space-dir "${place#*,}")
    # Where an answer is wrong it fails too, and the table has it.
    measure "$name" "${place%,*}" "${dir[@]}" || [ -e "$results/$name.json" ] || unmeasured+=" $name"
done
target/release/cbt-lab bench --compare "$results"/*.json --html "$results/peers.html"
[ -z "$unmeasured" ] || fail "not measured:$unmeasured"
