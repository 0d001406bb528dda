# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: the Helm chart, on two nodes, while volumes are in use.
# shellcheck disable=SC2154,SC2317

part_chart() {
    on "$name-a" up --nodes 2
    on "$name-a" install --distributed
    k apply --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/filesystem.yaml"
    k wait --for condition=ready --timeout 120s pod/block pod/files
    before=$(what_is_there)
    say "from kustomize to the chart"
    on "$name-a" install --distributed --chart
    same "the switch to the chart"
    # The templates are the same, so no pod is replaced.
    rolled=$(k get daemonset deltapath-plugin --namespace "$namespace" --output jsonpath='{.metadata.generation}')
    say "an upgrade and a rollback"
    helm_in upgrade deltapath "$root/deploy/chart/deltapath" --reset-then-reuse-values --set 'driver.extraArgs={--overcommit=2}'
    k rollout status --namespace "$namespace" daemonset/deltapath-plugin --timeout 300s
    [ "$(k get daemonset deltapath-plugin --namespace "$namespace" --output jsonpath='{.metadata.generation}')" -gt "$rolled" ] ||
        fail "the upgrade changed nothing"
    same "an upgrade"
    helm_in rollback deltapath 1
    k rollout status --namespace "$namespace" daemonset/deltapath-plugin --timeout 300s
    same "a rollback"
    k delete --filename "$root/deploy/examples/block.yaml" --filename "$root/deploy/examples/filesystem.yaml"
    on "$name-a" exec "$root/hack/e2e.sh" --smoke
    uninstall 2
    on "$name-a" down

    say "the chart on an empty cluster, on one node"
    on "$name-a" up
    on "$name-a" install --chart
    on "$name-a" exec "$root/hack/e2e.sh" "${e2e_flags[@]}"
    uninstall 1
    on "$name-a" down
    unchanged
}

helm_in() { on "$name-a" exec helm --kube-context cluster --namespace "$namespace" "$@"; }
# Of the volumes their bytes; of the certificates the CA, which an upgrade must not empty.
what_is_there() {
    k get persistentvolumes --output jsonpath='{.items[*].metadata.uid}'
    k exec files -- sha256sum /data/first
    k exec block -- sh -c 'dd if=/dev/volume bs=1M count=16 2>/dev/null | sha256sum'
    k get secret deltapath-snapshot-metadata-tls deltapath-router-tls --namespace "$namespace" --output jsonpath='{.items[*].data.ca\.crt}'
}
same() {
    local now
    now=$(what_is_there)
    [ "$now" = "$before" ] || fail "after $1 there is something else: $now
and before: $before"
}
