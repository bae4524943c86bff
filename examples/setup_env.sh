#!/usr/bin/env bash
# Makes the virtual environment that examples/quickstart.sh and tests/run.sh use, unless it is there and up to date.
#
#   bash examples/setup_env.sh
#
# Needs Python 3.11 or newer with pip, and bash. From the environment:
#   VENV     where to make it (default: .venv in the repository)
#   PYTHON   the Python to make it with (default: the first of python3, python3.14 ... python3.11, python that is new enough)
# pip takes its own settings from the environment as ever, for example which index to install from.
set -euo pipefail

# --help prints the lines above, before anything is made.
case " $* " in *" --help "* | *" -h "*)
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit ;;
esac

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-$ROOT/.venv}
STAMP=$VENV/installed_from.txt  # written last, so an interrupted installation is done again

fail() {
    echo "setup_env: $*" >&2
    exit 1
}

[ $# = 0 ] || fail "it takes no arguments, and was given: $*"

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate found=""
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
        found="$found${found:+, }$candidate $("$candidate" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo "(does not run)")"
    done
    fail "Python 3.11 or newer is needed; tried: $found. Install one, or give its path as PYTHON=..."
}

# The same text means the same installation: what is asked for, where the code lies, and with which Python.
wanted() {
    cat "$ROOT/setup.py" "$ROOT/constraints.txt"
    echo "$ROOT"
    "$VENV/bin/python" --version
}

make_venv() {
    local python
    python=$(find_python)
    if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ]; then
        fail "$VENV exists and is not a virtual environment; remove it, or give another folder as VENV=..."
    fi
    "$python" -c 'import venv' 2>/dev/null ||
        fail "this Python has no module venv; install it (on Debian and Ubuntu: apt install python3-venv), or give another Python as PYTHON=..."
    echo "making a virtual environment in $VENV with $("$python" --version)"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv --clear "$VENV" || fail "python -m venv failed; the reason is above"
    else  # Debian keeps ensurepip in a package of its own; the pip that is there can put one into the new environment
        "$python" -m venv --clear --without-pip "$VENV" || fail "python -m venv failed; the reason is above"
        "$python" -m pip --python "$VENV/bin/python" install --quiet pip ||
            fail "pip cannot be put into $VENV; install the module ensurepip (on Debian and Ubuntu: apt install python3-venv)"
    fi
}

if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    make_venv
elif ! is_new_enough "$VENV/bin/python"; then
    fail "$VENV has $("$VENV/bin/python" --version), Python 3.11 or newer is needed; remove it, or give another folder as VENV=..."
fi

if [ "$(cat "$STAMP" 2>/dev/null)" != "$(wanted)" ]; then
    echo "installing into $VENV (PyTorch is large: this may take some minutes)"
    # pytest comes with it, so that one environment serves training and tests; code is used in place (-e).
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c "$ROOT/constraints.txt" -e "$ROOT[test]" || fail "pip could not install the packages; its reason is above"
    wanted >"$STAMP"
    echo "installed"
fi
