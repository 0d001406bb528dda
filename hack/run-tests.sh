#!/usr/bin/env bash
# Builds all tests and runs them as one pool, so that the cores are busy to the end: each integration test is a process,
# the longest first (hack/test-times), and one that hangs is ended and named. Unit tests run a program at a time. Retries nothing.
# Tests that compute more than they wait run one for each core, and the others at the same time: so the cores are busy, and no test is
# starved.
#
#   run-tests.sh [--short] [FILTER]     JOBS=6 at once (3 for each core), LIMIT=900 seconds for each
#
# --short leaves out what needs programs built by Go or the unpacked image (`testkit::needs` ends such tests with code 77) and, without
# a FILTER, those of hack/long-tests.
# The last line is 'N passed, N failed, N skipped'; what each took is in target/test-times: seconds,
# label, seconds of a processor.
set -euo pipefail
cd "$(dirname "$0")/.."
filter=
for argument in "$@"; do
    case $argument in
        --short)
            export DELTAPATH_SHORT=1
            # Fewer random lives, too: `make test` is for a person who waits.
            export DELTAPATH_MODEL_CASES=${DELTAPATH_MODEL_CASES:-5} PROPTEST_CASES=${PROPTEST_CASES:-10}
            export DELTAPATH_CHAOS_SECONDS=${DELTAPATH_CHAOS_SECONDS:-10}
            ;;
        -*) echo "run-tests: unknown argument $argument" >&2 && exit 2 ;;
        *) filter=$argument ;;
    esac
done
patterns=$(grep -v '^#' hack/long-tests | grep .)
jobs=${JOBS:-$((3 * $(nproc)))}
export LIMIT=${LIMIT:-900} DELTAPATH_PROGRAMS_ARE_BUILT=yes
# Random tests make the same choices in each run, so that what fails is what was changed. Without it they make new ones.
export DELTAPATH_SEED=${DELTAPATH_SEED:-3314}
cargo=${CARGO:-cargo}

started=$SECONDS
mkdir -p target
"$cargo" test --no-run --locked --workspace --features failpoints --message-format=json-render-diagnostics >target/test-artifacts
# The documentation's examples are compiled only.
"$cargo" test --quiet --locked --workspace --features failpoints --doc
built=$((SECONDS - started))

work=$(mktemp -d "${TMPDIR:-/tmp}/deltapath-tests-XXXXXX")
export work
trap 'rm -rf "$work"' EXIT

# A line for each process: seconds as far as they are known, works or waits, label, program, directory, arguments.
plan() {
    sed -n 's/.*"manifest_path":"\([^"]*\)\/Cargo.toml","target":{"kind":\["\([a-z]*\)".*"test":true},"features".*"executable":"\([^"]*\)".*/\1 \2 \3/p' target/test-artifacts |
        while read -r directory kind program; do
            package=$(basename "$directory")
            [ "$directory" != "$PWD" ] || package=deltapath
            case $package/$kind in
                # One API server serves all tests of these, in threads.
                gateway/test | earlier/test) echo "$package	$program	$directory	--test-threads=3" ;;
                */test)
                    # Tests that share what the manifests' checker prints.
                    shared='^(manifests|cluster_(classes|docs|faults|rbac|rules|scripts))::'
                    tests=$("$program" --list --format terse 2>/dev/null | sed -n 's/: test$//p')
                    if [ "$package" = deltapath ] && [ -z "${DELTAPATH_SHORT:-}" ]; then
                        echo "$package cluster and manifests	$program	$directory	--test-threads=2 manifests:: cluster_classes:: cluster_docs:: cluster_faults:: cluster_rbac:: cluster_rules:: cluster_scripts::"
                        tests=$(grep -vE "$shared" <<<"$tests")
                    fi
                    while read -r name; do
                        [ -z "$name" ] || echo "$package $name	$program	$directory	--exact $name"
                    done <<<"$tests"
                    ;;
                *) echo "$package $kind	$program	$directory	--test-threads=2" ;;
            esac
        done | grep -F -e "$filter" |
        awk -F '\t' '
            FILENAME != "-" { took[$2] = $1; share[$2] = $3 / $1; next }
            { print took[$1] + 0 "\t" (share[$1] > 0.3 ? "works" : "waits") "\t" $0 }' hack/test-times - |
        sort -t '	' -k 1,1rn
}

