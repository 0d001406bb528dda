#!/usr/bin/env bash
# Builds the S3 server that cbt-backup is tested with, of the version in hack/s3/go.mod, into a cache outside the tree, if it
# is not there yet. Prints its path.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=$(awk '$1 == "github.com/versity/versitygw" { print $2 }' "$here/s3/go.mod")
cache=${DELTAPATH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/deltapath}/versitygw-$version
if [ ! -x "$cache/versitygw" ]; then
    command -v go >/dev/null || {
        echo "s3-server: go is missing: install Go 1.26 or later" >&2
        exit 1
    }
    echo "s3-server: building versitygw (two minutes the first time)" >&2
    mkdir -p "$cache"
    # Whole or not at all: each build has a file of its own until then.
    part=$(mktemp "$cache/part.XXXXXX")
    trap 'rm -f "$part"' EXIT
    (cd "$here/s3" && CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$part" github.com/versity/versitygw/cmd/versitygw)
    chmod 755 "$part"
    mv "$part" "$cache/versitygw"
fi
echo "$cache/versitygw"
