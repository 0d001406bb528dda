#!/usr/bin/env bash
# Prints the path of a program of crates.io: cargo-tool.sh NAME VERSION [OPTIONS of cargo install]. The first time it is built, into a
# cache outside the tree, in a few minutes.
set -euo pipefail
name=${1:?usage: cargo-tool.sh NAME VERSION}
version=${2:?usage: cargo-tool.sh NAME VERSION}
shift 2
root=${DELTAPATH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/deltapath}/$name-$version
if ! [ -x "$root/bin/$name" ]; then
    echo "building $name $version" >&2
    "${CARGO:-cargo}" install --quiet --locked --version "$version" --root "$root" "$@" "$name"
fi
echo "$root/bin/$name"
