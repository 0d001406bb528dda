#!/usr/bin/env bash
# Searches the fuzz targets with libFuzzer: hack/fuzz.sh SECONDS [TARGET...]. Needs a nightly toolchain; cargo-fuzz
# is installed into .deps. What it finds stays in .deps/fuzz and is gone on from the next time.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
time=${1:?how many seconds a target}
shift

version=0.13.2
tools="$root/.deps/cargo-fuzz-$version"
if ! cargo +nightly --version >/dev/null 2>&1; then
    echo "fuzz: no nightly toolchain: install one (rustup toolchain install nightly)" >&2
    exit 1
fi
if ! [ -x "$tools/bin/cargo-fuzz" ]; then
    echo "fuzz: building cargo-fuzz $version"
    cargo install cargo-fuzz --locked --version "$version" --root "$tools" --quiet
fi
export PATH="$tools/bin:$PATH"

targets=("$@")
if [ "${#targets[@]}" -eq 0 ]; then
    for file in fuzz/fuzz_targets/*.rs; do
        targets+=("$(basename "$file" .rs)")
    done
fi
# Targets write files: in memory, and gone afterwards.
memory=/dev/shm
[ -w "$memory" ] || memory=${TMPDIR:-/tmp}
scratch=$(mktemp -d "$memory/deltapath-fuzz-XXXXXX")
trap 'rm -rf "$scratch"' EXIT
for target in "${targets[@]}"; do
    echo "fuzz: $target for $time s"
    mkdir -p ".deps/fuzz/$target"
    if ! TMPDIR="$scratch" cargo +nightly fuzz run --fuzz-dir fuzz "$target" ".deps/fuzz/$target" "fuzz/corpus/$target" \
        -- -max_total_time="$time" -max_len=4096 -timeout=20 -rss_limit_mb=1536 -malloc_limit_mb=256 -print_final_stats=1; then
        echo "fuzz: $target failed: put the input above into fuzz/corpus/$target, where cargo test finds it" >&2
        exit 1
    fi
done
