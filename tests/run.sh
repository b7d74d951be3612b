#!/usr/bin/env bash
# Sets up and runs the tests, on CPU:   ./tests/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-$(./run_train.sh --setup | tail -n 1)}
wanted=$(cksum <tests/requirements.txt)
marker=.venv/.tests-made-from
if [[ $(cat $marker 2>/dev/null) != "$wanted" ]]; then
    "$python" -m pip install --quiet -r tests/requirements.txt
    if [[ $python == "$PWD/.venv/"* ]]; then echo "$wanted" >$marker; fi
fi
"$python" -m ruff check .
# two tests at a time: most wait for a process of theirs
PYTHON=$python exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
