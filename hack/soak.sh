#!/usr/bin/env bash
# Runs the soak for MINUTES on POOL (btrfs, xfs or dir), and installs fio where it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v fio >/dev/null; then
    if [ "$(id -u)" -ne 0 ]; then
        echo "soak: missing fio: run as root, or install it" >&2
        exit 1
    fi
    echo "soak: installing fio"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends "fio=3.33-*" >/dev/null
fi
exec hack/no-leaks.sh "${CARGO:-cargo}" bench --locked --bench soak
