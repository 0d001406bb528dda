# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: a driver on each of two nodes.
# shellcheck disable=SC2154,SC2317

part_distributed() {
    on "$name-a" up --nodes 2
    on "$name-a" install --distributed
    on "$name-a" exec "$root/hack/e2e.sh" "${e2e_flags[@]}"
    on "$name-a" exec "$root/hack/e2e-distributed.sh" --keep
    drain
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
# As before work on a node: its pods end, and with them what they had mounted. Back, they find their volumes.
drain() {
    say "draining node2"
    k get pods --output json --field-selector spec.nodeName=node2 |
        jq '.items |= map(select(.status.phase == "Running") | del(.spec.nodeName, .status, .metadata.uid, .metadata.resourceVersion))' \
            >"$scratch/drained"
    [ "$(jq '.items | length' "$scratch/drained")" -ge 3 ] || fail "node2 has few pods"
    # What volumes have mounted: filesystems of volumes, Block devices, and where each is mounted first.
    staged() { on "$name-a" exec --node 2 cat /proc/mounts | awk '$2 ~ "^/var/lib/kubelet/" && $2 ~ "kubernetes.io~csi|kubernetes.io/csi"'; }
    [ "$(staged | wc -l)" -ge 3 ] || fail "few volumes are mounted on node2: $(staged)"
    k drain node2 --ignore-daemonsets --delete-emptydir-data --force --timeout 180s
    unstaged() {
        local left
        left=$(staged) && [ -z "$left" ]
    }
    await 60 "nothing is mounted" unstaged || fail "mounts are left on a drained node: $(staged)"
    k uncordon node2
    # Both replicas of the controller went to node1. One of a new pair prefers the other node.
    k delete "$(k get pods --namespace "$namespace" --selector app.kubernetes.io/component=gateway --output name | head -n 1)" --namespace "$namespace"
    k rollout status --namespace "$namespace" deployment/deltapath-controller --timeout 120s
    k create --filename "$scratch/drained"
    k wait --for condition=ready --timeout 180s --filename "$scratch/drained"
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
