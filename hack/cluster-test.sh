#!/usr/bin/env bash
# Everything that the manifests, scripts and pages promise, on real Kubernetes clusters of hack/cluster.sh. Says which
# part fails and goes on with the next; what is left on the machine afterwards fails too.
set -euo pipefail
# shellcheck source=hack/cluster/lib.sh
. "$(dirname "$0")/cluster/lib.sh"

parts=(kills single distributed troubles)
usage="usage: cluster-test.sh [PART...]
  kills        nothing is left on the machine, however a cluster ends
  single       one driver on one node: installed twice, every example, the pages backup, backup-by-hand and uninstall
  distributed  a driver on each of two nodes: the examples, what works from node to node, a node without power, uninstall
  troubles     volumes in use while kubelet and driver are killed, a node loses its power, pods and claims are deleted under them
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
k() { on "$name-a" exec kubectl "$@"; }
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
    await 60 "kubelet serves" k exec block -- true
    on "$name-a" down
    unchanged
    for victim in supervisor unshare node; do
        say "SIGKILL of $victim, with volumes in use"
        in_use
        process=$(cat "$clusters/$name-a/unshare.pid")
        case "$victim" in
            supervisor) process=$(ps -o ppid= "$process" | tr -d ' ') ;;
            node) process=$(pgrep -P "$(pgrep -d , -P "$(pgrep -P "$process")")" -x unshare) ;;
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
    backup_page
    uninstall 1
    on "$name-a" down
    unchanged
}

# docs/backup.md in a cluster: its commands, as they stand but for where the bucket is.
backup_page() {
    local server page=$scratch/backup-page
    server=$("$root/hack/s3-server.sh")
    mkdir -p "$scratch/s3/backups"
    export AWS_ACCESS_KEY_ID=cluster AWS_SECRET_ACCESS_KEY=cluster-secret AWS_REGION=eu-central-1 \
        AWS_ENDPOINT=http://10.99.0.11:7070 AWS_ALLOW_HTTP=true CBT_BACKUP_REPOSITORY=s3://backups/cluster
    # It ends with the cluster.
    ROOT_ACCESS_KEY_ID=$AWS_ACCESS_KEY_ID ROOT_SECRET_ACCESS_KEY=$AWS_SECRET_ACCESS_KEY \
        on "$name-a" exec "$server" --port 10.99.0.11:7070 --region "$AWS_REGION" --quiet posix "$scratch/s3" &
    tool() { on "$name-a" exec "$root/.deps/image/cbt-backup/cbt-backup" "$@"; }
    # Of the snapshots the base of the next backup stays, for the CRD has no field that says that it need not.
    ours() {
        k get volumesnapshots,persistentvolumeclaims,pods --selector app.kubernetes.io/managed-by=cbt-backup --output json |
            jq -r '.items[] | select(.metadata.annotations["cbt-backup/base"] == null) | .metadata.name'
    }
    nothing_of_ours() { [ -z "$(ours)" ] || fail "$1 leaves: $(ours)"; }
    backups() { # KINDS, the oldest first
        local kinds
        kinds=$(tool list --output json | jq -r '.[].kind' | paste -sd ' ')
        [ "$kinds" = "$1" ] || fail "the backups are $kinds, and are to be $1"
    }
    say "the commands of docs/backup.md for a cluster"
    sed 's/\bfiles\b/data/g' "$root/deploy/examples/filesystem.yaml" | k apply --filename -
    k wait --for condition=ready --timeout 120s pod/data
    commands_of docs/backup.md |
        sed "/^export/,\$d; s|--from-literal AWS_REGION=|--from-literal AWS_ENDPOINT=$AWS_ENDPOINT --from-literal AWS_ALLOW_HTTP=true &|" >"$page"
    grep '^cbt-backup run' "$page" >"$page-again" || fail "docs/backup.md runs no backup in a cluster"
    (cd "$root" && PATH=$root/.deps/image/cbt-backup:$PATH on "$name-a" exec bash -euxo pipefail "$page")
    nothing_of_ours "a backup"
    backups full
    k exec data -- sh -c 'dd if=/dev/urandom of=/data/second bs=1M count=4 && sync'
    (cd "$root" && PATH=$root/.deps/image/cbt-backup:$PATH on "$name-a" exec bash -euxo pipefail "$page-again")
    backups "full incremental"
    say "the CronJob of that page, now"
    k create job --from cronjob/cbt-backup-data cbt-backup-now
    k wait --for condition=complete --timeout 180s job/cbt-backup-now
    nothing_of_ours "a backup by the CronJob"
    # Of one day one backup is kept.
    [ "$(tool list --output json | jq length)" = 1 ] || fail "the CronJob does not prune"
    say "a backup that is interrupted, and one that is killed"
    for signal in INT KILL; do
        # shellcheck disable=SC2016
        on "$name-a" exec bash -mc '"$1" run --pvc data --namespace default --secret cbt-backup &
            until kubectl get pod cbt-backup-data >/dev/null 2>&1; do sleep 0.1; done
            kill -"$2" "$!"
            ! wait "$!"' _ "$root/.deps/image/cbt-backup/cbt-backup" "$signal"
        [ "$signal" = INT ] || tool run --pvc data --clean-up
        nothing_of_ours "SIG$signal"
    done
    tool verify
    tool restore latest --volume default/data --to "$scratch/restored"
    for file in first second; do
        [ "$(debugfs -R "cat /$file" "$scratch/restored" 2>/dev/null | sha256sum)" = \
            "$(k exec data -- sha256sum "/data/$file" | sed 's| /.*| -|')" ] || fail "$file is restored with other bytes"
    done
    k delete job cbt-backup-now
    k delete secret cbt-backup
    k delete --filename "$root/deploy/backup/cronjob.yaml"
}

