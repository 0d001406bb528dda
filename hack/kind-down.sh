#!/usr/bin/env bash
# Takes the cluster of kind-up.sh away, and the loop devices that its nodes leave behind.
set -euo pipefail
# shellcheck source=hack/lib.sh
. "$(dirname "$0")/lib.sh"

[ $# -eq 0 ] || fail "takes no arguments; CLUSTER names the cluster (default: deltapath)"
need kind kubectl

if ! kind get clusters 2>/dev/null | grep -qx "$CLUSTER"; then
    say "there is no cluster $CLUSTER"
    exit 0
fi

# Loop devices belong to the machine's kernel and outlive the nodes: the driver detaches its own when its volumes
# are gone and it is stopped in order.
if kube get namespace "$namespace" >/dev/null 2>&1; then
    say "deleting what uses volumes of deltapath"
    "$root/hack/remove.sh" --context "kind-$CLUSTER" --volumes ||
        say "not all of it could be removed. Loop devices may stay until they are detached (docs/uninstall.md)"
fi
say "deleting the cluster $CLUSTER"
kind delete cluster --name "$CLUSTER"
