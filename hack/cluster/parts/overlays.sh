# shellcheck shell=bash
# Sourced by hack/cluster-test.sh: overlays that no other part installs. Each volume, snapshot and delta of the smoke test works
# with each of them.
# shellcheck disable=SC2154,SC2317

part_overlays() {
    local overlay deployment page=$scratch/page
    # Where a replica is elected, it alone becomes ready; such a Deployment is never `available`.
    serves() { [ "$(k get "$1" --namespace "$namespace" --output 'jsonpath={.status.readyReplicas}')" -ge 1 ]; }
    for overlay in attach community-sidecar differential aggregated faults; do
        say "deploy/overlays/$overlay"
        on "$name-a" up
        on "$name-a" install --overlay "$overlay"
        # What the page says about each, but for what is installed already; its snapshots are those of the smoke test.
        : >"$page"
        case "$overlay" in
            differential) commands_of docs/designs.md | sed -n '/^openssl.*-nodes/,/^kubectl create secret/p' >"$page" ;;
            aggregated) commands_of docs/designs.md | sed -n '/^for name in aggregated/,/"}}"$/p' | grep -v 'overlays/aggregated' >"$page" ;;
        esac
        [ -s "$page" ] || [[ $overlay != differential && $overlay != aggregated ]] || fail "docs/designs.md has other commands than this test knows"
        (cd "$scratch" && on "$name-a" exec bash -euxo pipefail "$page")
        for deployment in $(k get deployments --namespace "$namespace" --output name); do
            await 180 "$deployment serves" serves "$deployment" || fail "$deployment does not serve: $(k get pods --namespace "$namespace")"
        done
        on "$name-a" exec "$root/hack/e2e.sh" --smoke --keep
        case "$overlay" in
            differential) commands_of docs/designs.md | sed -n '/^kubectl apply -f - <<END/,/^kubectl wait diffsnap/p' >"$page" ;;
            aggregated) commands_of docs/designs.md | sed -n '/^kubectl wait apiservice/,/^END/p' >"$page" ;;
            *) : >"$page" ;;
        esac
        sed -i 's/monday/block-1/; s/tuesday/block-2/' "$page"
        (cd "$scratch" && on "$name-a" exec bash -euxo pipefail "$page") | tee "$scratch/walk"
        [ "$overlay" != aggregated ] || grep -q blockSizeBytes "$scratch/walk" || fail "VolumeSnapshotDelta lists no block"
        on "$name-a" down
        unchanged
    done
}
