#!/usr/bin/env bash
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --exclusive
#SBATCH --ntasks-per-node=1
# Sets up on first use, prepares the data, trains: on a laptop, a node with GPUs, or many nodes under SLURM.
#
#   ./run_train.sh [CONFIG] [--section.key=value ...]     default CONFIG: configs/tiny.toml
#   NPROC=2 ./run_train.sh ...                            processes on this machine; default: its GPUs, else 1
#   ./run_train.sh CONFIG --dry-run [--world-size N[,N...]] [--gpu NAME] [--gpu-memory-gib G] [--gpus-per-node N]
#                                   [--plot FILE.svg] [--json] [--config]
#   ./run_train.sh CONFIG --eval-only
#   ./run_train.sh --setup                                the environment only; its Python is the last line
#   ./run_train.sh -m TOOL ...                            a tool, as generate, in that environment
#   ./run_train.sh --help [SECTION or OPTION]             with the tools' names
#   sbatch --nodes=N --gpus-per-node=8 run_train.sh CONFIG ...
#
# PYTHON=... chooses the Python. Else the active one serves if its torch is supported and requirements.txt is there; else
# .venv is made from requirements.txt, and made again when that file changes.
# MAX_RESTARTS=... is how often the processes are started again after a failure: 3 times under SLURM, else 0.
# Under SLURM environment and data are made before: ./run_train.sh --setup; ./run_train.sh -m data.prepare CONFIG
# A job takes whole nodes; a part of one: sbatch --oversubscribe --cpus-per-task=16 --gpus-per-node=2 ...
# It saves 300 seconds before its time limit (--signal=B:USR1@SECONDS: more where saving takes longer), and requeues
# itself. After scancel it saves too, if SLURM's KillWait (30 seconds unless set) leaves the time, and is not requeued.
if [ -z "${BASH_VERSION:-}" ]; then exec bash "$0" "$@"; fi # of `sh run_train.sh`, where sh is another shell
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

# The first Python that can make an environment: python3, else one that is called by its version.
base_python() {
    local name
    for name in python3 python3.{14,13,12,11,10}; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    return 1
}

make_venv() {
    local venv=$repo/.venv wanted base quiet=(--quiet)
    wanted=$(cksum <"$repo/requirements.txt")
    python=$venv/bin/python
    if [[ $(cat "$venv/.made-from" 2>/dev/null) == "$wanted" ]]; then return; fi
    [[ -z ${SLURM_JOB_ID:-} ]] || fail "nothing is installed inside a job; run ./run_train.sh --setup on the login node"
    [[ -w $repo ]] ||
        fail "$repo: cannot be written to, where .venv would be made; PYTHON=/path/to/python names another Python"
    exec 9>"$repo/.venv.lock"
    if command -v flock >/dev/null; then flock 9; fi
    if [[ $(cat "$venv/.made-from" 2>/dev/null) != "$wanted" ]]; then
        base=$(base_python) ||
            fail "needs python3 of version 3.10 or later with its venv module (Debian: apt install python3-venv)"
        echo "setting up $venv (once; one to five minutes, most of them for torch)" >&2
        if [[ -t 2 ]]; then quiet=(); fi  # pip shows its progress
        rm -rf "$venv"
        "$base" -m venv "$venv"
        # torch first, at its exact version: a range that another package requires might select another build
        "$venv/bin/python" -m pip install ${quiet[@]+"${quiet[@]}"} "$(grep '^torch==' "$repo/requirements.txt")" >&2 ||
            fail "torch could not be installed on $(uname -sm), see above; PYTHON=/path/to/python names a Python that has it"
        "$venv/bin/python" -m pip install ${quiet[@]+"${quiet[@]}"} -r "$repo/requirements.txt" >&2
        echo "$wanted" >"$venv/.made-from"
    fi
    exec 9>&-
}

# Which packages a Python lacks.
list_missing='import sys, importlib.metadata as packages
missing = []
for name in sys.argv[1:]:
    try:
        packages.version(name)
    except packages.PackageNotFoundError:
        missing.append(name)
