# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: overlays that no other part installs. Each volume, snapshot and delta of the smoke test works
# with each of them.
# shellcheck disable=SC2154,SC2317

part_overlays() {
    local overlay
    for overlay in attach community-sidecar differential aggregated faults; do
        say "deploy/overlays/$overlay"
        on "$name-a" up
        on "$name-a" install --overlay "$overlay"
        k wait --for condition=available --timeout 180s --namespace "$namespace" --all deployment
        on "$name-a" exec "$root/hack/e2e.sh" --smoke
        on "$name-a" down
        unchanged
    done
}
