#!/usr/bin/env bash
# Builds the Dockerfile with buildah and unpacks the image into a directory, for the tests that run the driver in it.
# The base images are made by debootstrap and the toolchain is this machine's, so no image registry is asked; what
# is tested is every instruction of the Dockerfile and what comes out of them. Does nothing when nothing changed.
#
# With --archives it also writes the images of driver, gateway, router, earlier designs, cbt-lab, backup tool and example program to
# .deps/image/archives, under the names that the manifests use, for hack/cluster.sh.
set -euo pipefail
case "${1-}" in
    "") archives=no ;;
    --archives) archives=yes ;;
    *) echo "image-rootfs: unknown argument $1" >&2 && exit 1 ;;
esac
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
deps=$root/.deps/image
rootfs=$deps/rootfs

[ "$(id -u)" -eq 0 ] || {
    echo "image-rootfs: needs root: the tests that run the driver in its image will be skipped" >&2
    exit 0
}

# What the image is made of.
inputs=(Dockerfile .dockerignore Cargo.toml Cargo.lock crates proto src)
state=$(find "${inputs[@]}" -type f -not -path '*/tests/*' -not -path '*/benches/*' -not -name '*.md' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1)
unpacked=no
if [ "$(cat "$deps/state" 2>/dev/null)" = "$state" ] && [ -x "$rootfs/usr/local/bin/deltapath" ] &&
    [ -x "$deps/gateway/deltapath-gateway" ] && [ -x "$deps/router/deltapath-router" ] &&
    [ -x "$deps/earlier/cbt-earlier" ] && [ -x "$deps/cbt-backup/cbt-backup" ]; then
    unpacked=yes
fi
archives_state=$state-$(find deploy/backup-example -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d ' ' -f 1)
if [ "$archives" = no ] || [ "$(cat "$deps/archives/state" 2>/dev/null)" = "$archives_state" ]; then
    archives=no
    [ "$unpacked" = no ] || exit 0
fi

# Two at once would remove each other's containers.
mkdir -p "$deps"
exec {lock}>"$deps/lock"
flock "$lock"

for program in buildah debootstrap; do
    command -v "$program" >/dev/null || missing="${missing:-}$program "
done
if [ -n "${missing:-}" ]; then
    echo "image-rootfs: installing $missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086 # words, on purpose
    apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

store=(--root "$deps/store" --runroot "$deps/run")
b() { buildah "${store[@]}" "$@"; }
export BUILDAH_ISOLATION=chroot
# A build that is cut short leaves containers behind, and their mounts with them.
b rm --all >/dev/null
trap 'b rm --all >/dev/null' EXIT

if ! [ -e "$deps/base.tar" ]; then
    echo "image-rootfs: making the base images"
    rm -rf "$deps/base"
    debootstrap --variant=minbase bookworm "$deps/base" >"$deps/debootstrap.log" 2>&1 || {
        tail -n 5 "$deps/debootstrap.log" >&2
        exit 1
    }
    rm -rf "$deps/base"/var/cache/apt/archives/*.deb "$deps/base"/var/lib/apt/lists/*
    tar -C "$deps/base" -cf "$deps/base.tar.new" .
    mv "$deps/base.tar.new" "$deps/base.tar"
    rm -rf "$deps/base"
fi
debian=docker.io/library/debian:bookworm-slim
b inspect --type image "$debian" >/dev/null 2>&1 || {
    container=$(b from scratch)
    b add -q "$container" "$deps/base.tar" / >/dev/null
    b config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    b commit -q --rm "$container" "$debian" >/dev/null
}
rust=docker.io/library/rust:1.90-bookworm
b inspect --type image "$rust" >/dev/null 2>&1 || {
    container=$(b from --pull-never "$debian")
    b run "$container" -- sh -ec 'apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev >/dev/null'
    b config --env PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        --env CARGO_HOME=/usr/local/cargo "$container"
    b commit -q --rm "$container" "$rust" >/dev/null
}

toolchain=$(rustc --print sysroot)
registry=${CARGO_HOME:-$HOME/.cargo}/registry
mkdir -p "$registry" "$deps/target"
build() { # TAG [FLAG...]
    b bud --pull-never --layers --quiet --build-arg OPT_LEVEL=0 --build-arg LTO=off --build-arg CODEGEN_UNITS=16 --tag "$@" \
        --volume "$toolchain:/usr/local/rust:ro" --volume "$registry:/usr/local/cargo/registry" \
        --volume "$deps/target:/src/target" --volume /etc/ssl/certs:/etc/ssl/certs:ro \
        --file Dockerfile . >"$deps/build.log" 2>&1 || {
        tail -n 20 "$deps/build.log" >&2
        exit 1
    }
}
unpack() { # TAG DIRECTORY
    rm -rf "$2.new"
    mkdir -p "$2.new"
    container=$(b from --pull-never "localhost/$1")
    mounted=$(b mount "$container")
    cp -a "$mounted/." "$2.new/"
    b umount "$container" >/dev/null
    b rm "$container" >/dev/null
    rm -rf "$2"
    mv "$2.new" "$2"
}
if [ "$unpacked" = no ]; then
    echo "image-rootfs: building the Dockerfile"
    build deltapath:test
    unpack deltapath:test "$rootfs"
    build deltapath-gateway:test --target gateway
    unpack deltapath-gateway:test "$deps/gateway"
    build deltapath-router:test --target router
    unpack deltapath-router:test "$deps/router"
    build cbt-earlier:test --target earlier
    unpack cbt-earlier:test "$deps/earlier"
    build cbt-lab:test --target lab
    build cbt-backup:test --target backup
    unpack cbt-backup:test "$deps/cbt-backup"
    echo "$state" >"$deps/state"
    echo "image-rootfs: $(du -sh --apparent-size "$rootfs" | cut -f 1) in $rootfs"
fi
[ "$archives" = yes ] || exit 0

# The example backup program has a Dockerfile of its own; its Go toolchain and modules are this machine's too.
golang=docker.io/library/golang:1.26-bookworm
b inspect --type image "$golang" >/dev/null 2>&1 || {
    container=$(b from --pull-never "$debian")
    b config --env PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        --env GOPROXY=off --env GOTOOLCHAIN=local --env GOPATH=/go --env GOCACHE=/go/build "$container"
    b commit -q --rm "$container" "$golang" >/dev/null
}
(cd deploy/backup-example && go mod download)
mkdir -p "$deps/gobuild" "$deps/archives"
rm -f "$deps/archives/state"
b bud --pull-never --quiet --tag backup-example:test \
    --volume "$(go env GOROOT):/usr/local/go:ro" --volume "$(go env GOMODCACHE):/go/pkg/mod" --volume "$deps/gobuild:/go/build" \
    deploy/backup-example >"$deps/build.log" 2>&1 || {
    tail -n 20 "$deps/build.log" >&2
    exit 1
}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
for name in deltapath deltapath-gateway deltapath-router cbt-earlier cbt-lab cbt-backup backup-example; do
    echo "image-rootfs: writing the archive of $name:$version"
    rm -f "$deps/archives/$name.tar"
    b push --quiet "localhost/$name:test" "docker-archive:$deps/archives/$name.tar:docker.io/library/$name:$version"
done
echo "$archives_state" >"$deps/archives/state"
