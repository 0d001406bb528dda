#!/usr/bin/env bash
# Builds the Kubernetes programs that tests start, from their Go modules, into a cache outside the tree: the versions
# are those of hack/kubernetes/go.mod and hack/etcd/go.mod. A program that is there already is not built again.
# Prints the directory: kube-programs.sh PROGRAM... (etcd, kube-apiserver, kubectl, and others of hack/kubernetes/go.mod)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

version_of() { awk -v module="$2" '$1 == module { print $2 } $1 == "require" && $2 == module { print $3 }' "$here/$1/go.mod"; }
kubernetes=$(version_of kubernetes k8s.io/kubernetes)
etcd=$(version_of etcd go.etcd.io/etcd/server/v3)
cache=${DELTAPATH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/deltapath}/kubernetes-$kubernetes-etcd-$etcd
mkdir -p "$cache"
command -v go >/dev/null || {
    echo "kube-programs: go is missing: install Go 1.26 or later" >&2
    exit 1
}

# Two at once would write the same .part.
exec {lock}>"$cache/lock"
flock "$lock"
for program in "$@"; do
    [ -x "$cache/$program" ] && continue
    echo "kube-programs: building $program (minutes the first time)" >&2
    started=$SECONDS
    stamp="-s -w -X k8s.io/component-base/version.gitVersion=$kubernetes"
    # Whole or not at all: what is killed halfway leaves only the .part.
    case $program in
        etcd) (cd "$here/etcd" && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$cache/etcd.part" go.etcd.io/etcd/server/v3) ;;
        *) (cd "$here/kubernetes" && CGO_ENABLED=0 go build -trimpath -ldflags "$stamp" -o "$cache/$program.part" "k8s.io/kubernetes/cmd/$program") ;;
    esac
    mv "$cache/$program.part" "$cache/$program"
    echo "kube-programs: $program took $((SECONDS - started)) s" >&2
done
echo "$cache"
