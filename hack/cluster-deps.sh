#!/usr/bin/env bash
# Builds once what hack/cluster.sh runs: Kubernetes and etcd, the container runtime, CoreDNS, the CSI sidecars, and the
# images of all that runs in pods. The programs go into a cache outside the tree, keyed by the versions in hack/cluster;
# the images of this tree into .deps. What is there already is not built again. Prints the cache's directory.
set -euo pipefail
# shellcheck source=hack/cluster/lib.sh
. "$(dirname "$0")/cluster/lib.sh"

usage="usage: cluster-deps.sh [--check] [--e2e]
  --check  build nothing; succeed where the programs are built already
  --e2e    also what hack/cluster-e2e.sh wants: Kubernetes' storage suites and the images of their pods"
check=no e2e=no
while [ $# -gt 0 ]; do
    case "$1" in
        --check) check=yes ;;
        --e2e) e2e=yes ;;
        -h | --help) echo "$usage" && exit 0 ;;
        *) fail "unknown argument $1
$usage" ;;
    esac
    shift
done
if [ "$check" = yes ]; then
    built || fail "not built yet: make cluster-deps builds them, once"
    exit 0
fi
[ "$(id -u)" -eq 0 ] || fail "needs root, to build images"

packages=()
while read -r program package; do
    PATH=$PATH:/usr/sbin:/usr/lib/cni command -v "$program" >/dev/null || packages+=("$package")
done <<'P'
runc runc
ptp containernetworking-plugins
nft nftables
ip iproute2
buildah buildah
openssl openssl
curl curl
perl perl-base
jq jq
pgrep procps
debugfs e2fsprogs
P
# The one that is linked to nothing, for an image that holds nothing else.
if ! [ -x /bin/busybox ] || ldd /bin/busybox >/dev/null 2>&1; then packages+=(busybox-static); fi
if [ "${#packages[@]}" -gt 0 ]; then
    say "installing ${packages[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi
need go

mkdir -p "$cluster_cache/bin" "$cluster_cache/images"
exec {lock}>"$cluster_cache/lock"
flock --nonblock "$lock" || { say "waiting for another build" && flock "$lock"; }

"$root/hack/kube-programs.sh" "${kubernetes_programs[@]}" >/dev/null