run_one() {
    local label program directory arguments limit=$LIMIT code=0 begun=${EPOCHREALTIME/./} log
    IFS='	' read -r _ _ label program directory arguments <<<"$1"
    # Many tests, each with a limit of its own.
    case $label in gateway | earlier) limit=$((3 * LIMIT)) ;; esac
    log=$(mktemp "$work/log-XXXXXX")
    local TIMEFORMAT='%U %S' processor
    { time {
        # shellcheck disable=SC2086 # several words
        (cd "$directory" && exec timeout --kill-after=5 "$limit" "$program" $arguments) >"$log" 2>&1 </dev/null || code=$?
    }; } 2>"$log.time"
    processor=$(awk '{ printf "%.0f", $1 + $2 }' "$log.time")
    local took=$(((${EPOCHREALTIME/./} - begun) / 100000)) counts word=ok
    counts=$(sed -n 's/^test result: .* \([0-9]*\) passed; \([0-9]*\) failed; \([0-9]*\) ignored.*/\1 \2 \3/p' "$log" | tail -n 1)
    case $code in
        0) [ -n "$counts" ] || { counts="0 1 0" word="FAILED: it ran no test" ; } ;;
        77) counts="0 0 1" word="left out: $(sed -n 's/^left out: //p' "$log" | head -n 1)" ;;
        124 | 137) counts="0 1 0" word="FAILED: ended after $limit s" ;;
        *) word="FAILED ($code)"
            case $counts in "" | *" 0 "*) counts="0 1 0" ;; esac ;;
    esac
    printf '%s.%s\t%s\t%s\n' $((took / 10)) $((took % 10)) "$label" "$processor" >>"$work/times"
    echo "$counts" >>"$work/counts"
    printf '%6s.%s s  %s  %s\n' $((took / 10)) $((took % 10)) "$label" "$word"
    case $word in FAILED*) { echo "---- $label: $word"; cat "$log"; } >>"$work/failures" ;; esac
}
export -f run_one

plan >"$work/plan"
[ -n "$filter" ] || while read -r pattern; do
    grep -qE -e "$pattern" "$work/plan" || { echo "run-tests: no test matches $pattern of hack/long-tests" >&2 && exit 2; }
done <<<"$patterns"
if [ -n "${DELTAPATH_SHORT:-}" ] && [ -z "$filter" ]; then
    long=${patterns//$'\n'/|}
    sed -nE "/$long/p" "$work/plan" | cut -f 3 | sed 's/.*/          &  left out: takes long/' | tee "$work/long"
    echo "0 0 $(wc -l <"$work/long")" >"$work/counts"
    sed -i -E "/$long/d" "$work/plan"
fi
[ -s "$work/plan" ] || { echo "run-tests: no test has ${filter@Q} in its name" >&2 && exit 2; }

# When one queue is empty, the other runs one more at once for each core: xargs does so for each SIGUSR1.
queue() { # works|waits AT_ONCE
    trap '' USR1 # It would end an xargs that has only begun.
    exec xargs -d '\n' -r -n 1 -P "$2" bash -c 'run_one "$@"' _ < <(grep -F "	$1	" "$work/plan")
}
cores=$(nproc)
trap 'kill ${works-} ${waits-} 2>/dev/null || true; rm -rf "$work"' EXIT
queue works "$cores" &
works=$!
queue waits $((jobs > cores ? jobs - cores : 1)) &
waits=$!
wait -n -p first "$works" "$waits"
other=$works
[ "$first" != "$works" ] || other=$waits
for ((i = 0; i < cores; i++)); do kill -USR1 "$other" 2>/dev/null || true; done
wait "$other"

sort -rn "$work/times" >target/test-times
[ ! -e "$work/failures" ] || cat "$work/failures"
awk -F '\t' '{ seconds += $1; processor += $3 } END { printf "tests: %d s, %d s of a processor, in %d processes\n", seconds, processor, NR }' target/test-times
if [ -e target/parts ]; then
    echo "before: $(paste -sd, target/parts | sed 's/,/, /g')"
    rm target/parts
fi
echo "build: $built s, tests: $((SECONDS - started - built)) s of clock"
awk '{ passed += $1; failed += $2; skipped += $3 } END {
    printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
    exit failed > 0
}' "$work/counts"
