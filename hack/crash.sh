#!/usr/bin/env bash
# Kills the driver ROUNDS times at random moments, as many times before chosen steps, and fails every step once:
# hack/crash.sh ROUNDS. The last line says what it came to; it fails where anything was lost or leaked.
set -euo pipefail
cd "$(dirname "$0")/.."

rounds=${1:?usage: hack/crash.sh ROUNDS}
a_pool=$(((rounds + 2) / 3))
log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
DELTAPATH_CRASH_ROUNDS=$a_pool DELTAPATH_POINT_ROUNDS=$a_pool hack/no-leaks.sh \
    "${CARGO:-cargo}" test --locked --features failpoints --test suite -- crash:: --nocapture 2>&1 |
    tee "$log" | grep -aE '^(crash:|test |error|failures:)|panicked|left behind' || status=$?
# Each test prints its figures in a line `crash: kind=... rounds=... losses=...`.
awk -v failed="$status" '
    /^crash: kind=/ {
        for (field = 2; field <= NF; field++) { split($field, pair, "="); sum[pair[1]] += pair[2] }
    }
    END {
        printf "%d rounds, %d cut a call, %d points, %d losses, %d leaks\n",
            sum["rounds"], sum["cut"], sum["points"], sum["losses"], sum["leaks"]
        exit failed || sum["rounds"] == 0 || sum["points"] == 0 || sum["losses"] > 0 || sum["leaks"] > 0
    }' "$log"
