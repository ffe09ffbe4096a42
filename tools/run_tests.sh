#!/bin/sh
# Runs all tests: those with a real vLLM, and all others beside them, since each half keeps one core busy.
#
#     tools/run_tests.sh PYTHON
#
# The first half's output comes at the end. Exits 1 if either half failed.
set -u
cd "$(dirname "$0")/.."

python=$1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$python" -m pytest -p no:cacheprovider tests/e2e >"$log" 2>&1 &
with_vllm=$!
"$python" -m pytest tests/unit tests/cli tests/gpu
others=$?
wait "$with_vllm"
real=$?
cat "$log"
[ "$others" = 0 ] && [ "$real" = 0 ]
