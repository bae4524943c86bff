#!/usr/bin/env bash
# Runs the tests, after making the virtual environment they need.
#
#   bash tests/run.sh                     all; those in tests/gpu are skipped without a GPU
#   bash tests/run.sh --fast              pure functions, ranks as threads, and the rules of the code; no further processes
#   bash tests/run.sh [--fast] -k name    further arguments go to pytest
#
# From the environment: VENV and PYTHON, see examples/setup_env.sh.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
case $VENV in /*) ;; *) VENV=$PWD/$VENV ;; esac
VENV=$VENV bash "$ROOT/examples/setup_env.sh"

SELECTED=()
if [ "${1:-}" = --fast ]; then
    shift
    SELECTED=(tests/pure tests/ranks tests/test_architecture.py)
fi

cd "$ROOT"
exec "$VENV/bin/python" -m pytest ${SELECTED[@]+"${SELECTED[@]}"} "$@"  # the long form: bash 3 calls an empty array unset
