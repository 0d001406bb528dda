# shellcheck shell=bash
# Builds the Dockerfile with buildah, for hack/image-rootfs.sh and hack/dist.sh, which source this. The base images are made by
# debootstrap and the toolchains are this machine's, so no image registry is used. The store is in .deps/image.

deps=${root:?}/.deps/image

# Two at once would remove each other's containers.
mkdir -p "$deps"
exec {lock}>"$deps/lock"
flock "$lock"

missing=()
for program in buildah debootstrap; do
    command -v "$program" >/dev/null || missing+=("$program")
done
if [ ${#missing[@]} -gt 0 ]; then
    echo "buildah.sh: installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

b() { buildah --root "$deps/store" --runroot "$deps/run" "$@"; }
has() { b inspect --type image "$1" >/dev/null 2>&1; }
export BUILDAH_ISOLATION=chroot
# A build that is cut short leaves containers behind, and their mounts with them.
b rm --all >/dev/null
trap 'b rm --all >/dev/null' EXIT

debian=docker.io/library/debian:bookworm-slim
golang=docker.io/library/golang:1.26-bookworm

# Nothing in it depends on when and where it is made: no logs, no caches, no names of the machine.
if ! [ -e "$deps/debian.tar" ]; then
    echo "buildah.sh: making the base images"
    rm -rf "$deps/base"
    debootstrap --variant=minbase bookworm "$deps/base" >"$deps/debootstrap.log" 2>&1 || {
        tail -n 5 "$deps/debootstrap.log" >&2
        exit 1
    }
    for path in etc/hostname etc/resolv.conf etc/machine-id var/log var/cache var/lib/apt/lists; do
        find "$deps/base/$path" -not -type d -delete 2>/dev/null || true
    done
    # The day on which accounts were made, and the files before the last change.
    sed -i -E 's/^([^:]*:[^:]*):[0-9]+:/\1:0:/' "$deps/base/etc/shadow"
    rm -f "$deps"/base/etc/*-
    tar -C "$deps/base" --sort=name --mtime=@0 -cf "$deps/debian.tar.new" .
    for image in "$debian" "$golang"; do b rmi --force "$image" >/dev/null 2>&1 || true; done
    mv "$deps/debian.tar.new" "$deps/debian.tar"
    rm -rf "$deps/base"
fi
commit() { b commit -q --rm --timestamp 0 "$@" >/dev/null; }
has "$debian" || {
    container=$(b from scratch)
    b add -q "$container" "$deps/debian.tar" / >/dev/null
    b config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    commit "$container" "$debian"
}

logged() {
    "$@" >"$deps/build.log" 2>&1 || {
        tail -n 20 "$deps/build.log" >&2
        exit 1
    }
}
# Builds a stage of the Dockerfile in the directory $context.
bud() { # FLAG...
    logged b bud --pull-never --layers --quiet "$@" --file "${context:-.}/Dockerfile" "${context:-.}"
}
# Builds the example backup program, which has a Dockerfile of its own.
bud_example() { # FLAG...
    has "$golang" || {
        container=$(b from --pull-never "$debian")
        b config --env PATH=/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            --env GOPROXY=off --env GOTOOLCHAIN=local --env GOPATH=/go --env GOCACHE=/go/build "$container"
        commit "$container" "$golang"
    }
    (cd "${context:-.}/deploy/backup-example" && go mod download)
    mkdir -p "$deps/gobuild"
    logged b bud --pull-never --quiet --volume "$(go env GOROOT):/usr/local/go:ro" --volume "$(go env GOMODCACHE):/go/pkg/mod" \
        --volume "$deps/gobuild:/go/build" "$@" "${context:-.}/deploy/backup-example"
}
