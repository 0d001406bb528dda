# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: overlays that no other part installs. Each volume, snapshot and delta of the smoke test works
# with each of them.
# shellcheck disable=SC2154,SC2317

part_overlays() {
    local overlay deployment
    # Where a replica is elected, it alone becomes ready; such a Deployment is never `available`.
    serves() { [ "$(k get "$1" --namespace "$namespace" --output 'jsonpath={.status.readyReplicas}')" -ge 1 ]; }
    for overlay in attach community-sidecar differential aggregated faults; do
        say "deploy/overlays/$overlay"
        on "$name-a" up
        on "$name-a" install --overlay "$overlay"
        for deployment in $(k get deployments --namespace "$namespace" --output name); do
            await 180 "$deployment serves" serves "$deployment" || fail "$deployment does not serve: $(k get pods --namespace "$namespace")"
        done
        on "$name-a" exec "$root/hack/e2e.sh" --smoke
        on "$name-a" down
        unchanged
    done
}
