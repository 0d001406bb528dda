#!/usr/bin/env bash
# Builds the Dockerfile with buildah and unpacks the image into a directory, for the tests that run the driver in it. In place of its
# build stage stand the programs that the tests run, so that nothing is built twice; hack/dist.sh runs that stage, too.
# Does nothing when nothing changed.
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

if [ "$unpacked" = no ]; then
    echo "image-rootfs: building the programs and the Dockerfile"
    # The base images are made beside it: they take half a minute, and one core.
    "${CARGO:-cargo}" test --no-run --quiet --locked --workspace --features failpoints &
    building=$!
fi
# shellcheck source=hack/buildah.sh
. hack/buildah.sh
programs=$deps/programs
# Puts a program where the build stage puts it. It is not static, so an image without Debian gets its libraries, too.
put() { # PROGRAM DIRECTORY [with libraries]
    local library
    install -D "target/debug/$1" "$programs/out/$2/$1"
    strip "$programs/out/$2/$1"
    [ $# -lt 3 ] || for library in $(ldd "target/debug/$1" | grep -o '/[^ ]*'); do
        install -D "$(readlink -f "$library")" "$programs/out/$2$library"
    done
}
build() { # TAG [FLAG...]
    bud --build-context "build=$programs" --tag "$@"
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
    wait "$building"
    rm -rf "$programs"
    put deltapath deltapath/usr/local/bin
    put cbt-lab cbt-lab/usr/local/bin
    put deltapath-gateway gateway with libraries
    put deltapath-router router with libraries
    put cbt-earlier earlier with libraries
    put cbt-backup backup with libraries
    install -D -m 0644 -t "$programs/out/backup/etc/ssl/certs" /etc/ssl/certs/ca-certificates.crt
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

rm -f "$deps/archives/state"
mkdir -p "$deps/archives"
bud_example --tag backup-example:test
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
for name in deltapath deltapath-gateway deltapath-router cbt-earlier cbt-lab cbt-backup backup-example; do
    echo "image-rootfs: writing the archive of $name:$version"
    rm -f "$deps/archives/$name.tar"
    b push --quiet "localhost/$name:test" "docker-archive:$deps/archives/$name.tar:docker.io/library/$name:$version"
done
echo "$archives_state" >"$deps/archives/state"