# docs/uninstall.md, with volumes in use: uninstall NODES
uninstall() {
    local node
    say "uninstalling"
    k apply --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/ephemeral.yaml"
    k wait --for condition=ready --timeout 120s pod/block pod/ephemeral
    if on "$name-a" exec "$root/hack/remove.sh"; then fail "hack/remove.sh did not refuse while there were volumes"; fi
    on "$name-a" exec "$root/hack/remove.sh" --volumes
    for ((node = 1; node <= $1; node++)); do
        await 60 "no device of deltapath is attached on node $node" no_devices "$node" ||
            fail "loop devices or mounts are left on node $node: $(left_on "$node")"
    done
    if objects "$name-a"; then fail "objects of deltapath are left"; fi
}
# What docs/uninstall.md says to look at, without the places of the cluster itself.
left_on() {
    on "$name-a" exec --node "$1" losetup --list --noheadings --output BACK-FILE | grep ^/var/lib/ || true
    on "$name-a" exec --node "$1" cat /proc/mounts | grep deltapath | grep -v "$clusters" || true
}
no_devices() { [ -z "$(left_on "$1")" ]; }

part_distributed() {
    on "$name-a" up --nodes 2
    on "$name-a" install --distributed
    on "$name-a" exec "$root/hack/e2e.sh" "${e2e_flags[@]}"
    on "$name-a" exec "$root/hack/e2e-distributed.sh" --keep
    node_without_power
    uninstall 2
    on "$name-a" down
    unchanged
}
# Whether all that is elected is in pods of a node: provisioner, snapshotter, resizer and gateway (the stand-in elects nobody).
elected_on() {
    local pods holders
    pods=$(k get pods --namespace "$namespace" --field-selector "spec.nodeName=$1" \
        --output 'jsonpath={range .items[*]}{.metadata.name}{"\n"}{end}')
    holders=$(k get leases --namespace "$namespace" --output 'jsonpath={range .items[*]}{.spec.holderIdentity}{"\n"}{end}')
    [ -n "$pods" ] && [ "$(wc -l <<<"$holders")" -ge 4 ] && ! grep -qvFf <(echo "$pods") <<<"$holders"
}
# The node of all that is elected loses its power, with volumes in use, and comes back.
node_without_power() {
    local started
    sum() { k exec "$1" -- sha256sum "$2" | cut -d ' ' -f 1; }
    say "all that is elected moves to node2"
    for _ in 1 2 3 4 5; do
        elected_on node2 && break
        k delete pod --namespace "$namespace" --selector app.kubernetes.io/component=gateway --field-selector spec.nodeName=node1
        k rollout status --namespace "$namespace" deployment/deltapath-controller --timeout 120s
        await 30 "it is on node2" elected_on node2 || true
    done
    elected_on node2 || fail "what is elected does not move to node2"
    on "$name-a" off 2
    started=$SECONDS
    await 120 "another is elected" elected_on node1 || fail "nobody on node1 is elected"
    say "another is elected $((SECONDS - started)) s after the end of node2"
    k wait --for condition=Ready=Unknown --timeout 120s node/node2
    say "volumes, snapshots and deltas of node1, while node2 is away"
    on "$name-a" exec "$root/hack/e2e.sh" --smoke
    on "$name-a" on 2
    k wait --for condition=Ready=True --timeout 120s node/node2
    await 180 "the pods of node2 run again" k wait --for condition=ready --timeout 5s pod/stranger pod/tied pod/later ||
        fail "the pods of node2 do not run again"
    [ "$(sum stranger /restored/first)" = "$(sum user /source/first)" ] || fail "a volume of node2 holds other bytes"
    [ "$(sum later /later/second)" = "$(sum user /source/second)" ] || fail "a volume of node2 holds other bytes"
}

