#!/usr/bin/env bash
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
# Sets up on first use, prepares the data, trains: on a laptop, a node with GPUs, or many nodes under SLURM.
#
#   ./run_train.sh [CONFIG] [--section.key=value ...]     CONFIG: a file, or a name in configs/; tiny unless given
#   NPROC=2 ./run_train.sh ...                            processes on this machine; default: its GPUs, else 1
#   ./run_train.sh CONFIG --dry-run [--world-size N[,N...]] [--gpu NAME] [--gpu-memory-gib G] [--gpus-per-node N]
#                                   [--plot FILE.svg] [--json] [--config]
#   ./run_train.sh CONFIG --eval-only
#   ./run_train.sh --setup                                the environment only; its Python is the last line
#   ./run_train.sh -m TOOL ...                            a tool, such as generate, in that environment
#   ./run_train.sh --help [WORD]                          all options and tools, or options of a section or word
#   sbatch --nodes=N --gpus-per-node=8 run_train.sh CONFIG ...
#
# PYTHON=... chooses the Python. By default it is the active one, if it has a supported torch and the packages of
# requirements.txt. Else uv, or pip, installs requirements.txt into .venv, and again when that file changes.
# MAX_RESTARTS=... is how often the processes are restarted after a failure: by default 3 times under SLURM, else 0.
# Under SLURM, prepare environment and data first: ./run_train.sh --setup; ./run_train.sh -m prepare CONFIG
# A job takes whole nodes. For a part of one: sbatch --oversubscribe --cpus-per-task=16 --gpus-per-node=2 ...
# It saves 300 seconds before its time limit and requeues itself. If saving takes longer: --signal=B:USR1@SECONDS.
# After scancel it also saves, if SLURM's KillWait (30 seconds by default) leaves enough time, but is not requeued.
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # `sh run_train.sh`, where sh is not bash
set -euo pipefail

# Valid until exec replaces this process by the launcher, which has its own handlers. SLURM signals the batch script.
trap 'echo "stopped before the run began" >&2; exit 75' TERM INT HUP USR1 USR2
fail() { echo "run_train.sh: $1" >&2; exit 2; }

repo=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)
# sbatch runs a copy of this file from a spool folder: the repository is where the job was submitted from.
[[ -f $repo/train.py ]] || repo=${SLURM_SUBMIT_DIR:-$repo}
[[ -f $repo/train.py ]] || fail "$repo: no train.py here; it must lie in the repository, and be submitted from there"

# Stay in the caller's folder, which relative paths refer to, but import modules from the repository. With `-c` Python
# 3.10 has the caller's folder in sys.path, as "". (PYTHONPATH would split the repository's path at a colon.)
module='import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; import runpy; del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)'
case ${PYTHONOPTIMIZE:-} in [2-9]*) export PYTHONOPTIMIZE=1 ;; esac # 2 would remove the help texts, too
unset PIP_TARGET PIP_PREFIX PIP_ROOT # with these, as with PIP_USER=1, .venv's packages would be installed elsewhere
export PIP_USER=0

# Prints the first Python that can make an environment: python3, or one with its version in the name.
base_python() {
    local name
    for name in python3 python3.{14,13,12,11,10}; do
        "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$name" && return
    done
    return 1
}

# Installs packages into .venv with uv. pip does it if uv fails, or if pip's configuration, which uv does not read, names
# an index, a proxy or certificates.
install() {
    if command -v uv >/dev/null && ! [[ $pip_settings =~ index|find-links|constraint|cert|proxy|trusted ]]; then
        (cd "$repo" && uv pip install ${PIP_QUIET:+--quiet} --python "$python" "$@") >&2 && return
    fi
    "$python" -m pip install "$@" >&2
}

