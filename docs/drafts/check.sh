#!/bin/bash
# The GPU checks of into-pytorch/02; from the repository root of the tree.
# CHECK_S: seconds at most (150). N: processes (8). K: only tests of that name.
LOG=${OUT:-.}/p2-check.log
T0=$(date +%s)
PYTHONUNBUFFERED=1 timeout -k 5 "${CHECK_S:-150}" python3 -m pytest -q -p no:cacheprovider \
    --page into-pytorch/02-testing -n "${N:-8}" --dist loadscope \
    --tb=short --durations=6 ${K:+-k "$K"} > "$LOG" 2>&1
RC=$?
echo "rc $RC after $(( $(date +%s) - T0 )) s (124: time was up)"
# A line for each test that failed, then the end of some of the errors.
grep -aE "^(FAILED|ERROR) " "$LOG" | sed 's/tests\/test_conformance.py:://; s/into-pytorch\/02-testing://' | cut -c1-260 | head -40
echo "--- errors, each kind once"
grep -aE "^E  " "$LOG" | cut -c1-200 | sort | uniq -c | sort -rn | head -25
echo "--- where"
grep -aE "^(tutorials|tests)/[^ ]+:[0-9]+: in " "$LOG" | sort | uniq -c | sort -rn | head -12
grep -aE "s (call|setup) " "$LOG" | head -6 | cut -c1-160
tail -n 3 "$LOG" | cut -c1-300
[ $RC = 124 ] && grep -aoE "\[ *[0-9]+%\]" "$LOG" | tail -1
exit 0