# The writer's file holds the numbers from 1 on, each written to the disk before the next.
writes() { [ "$(k exec writer -- tail -n 1 /data/log)" -gt "$1" ]; }
goes_on() { # WHAT: it writes on, and no number is missing. Where a pod was deleted by force two write for a while
    local last
    last=$(k exec writer -- tail -n 1 /data/log)
    await 120 "the pod writes after $1" writes "$last" || fail "the pod does not write after $1"
    # shellcheck disable=SC2016
    k exec writer -- awk '{ seen[$1] = 1; if ($1 > last) last = $1 } END { while (last > 0) if (!(last-- in seen)) exit 1 }' /data/log || fail "a number is missing after $1"
}
part_troubles() {
    local sum
    on "$name-a" up
    on "$name-a" install
    k apply --filename - <<'Y'
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data, namespace: default}
spec: {storageClassName: deltapath, accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
---
apiVersion: v1
kind: Pod
metadata: {name: writer, namespace: default}
spec:
  terminationGracePeriodSeconds: 0
  securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 2000}
  containers:
    - name: writer
      image: busybox:1.37.0
      command:
        - sh
        - -ec
        - |
          [ -e /data/random ] || dd if=/dev/urandom of=/data/random bs=1M count=256 conv=fsync
          n=$(tail -n 1 /data/log || echo 0)
          while :; do n=$((n + 1)) && echo $n >>/data/log && sync /data/log && sleep 0.05; done
      volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
---
# The same volume in a second pod: a part of it, and all of it, read-only.
apiVersion: v1
kind: Pod
metadata: {name: reader, namespace: default}
spec:
  terminationGracePeriodSeconds: 0
  containers:
    - name: reader
      image: busybox:1.37.0
      command: [sleep, infinity]
      volumeMounts:
        - {name: data, mountPath: /part, subPath: part}
        - {name: data, mountPath: /all, readOnly: true}
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
Y
    k wait --for condition=ready --timeout 120s pod/writer pod/reader
    await 60 "the pod writes" writes 0 || fail "the pod does not write"
    say "fsGroup, subPath, readOnly, two pods on one volume"
    [ "$(k exec writer -- stat -c %u:%g /data/log)" = 1000:2000 ] || fail "the file is not the fsGroup's: $(k exec writer -- stat -c %u:%g /data/log)"
    k exec reader -- sh -c 'echo here >/part/file && cmp /part/file /all/part/file && ! touch /all/file'
    k exec writer -- grep -q here /data/part/file

    say "kubelet killed"
    on "$name-a" exec pkill -KILL -x kubelet
    await 60 "kubelet serves" k exec writer -- true
    goes_on "kubelet's end"

    say "the driver killed, in the middle of a backup"
    k apply --filename "$root/deploy/backup/cronjob.yaml"
    k apply --filename - <<'Y'
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: backups, namespace: default}
spec: {storageClassName: deltapath, accessModes: [ReadWriteOnce], resources: {requests: {storage: 2Gi}}}
Y
    on "$name-a" exec "$root/.deps/image/cbt-backup/cbt-backup" run --pvc data --namespace default --repository-claim backups \
        --repository all -- --limit-rate 32M &
    await 120 "the backup runs" k wait --for jsonpath='{.status.phase}'=Running --timeout 5s pod/cbt-backup-data
    on "$name-a" exec pkill -KILL -x deltapath
    wait $! || fail "the backup does not outlive the driver"
    k rollout status --namespace "$namespace" statefulset/deltapath-plugin --timeout 120s
    goes_on "the driver's end"

    say "a pod deleted by force, and the node without power"
    sum=$(k exec writer -- sha256sum /data/random)
    k get pod writer --output json | jq 'del(.spec.nodeName, .status, .metadata.uid, .metadata.resourceVersion)' >"$scratch/writer.json"
    k delete pod writer --force --grace-period 0
    k create --filename "$scratch/writer.json"
    k wait --for condition=ready --timeout 120s pod/writer
    goes_on "the pod's end"
    on "$name-a" off 1
    on "$name-a" on 1
    await 120 "the API server answers" k get --raw /readyz || fail "the API server does not answer"
    await 180 "the pods run again" k exec reader -- test -e /part/file || fail "the pods do not run again"
    goes_on "the loss of power"
    [ "$(k exec writer -- sha256sum /data/random)" = "$sum" ] || fail "the volume holds other bytes"

    say "a claim deleted while pods use it"
    k delete persistentvolumeclaim data --wait=false
    goes_on "its claim's deletion"
    k delete pod writer reader
    await 60 "the claim goes" k wait --for delete --timeout 1s persistentvolumeclaim/data || fail "the claim does not go"
    k delete --filename "$root/deploy/backup/cronjob.yaml"
    uninstall 1
    on "$name-a" down
    unchanged
}

"part_$1"
