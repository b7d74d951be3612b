#!/usr/bin/env bash
# Sets up and runs the tests, on CPU:   ./tests/run.sh [pytest arguments]
# On another torch, in an environment of its own:   PYTHON=ENV/bin/python ./tests/run.sh [pytest arguments]
#   made by: ENV/bin/pip install -r <(sed 's/^torch==.*/torch==2.11.0/' requirements.txt) -r tests/requirements.txt
# Only the linter, the formatter and the type checker:   ./tests/run.sh --lint
# The tests that notice most for their time:   ./tests/run.sh --quick
# The code for GPUs on a CUDA without one, in an environment of its own:   ./tests/run.sh --fake-cuda [pytest arguments]
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.." # -P: as --setup prints it, where a link leads here
if [[ ${1:-} == --fake-cuda ]]; then exec tests/fake_cuda/run.sh "${@:2}"; fi
unset PIP_TARGET PIP_PREFIX PIP_ROOT # as in run_train.sh
export PIP_USER=0

python=${PYTHON:-$(./run_train.sh --setup | tail -n 1)}
packages=$(cat tests/requirements.txt)
if [[ $python != "$PWD/.venv/"* ]]; then  # somebody's environment: nothing is installed there unasked
    lacking=$("$python" -c '
import importlib.metadata, re, shlex, sys
installed = {re.sub("[-_.]+", "-", d.metadata["Name"]).lower() for d in importlib.metadata.distributions()}
print(shlex.join(line for line in sys.argv[1].splitlines() if line.split("==")[0] not in installed))' "$packages")
    if [[ -n $lacking ]]; then
        echo "tests/run.sh: $python lacks packages; to install them there: $python -m pip install $lacking" >&2
        exit 2
    fi
    packages=
elif [[ $(cat .venv/.tests-made-from 2>/dev/null) == "$packages" ]]; then
    packages=
fi
if [[ -n $packages ]]; then
    "$python" -m pip install --quiet -r <(echo "$packages")
    echo "$packages" >.venv/.tests-made-from
fi
export PYTHON=$python
in_twos=(-n 2 --dist loadfile --no-loadscope-reorder) # two tests at a time: most wait for a process of theirs
if [[ ${1:-} == --quick ]]; then exec "$python" -m pytest "${in_twos[@]}" -m quick "${@:2}"; fi
if [[ $# == 0 || $1 == --lint ]]; then # not before a test that is named
    "$python" -m ruff check .
    "$python" -m ruff format --check --quiet . || { echo "not in the formatter's layout: $python -m ruff format ."; exit 1; }
    "$python" -m pyrefly check --summary=none --python-interpreter-path "$("$python" -c 'import sys; print(sys.executable)')"
fi
if [[ ${1:-} == --lint ]]; then exit; fi
exec "$python" -m pytest "${in_twos[@]}" "$@"
