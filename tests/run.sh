#!/usr/bin/env bash
# Runs the tests, after making the virtual environment they need.
#
#   bash tests/run.sh                     all; those in tests/gpu are skipped without a GPU
#   bash tests/run.sh --fast              pure functions, a covering set of layouts with ranks as threads, the rules of the code
#   bash tests/run.sh [--fast] -k name    further arguments go to pytest
# Left out for time, as tests/fast_set.py lists: most cases of what has many, which
#   .venv/bin/python -m pytest -n auto -m sweep tests/unit tests/ranks tests/promises tests/test_architecture.py
# runs, and layouts over processes, which -m full tests/processes runs.
#
# From the environment: VENV and PYTHON, see examples/setup_env.sh.
set -euo pipefail

# --help prints the lines above, before anything is made.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit ;;
esac

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
VENV=$VENV bash "$ROOT/examples/setup_env.sh"

FAST=
if [ "${1:-}" = --fast ]; then
    shift
    FAST=yes
fi
cd "$ROOT"

# Dozens of processes import the same files: one compiles them for all, even where keeping that is switched off.
unset PYTHONDONTWRITEBYTECODE

CORES=$(getconf _NPROCESSORS_ONLN)

# The installation is no part of the time that is printed.
SECONDS=0
OF_PROCESSES=
LOG=
end() {
    [ -z "$OF_PROCESSES" ] || kill -- "-$OF_PROCESSES" 2>/dev/null || true
    [ -z "$LOG" ] || { cat "$LOG" && rm -f "$LOG"; }
    echo "tests took $((SECONDS / 60)) min $((SECONDS % 60)) s"
}
trap end EXIT

# pytest's 5 says that a selection (-k) left nothing to run, which is no failure of one half.
tests() {
    "$VENV/bin/python" -m pytest "$@" || [ $? = 5 ]
}

# In $1 processes, each with files of its own at first, so that what a file computes once is computed once.
threads() {
    tests -n "$1" --dist worksteal -m "$2" tests/unit tests/ranks tests/promises tests/test_architecture.py "${@:3}"
}

if [ -n "$FAST" ]; then
    threads "$CORES" "not full and not sweep" "$@"
    exit
fi

# What starts processes of its own waits for them a lot, and so runs beside the others: a file at a time, or two where there are more than two cores.
# Its output comes when both have ended, or are stopped. In a process group of its own it hears of signals as at a terminal: a background command would ignore SIGINT, and so would what it starts.
LOG=$(mktemp)
FILES=$((CORES > 2 ? 2 : 1))
set -m
tests -n "$FILES" --dist loadfile -m "not full" tests/processes tests/gpu "$@" >"$LOG" 2>&1 &
OF_PROCESSES=$!
set +m
FAILED=
# One more than there are cores, since the longer tests wait a tenth of their time.
threads $((CORES + 1)) "not sweep" "$@" || FAILED=yes
wait "$OF_PROCESSES" || FAILED=yes
OF_PROCESSES=
[ -z "$FAILED" ]