make_venv() {
    local venv=$repo/.venv wanted base pip_settings
    wanted=$(cksum <"$repo/requirements.txt")
    python=$venv/bin/python
    if [[ $(cat "$venv/.made-from" 2>/dev/null) == "$wanted" ]]; then return; fi
    [[ -z ${SLURM_JOB_ID:-} ]] || fail "nothing is installed inside a job; run $repo/run_train.sh --setup on the login node"
    [[ -w $repo ]] || fail "$repo: cannot be written to, for .venv; PYTHON=/path/to/python names another Python"
    exec 9>"$repo/.venv.lock"
    if command -v flock >/dev/null; then flock 9; fi
    if [[ $(cat "$venv/.made-from" 2>/dev/null) != "$wanted" ]]; then
        [[ ! -e $venv && ! -L $venv ]] || [[ -e $venv/.made-from && ! -L $venv ]] ||
            fail "$venv is a link, or was not made by this script: move it away, or name its Python: PYTHON=$venv/bin/python"
        base=$(base_python) || command -v uv >/dev/null ||
            fail "needs uv, or python3 of version 3.10 or later with its venv module (Debian: apt install python3-venv)"
        echo "setting up $venv (once; one to five minutes, most of them for torch)" >&2
        [[ -t 2 ]] || export PIP_QUIET=1 # else pip shows its progress
        rm -rf "$venv"
        mkdir "$venv"
        echo unfinished >"$venv/.made-from"
        if [[ -n $base ]]; then
            "$base" -m venv "$venv"
        else
            uv venv --seed --allow-existing --python '>=3.10' "$venv" >&2
        fi
        pip_settings=$("$python" -m pip config list)
        # torch first, at its exact version: a range that another package requires might select another build
        install "$(grep '^torch==' "$repo/requirements.txt")" ||
            fail "torch could not be installed on $(uname -sm), see above; PYTHON=/path/to/python names a Python that has it"
        install -r "$repo/requirements.txt"
        echo "$wanted" >"$venv/.made-from"
    fi
    exec 9>&-
}

# Fails unless a Python is new enough and has these packages.
has_packages='import sys, importlib.metadata as packages
assert sys.version_info >= (3, 10), "needs Python 3.10 or later"
versions = [packages.version(name) for name in sys.argv[1:]]'
has_supported_torch="$has_packages
assert (2, 11) <= tuple(map(int, versions[0].split('.')[:2])) <= (2, 15)"

choose_python() {
    local problem required
    if [[ -n ${PYTHON:-} ]]; then
        python=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON: no such program"
        problem=$("$python" -c "$has_packages" torch numpy filelock tomli 2>&1) ||
            fail "PYTHON=$PYTHON: ${problem##*: }; without PYTHON=, .venv is made"
        return
    fi
    required=$(sed 's/[#;= ].*//' "$repo/requirements.txt")
    # shellcheck disable=SC2086  # a word for each package
    { python=$(command -v python3) && "$python" -c "$has_supported_torch" torch $required 2>/dev/null; } || make_venv
}

# Starts a tool by its short name, or any module. Without tools/ only modules can be started.
hand_over() {
    [[ $# -gt 0 ]] || fail "-m needs the name of a tool"
    choose_python
    if [[ -e $repo/tools/__main__.py ]]; then set -- tools "$@"; fi
    exec "$python" -c "$module" "$repo" "$@"
}

case ${1:-} in
--setup) choose_python; echo "$python"; exit ;;
-m) hand_over "${@:2}" ;;
"" | --*) set -- "$repo/configs/tiny.toml" "$@" ;;
esac
for word in "$@"; do
    case $word in
    --help | -h | --help=*)
        if [[ ${!#} == -* && ${!#} != --help=* ]]; then # else the last word is the section or the option that is asked for
            sed -n '/^# Sets up/,/^set /s/^# \{0,1\}//p' "$repo/run_train.sh" || true # a closed pipe is no error
            if [[ -e $repo/tools/__main__.py ]]; then (hand_over tools) || true; fi
        fi
        hand_over train "$@"
        ;;
    --dry-run)
        [[ -e $repo/tools/planner ]] || fail "--dry-run: needs tools/planner, which this copy does not have"
        hand_over planner "$@"
        ;;
    esac
done
choose_python
# Open stdout and stderr on /dev/null if a daemon closed them: ranks could not redirect them to their logs.
{ : 3>&2; } || exec 2>/dev/null
{ : 3>&1; } 2>/dev/null || exec >/dev/null
# Block the signals until Python is ready for them. (This needs env of coreutils 8.31 or later.)
blocked=(env --block-signal=TERM,INT,HUP,USR1,USR2)
"${blocked[@]}" true 2>/dev/null || blocked=()
exec ${blocked[@]+"${blocked[@]}"} "$python" -c "$module" "$repo" launch.launch "$@"
