#!/usr/bin/env bash
# A kind cluster with deltapath in it: cluster, snapshot CRDs and controller, the CBT CRD, images, driver, gateway.
# Run again, it brings an existing cluster up to date. The cluster's name is CLUSTER (default: deltapath).
set -euo pipefail
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"

usage="usage: kind-up.sh [--distributed] [--no-build]
  --distributed  two worker nodes with a driver each, instead of one node
  --no-build     take the images $image, $gateway_image, $router_image, $earlier_image, $backup_example_image and $cbt_backup_image as they are"
install=() nodes=1 build=yes
while [ $# -gt 0 ]; do
    case "$1" in
        --distributed) install=(--distributed) nodes=3 ;;
        --no-build) build=no ;;
        -h | --help) echo "$usage" && exit 0 ;;
        *) fail "unknown argument $1
$usage" ;;
    esac
    shift
done
need kind kubectl openssl
engine=$(container_engine)
need "$engine"
"$engine" info >/dev/null 2>&1 || fail "$engine does not answer: is it running, and may you use it?"
[ -e /dev/loop-control ] || [ "$(uname -s)" != Linux ] || fail "no /dev/loop-control: modprobe loop"
case "$(kind version)" in
    *"$kind_version"*) ;;
    *) say "kind is not $kind_version, which this script is written for; continuing" ;;
esac

if kind get clusters 2>/dev/null | grep -qx "$CLUSTER"; then
    say "the cluster $CLUSTER is there already"
    found=$(kube get nodes --no-headers | wc -l)
    [ "$found" -eq "$nodes" ] ||
        fail "the cluster $CLUSTER has $found nodes and $nodes are asked for: hack/kind-down.sh, then again"
else
    say "creating the cluster $CLUSTER ($nodes nodes, $node_image)"
    {
        echo "kind: Cluster"
        echo "apiVersion: kind.x-k8s.io/v1alpha4"
        echo "nodes:"
        echo "  - role: control-plane"
        for ((node = 1; node < nodes; node++)); do echo "  - role: worker"; done
    } | kind create cluster --name "$CLUSTER" --image "$node_image" --config - --wait 120s ||
        fail "kind made no cluster; its own words stand above"
fi

if [ "$build" = yes ]; then
    say "building $image, $gateway_image, $router_image, $earlier_image, $backup_example_image and $cbt_backup_image"
    make --no-print-directory -C "$root" image gateway-image router-image earlier-image backup-example-image cbt-backup-image ENGINE="$engine"
fi
for loaded in "$image" "$gateway_image" "$router_image" "$earlier_image" "$backup_example_image" "$cbt_backup_image"; do
    say "loading $loaded into the nodes"
    if [ "$engine" = docker ]; then
        kind load docker-image --name "$CLUSTER" "$loaded"
    else
        # Images of other engines go by an archive, under the name that the manifests use.
        archive=$(mktemp)
        "$engine" tag "$loaded" "docker.io/library/$loaded"
        "$engine" save --output "$archive" "docker.io/library/$loaded"
        kind load image-archive --name "$CLUSTER" "$archive"
        rm -f "$archive"
    fi
done

"$root/hack/install.sh" "${install[@]}"
say "done: kubectl --context kind-$CLUSTER get pods --namespace $namespace; hack/e2e.sh runs all examples.
    A first backup, as docs/tutorial-cluster.md has it:"
awk '/^kubectl/ { found = 1; print; next } found { exit }' "$root/docs/tutorial-cluster.md" |
    sed "s|^kubectl|kubectl --context kind-$CLUSTER|; s| deploy/| $root/deploy/|g"
