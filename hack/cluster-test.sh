#!/usr/bin/env bash
# Everything that the manifests, scripts and pages promise, on real Kubernetes clusters of hack/cluster.sh. Says which
# part fails and goes on with the next; what is left on the machine afterwards fails too.
set -euo pipefail
# shellcheck source=hack/cluster/lib.sh
. "$(dirname "$0")/cluster/lib.sh"

parts=(kills single distributed)
usage="usage: cluster-test.sh [PART...]
  kills        nothing is left on the machine, however a cluster ends
  single       one driver on one node: installed twice, every example, the pages backup and uninstall
  distributed  a driver on each of two nodes: the examples
Without a PART all of them."
for part in "$@"; do
    case "$part" in
        -h | --help) echo "$usage" && exit 0 ;;
        *) [[ " ${parts[*]} " = *" $part "* ]] || fail "unknown argument $part
$usage" ;;
    esac
done
[ "$(id -u)" -eq 0 ] || fail "needs root, for namespaces and mounts"
if [ $# -ne 1 ]; then
    "$root/hack/cluster-deps.sh" >/dev/null
    [ $# -eq 0 ] || parts=("$@")
    passed=0 failed=0
    for part in "${parts[@]}"; do
        started=$SECONDS
        say "$part: begins"
        if "$0" "$part"; then
            passed=$((passed + 1))
            say "$part: passed in $((SECONDS - started)) s"
        else
            failed=$((failed + 1))
            say "$part: FAILED after $((SECONDS - started)) s"
        fi
    done
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
fi
"$root/hack/cluster-deps.sh" >/dev/null

name=test-$$
clusters=${DELTAPATH_CLUSTERS:-/var/tmp/deltapath-clusters}
scratch=$(mktemp -d "${TMPDIR:-/var/tmp}/deltapath-cluster-test-XXXXXX")
on() { # NAME COMMAND...
    local cluster=$1
    shift
    CLUSTER=$cluster "$root/hack/cluster.sh" "$@"
}
cleanup() {
    on "$name-a" down
    rm -rf "$scratch"
}
trap 'cleanup >/dev/null 2>&1' EXIT
"$root/hack/cluster/machine.sh" >"$scratch/before"
unchanged() {
    "$root/hack/cluster/machine.sh" >"$scratch/after"
    diff "$scratch/before" "$scratch/after" >"$scratch/changed" || {
        cat "$scratch/changed"
        fail "the machine is not as it was: < is before, > is now"
    }
}
# The commands of a page, as a person copies them: those between "```sh" lines, but for those that name a registry of
# the reader's.
commands_of() { awk '/^```sh$/ { on = 1; next } /^```$/ { on = 0 } on && !/REGISTRY/' "$root/$1"; }

# Attaches loop devices and mounts in a pod, as the driver does.
busy() {
    on "$1" exec kubectl apply --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/filesystem.yaml"
    on "$1" exec kubectl wait --for condition=ready --timeout 120s pod/block pod/files
}

part_kills() {
    in_use() {
        on "$name-a" up
        on "$name-a" install
        busy "$name-a"
    }
    local victim process
    say "kubelet killed, then a cluster in use taken down"
    in_use
    on "$name-a" exec pkill -KILL -x kubelet
    await 60 "kubelet is started again" on "$name-a" exec pgrep -x kubelet
    await 60 "kubelet serves" on "$name-a" exec kubectl exec block -- true
    on "$name-a" down
    unchanged
    for victim in supervisor unshare node; do
        say "SIGKILL of $victim, with volumes in use"
        in_use
        process=$(cat "$clusters/$name-a/unshare.pid")
        case "$victim" in
            supervisor) process=$(ps -o ppid= "$process" | tr -d ' ') ;;
            node) process=$(pgrep -P "$(pgrep -P "$process")" -x unshare) ;;
        esac
        kill -KILL "$process"
        # The supervisor sweeps up; after its own death the next command does.
        if [ "$victim" != supervisor ]; then
            await 60 "the cluster ended and was swept up" grep -q "the cluster ended" "$clusters/$name-a/cluster.log"
            unchanged
        fi
        on "$name-a" down
        unchanged
    done
    say "SIGKILL in the middle of up"
    for moment in 0.5 2 5 9; do
        CLUSTER=$name-a setsid "$root/hack/cluster.sh" up >/dev/null 2>&1 &
        process=$!
        sleep "$moment"
        kill -KILL -- -"$process" 2>/dev/null || true
        wait "$process" 2>/dev/null || true
        on "$name-a" down
        unchanged
    done
}

examples_are_all_used() {
    local example
    for example in "$root"/deploy/examples/*.yaml; do
        grep -qE "\b$(basename "$example" .yaml)\b" "$root/hack/e2e.sh" || fail "hack/e2e.sh does not use $example"
    done
}
# What of deltapath a cluster still has, of any kind of object.
objects() {
    local kinds
    kinds=$(on "$1" exec kubectl api-resources --verbs list --output name | grep -v '^events' | paste -sd ,)
    on "$1" exec kubectl get "$kinds" --all-namespaces --ignore-not-found --output name | grep -i deltapath
}

part_single() {
    examples_are_all_used
    on "$name-a" up
    on "$name-a" install
    say "installing once more changes nothing"
    on "$name-a" install
    on "$name-a" exec "$root/hack/e2e.sh" "${e2e_flags[@]}"
    say "the commands of docs/backup-by-hand.md"
    commands_of docs/backup-by-hand.md >"$scratch/backup"
    [ "$(grep -c kubectl "$scratch/backup")" -gt 20 ] || fail "docs/backup-by-hand.md has few commands"
    (cd "$root" && on "$name-a" exec bash -euo pipefail "$scratch/backup") | tee "$scratch/walk"
    grep -qE '^ +268435456 +1048576$' "$scratch/walk" || fail "the walk lists another delta than the page says"
    [ "$(grep -c '^verified: 1073741824 bytes are equal' "$scratch/walk")" -ge 3 ] || fail "not all backups of the walk are verified"
    say "uninstalling"
    on "$name-a" exec kubectl apply --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/ephemeral.yaml"
    on "$name-a" exec kubectl wait --for condition=ready --timeout 120s pod/block pod/ephemeral
    if on "$name-a" exec "$root/hack/remove.sh"; then fail "hack/remove.sh did not refuse while there were volumes"; fi
    on "$name-a" exec "$root/hack/remove.sh" --volumes
    await 60 "no device of deltapath is attached" no_devices "$name-a" || fail "loop devices or mounts are left: $(left_on "$name-a")"
    if objects "$name-a"; then fail "objects of deltapath are left"; fi
    on "$name-a" down
    unchanged
}
# What docs/uninstall.md says to look at, without the places of the cluster itself.
left_on() {
    on "$1" exec losetup --list --noheadings --output BACK-FILE | grep ^/var/lib/ || true
    on "$1" exec cat /proc/mounts | grep deltapath | grep -v "$clusters" || true
}
no_devices() { [ -z "$(left_on "$1")" ]; }

part_distributed() {
    on "$name-a" up --nodes 2
    on "$name-a" install --distributed
    on "$name-a" exec "$root/hack/e2e.sh" "${e2e_flags[@]}"
    on "$name-a" down
    unchanged
}

"part_$1"
