#!/bin/sh
# Runs all tests in two halves at the same time, since each keeps one core busy: those that run vLLM in the test's own
# process, and all others.
#
#     tools/run_tests.sh PYTHON
#
# The first half's output comes at the end. Exits 1 if either half failed.
set -u
cd "$(dirname "$0")/.."

python=$1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
in_process=$(grep -l 'import.* engine\b\|^    engine,$' tests/e2e/test_*.py)
# shellcheck disable=SC2086 # file names without spaces
"$python" -m pytest -p no:cacheprovider $in_process >"$log" 2>&1 &
first=$!
# shellcheck disable=SC2086
"$python" -m pytest tests $(printf ' --ignore=%s' $in_process)
others=$?
wait "$first"
in_process_status=$?
cat "$log"
[ "$others" = 0 ] && [ "$in_process_status" = 0 ]
