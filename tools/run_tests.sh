#!/bin/sh
# Runs all tests in two halves at the same time, since each keeps one core busy.
#
#     tools/run_tests.sh PYTHON
#
# The first half: tests that run vLLM in the test's own process, and those that start servers for themselves. Its output
# comes at the end. Exits 1 if either half failed.
set -u
cd "$(dirname "$0")/.."

python=$1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
in_process=$(grep -l 'import.* engine\b\|^    engine,$' tests/e2e/test_*.py)
slowest="--durations=12 --durations-min=5"
first_half="$in_process tests/e2e/test_bench.py tests/e2e/test_demo.py tests/e2e/test_server_end.py"
# shellcheck disable=SC2086 # file names without spaces
"$python" -m pytest $slowest -p no:cacheprovider $first_half >"$log" 2>&1 &
first=$!
# shellcheck disable=SC2086
"$python" -m pytest $slowest tests $(printf ' --ignore=%s' $first_half)
others=$?
wait "$first"
first_status=$?
cat "$log"
[ "$others" = 0 ] && [ "$first_status" = 0 ]
