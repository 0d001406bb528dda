#!/usr/bin/env bash
# Runs a part of `make test-all` and adds how long it took to target/parts: part.sh NAME COMMAND...
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?usage: part.sh NAME COMMAND...}
shift
"$@"
mkdir -p target
echo "$name: $SECONDS s" >>target/parts