# Whole or not at all: what is killed halfway leaves only a .part.
number=0
for line in "${other_programs[@]}"; do
    group=${line%% *} package=${line#* }
    program=$(basename "$package")
    number=$((number + 1))
    [ -x "$cluster_cache/bin/$program" ] && continue
    say "building $program, $number of ${#other_programs[@]}"
    started=$SECONDS stamp="-s -w"
    [ "$group" != cluster/containerd ] ||
        stamp="$stamp -X github.com/containerd/containerd/v2/version.Version=$(module_version "$group" github.com/containerd/containerd/v2)"
    (
        cd "$root/hack/$group"
        CGO_ENABLED=0 go build -trimpath -tags no_btrfs,no_devmapper,no_zfs -ldflags "$stamp" \
            -o "$cluster_cache/bin/$program.part" "$package"
    )
    mv "$cluster_cache/bin/$program.part" "$cluster_cache/bin/$program"
    say "$program took $((SECONDS - started)) s"
done

# Writes an archive as docker save does: image NAME DIRECTORY ARCHIVE CONFIG, of one layer.
scratch=$(mktemp -d "${TMPDIR:-/tmp}/deltapath-images-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
image() {
    local work=$scratch/archive digest
    mkdir -p "$work"
    tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C "$2" -cf "$work/layer.tar" .
    digest=$(sha256sum "$work/layer.tar" | cut -d ' ' -f 1)
    printf '{"architecture":"%s","os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
        "$(go env GOARCH)" "$4" "$digest" >"$work/config.json"
    printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$1" >"$work/manifest.json"
    tar -C "$work" -cf "$3.part" manifest.json config.json layer.tar
    mv "$3.part" "$3"
    rm -r "$work"
}
for line in "${program_images[@]}"; do
    program=${line%% *}
    archive=$cluster_cache/images/$program.tar
    [ -e "$archive" ] && continue
    say "making the image ${line#* }"
    rm -rf "$scratch/root"
    mkdir -p "$scratch/root"
    cp "$cluster_cache/bin/$program" "$scratch/root/$program"
    image "${line#* }" "$scratch/root" "$archive" "{\"Entrypoint\":[\"/$program\"]}"
done
path='"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]'
# What an image of busybox holds.
busybox_root() {
    say "making the image $1"
    rm -rf "$scratch/root"
    mkdir -p "$scratch/root"/{bin,etc,home,root,tmp,usr/bin,var/tmp}
    chmod 1777 "$scratch/root/tmp" "$scratch/root/var/tmp"
    cp --dereference /bin/busybox "$scratch/root/bin/busybox"
    for applet in $(/bin/busybox --list); do
        [ "$applet" = busybox ] || ln -s busybox "$scratch/root/bin/$applet"
    done
    echo "root:x:0:0:root:/root:/bin/sh" >"$scratch/root/etc/passwd"
    echo "root:x:0:" >"$scratch/root/etc/group"
}
if ! [ -e "$cluster_cache/images/busybox.tar" ]; then
    busybox_root "$busybox_image"
    image "$busybox_image" "$scratch/root" "$cluster_cache/images/busybox.tar" "{\"Cmd\":[\"/bin/sh\"],$path}"
fi
if ! [ -e "$cluster_cache/crds" ]; then
    mkdir -p "$scratch/crds"
    for module in external-snapshotter/client/v8 external-snapshot-metadata/client; do
        (cd "$root/hack/manifests" && go mod download "github.com/kubernetes-csi/$module")
        cp "$(cd "$root/hack/manifests" && go list -m -f '{{.Dir}}' "github.com/kubernetes-csi/$module")"/config/crd/*.io_*.yaml "$scratch/crds"
    done
    cp -r "$scratch/crds" "$cluster_cache/crds.part"
    mv "$cluster_cache/crds.part" "$cluster_cache/crds"
fi
if [ "$e2e" = yes ]; then
    mkdir -p "$e2e_cache/bin" "$e2e_cache/images"
    for line in "${e2e_programs[@]}"; do
        program=${line%% *} package=${line#* }
        [ -x "$e2e_cache/bin/$program" ] && continue
        say "building $program"
        started=$SECONDS build=(build)
        # A vet of all that a suite imports takes longer than its build.
        [ "$program" != storage.test ] || build=(test -c -vet=off)
        (
            cd "$root/hack/e2e"
            CGO_ENABLED=0 go "${build[@]}" -trimpath -ldflags "-s -w" -o "$e2e_cache/bin/$program.part" "$package"
        )
        mv "$e2e_cache/bin/$program.part" "$e2e_cache/bin/$program"
        say "$program took $((SECONDS - started)) s"
    done
    for line in "${e2e_images[@]}"; do
        what=${line%% *} archive=$e2e_cache/images/${line%% *}.tar config="\"Cmd\":[\"/bin/sh\"]"
        [ -e "$archive" ] && continue
        busybox_root "${line#* }"
        case "$what" in
            agnhost)
                cp "$e2e_cache/bin/agnhost" "$scratch/root/agnhost"
                config='"Entrypoint":["/agnhost"],"Cmd":["pause"]'
                ;;
            # For GNU dd, which has flags that busybox has not. The shell of busybox would run its own.
            glibc-dns-testing)
                for file in $(ldd /bin/dd /bin/dash | grep -o '/[^ :]*' | sort -u) /bin/dd /bin/dash; do
                    mkdir -p "$scratch/root$(dirname "$file")"
                    cp --dereference --remove-destination "$file" "$scratch/root$file"
                done
                ln -sf dash "$scratch/root/bin/sh"
                ;;
            # The suite lets a pod of this image install a tool from the Internet. This go has it already.
            golang)
                mkdir -p "$scratch/root/go/bin"
                cp "$e2e_cache/bin/snapshot-metadata-verifier" "$scratch/root/go/bin"
                # shellcheck disable=SC2016 # the image's shell expands it
                printf '#!/bin/sh\n[ "$1" != env ] || echo /go\n' >"$scratch/root/bin/go"
                chmod 0755 "$scratch/root/bin/go"
                ;;
        esac
        image "${line#* }" "$scratch/root" "$archive" "{$config,$path}"
    done
fi
flock --unlock "$lock"

"$root/hack/image-rootfs.sh" --archives
echo "$cluster_cache"
