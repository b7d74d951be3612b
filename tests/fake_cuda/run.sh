#!/usr/bin/env bash
# The tests on the fake CUDA (README.md):   ./tests/run.sh --fake-cuda [--quick] [pytest arguments]
#   TORCH=2.14.1 ./tests/run.sh --fake-cuda        with another torch than that of requirements.txt
#   PYTHON=... ./tests/run.sh --fake-cuda          with the torch of this Python, whose packages stay as they are
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
unset PIP_TARGET PIP_PREFIX PIP_ROOT # as in run_train.sh
export PIP_USER=0
fail() { echo "tests/run.sh --fake-cuda: $1" >&2; exit 2; }

[[ $(uname -sm) == "Linux x86_64" ]] || fail "needs Linux on x86_64, not $(uname -sm): the fake takes torch's CUDA wheel"
command -v gcc >/dev/null || fail "no gcc here: the fake is C, as what Triton compiles (Debian: apt install gcc libc6-dev)"
python=${PYTHON:-}
if [[ -z $python ]]; then
    venv=.venv-fake-cuda
    python=$venv/bin/python
    torch=torch==${TORCH:-$(sed -n 's/^torch==//p' requirements.txt)}
    others=$(grep -hv '^torch==' requirements.txt; grep -h '^pytest' tests/requirements.txt)
    if [[ $(cat $venv/.made-from 2>/dev/null) != "$torch"$'\n'"$others" ]]; then
        echo "setting up $venv with $torch (once; 5 GB)" >&2
        rm -rf $venv
        python3 -m venv $venv
        "$python" -m pip install --quiet "$torch" || fail "$torch could not be installed, see above"
        "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
            fail "pip took a build of torch for CPUs, from an index or links of its configuration (pip config list);
without that: PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= ./tests/run.sh --fake-cuda"
        "$python" -m pip install --quiet -r <(echo "$others")
        echo "$torch"$'\n'"$others" >$venv/.made-from
    fi
fi
"$python" -m tests.fake_cuda.build >&2
if [[ ${1:-} == --quick ]]; then set -- -m quick "${@:2}"; fi
workers=(-n 2 --dist load)
"$python" -c 'import xdist' 2>/dev/null || workers=() # somebody's Python may lack it
# testpaths: a file or a test that is named runs alone
exec "$python" -m pytest ${workers[@]+"${workers[@]}"} -m "not full" -o testpaths=tests/fake_cuda "$@"