print(*missing, sep=", ")
sys.exit(bool(missing) or sys.version_info < (3, 10))'
has_supported_torch='import sys, importlib.metadata as packages
sys.exit(not (2, 11) <= tuple(map(int, packages.version("torch").split(".")[:2])) <= (2, 15))'

choose_python() {
    local missing required
    if [[ -n ${PYTHON:-} ]]; then
        python=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON: no such program"
        missing=$("$python" -c "$list_missing" torch numpy filelock tomli 2>/dev/null) ||
            fail "PYTHON=$PYTHON: lacks ${missing:-Python 3.10 or later}; without PYTHON=, .venv is made"
        return
    fi
    required=$(sed 's/[#;= ].*//' "$repo/requirements.txt")
    # shellcheck disable=SC2086  # a word for each package
    if python=$(command -v python3) && "$python" -c "$has_supported_torch" 2>/dev/null &&
        "$python" -c "$list_missing" $required >/dev/null 2>&1; then return; fi
    make_venv
}

# A tool of extras/ has a short name: huggingface is extras.huggingface, report is extras.reports.report, and so is
# data.make_chat extras.chat.make_chat.
module_of() {
    local name=$1 path=${1//.//} file
    for file in "$repo/$path"{.py,/__main__.py} "$repo/extras/$path"{.py,/__main__.py} \
        "$repo"/extras/*/"${path#data/}.py"; do
        if [[ -e $file ]]; then
            file=${file#"$repo"/}
            file=${file%.py}
            file=${file%/__main__}
            echo "${file//\//.}"
            return
        fi
    done
    echo "$name"  # of a package
}

list_tools() {  # the name of each, and the first sentence of its file
    local file name sentence
    printf '\nTools, of which -m NAME --help says more:\n'
    for file in "$repo"/*.py "$repo"/{checkpoint,data}/*.py "$repo"/extras/*/*.py; do
        grep -qs '^    \(config\.\)\{0,1\}run_tool(main)' "$file" || continue
        name=${file#"$repo"/}
        case $name in
        */__main__.py) name=${name%/__main__.py} name=${name#extras/} ;;
        *) if [[ -e ${file%/*}/__main__.py ]]; then continue; fi ;;  # a part of that tool
        esac
        case $name in extras/*) name=${name##*/} ;; esac
        name=${name%.py}
        sentence=$(sed -n '1{N;N;s/\n/ /g;s/^"""//;s/""".*//;s/\. .*//;p;q;}' "$file")
        printf '  %-14s %s\n' "${name//\//.}" "$sentence"
    done
    echo
}

case ${1:-} in
--setup) choose_python; echo "$python"; exit ;;
-m)
    [[ -n ${2:-} ]] || fail "-m needs the name of a tool"
    choose_python
    exec "$python" -c "$module" "$repo" "$(module_of "$2")" "${@:3}"
    ;;
"" | --*) set -- "$repo/configs/tiny.toml" "$@" ;;
esac
help='' plan=''
for word in "$@"; do case $word in --help | -h) help=yes ;; --dry-run) plan=yes ;; esac; done
case ${!#} in  # the last word: else it is the section that --help is asked for
--help | -h)
    sed -n '/^# Sets up/,/^set /s/^# \{0,1\}//p' "$repo/run_train.sh" || true  # a closed pipe (| head) is no error
    (list_tools) || true
    ;;
esac
choose_python
if [[ -n $help ]]; then exec "$python" "$repo/train.py" "$@"; fi
if [[ -n $plan ]]; then
    [[ -e $repo/tools/planner ]] || fail "--dry-run: needs tools/planner, which this copy does not have"
    exec "$python" -c "$module" "$repo" tools.planner "$@"
fi
# Open stdout and stderr on /dev/null if a daemon closed them: ranks could not redirect them to their logs.
{ : 3>&2; } || exec 2>/dev/null
{ : 3>&1; } 2>/dev/null || exec >/dev/null
# Block the signals until the launcher has its handlers. (This needs env of coreutils 8.31 or later.)
blocked=(env --block-signal=TERM,INT,HUP,USR1,USR2)
"${blocked[@]}" true 2>/dev/null || blocked=()
exec ${blocked[@]+"${blocked[@]}"} "$python" -c "$module" "$repo" run.launch "$@"
