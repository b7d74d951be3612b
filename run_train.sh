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
#   ./run_train.sh CONFIG --dry-run [--world-size N[,N...]] [--gpu-memory-gib G] [--json]
#   ./run_train.sh CONFIG --eval-only
#   ./run_train.sh --setup                                the environment only; its Python is the last line
#   ./run_train.sh -m MODULE ...                          a tool, as model.generate, in that environment
#   sbatch --nodes=N --gpus-per-node=8 run_train.sh CONFIG ...
#
# PYTHON=... chooses the Python. Else the active one serves if its torch is supported and what the run needs is there;
# else .venv is made from requirements.txt, and made again when that file changes.
# MAX_RESTARTS=... is how often torchrun starts the processes again after a crash: 3 times under SLURM, else 0.
# Under SLURM environment and data are made before: ./run_train.sh --setup; ./run_train.sh -m data.prepare CONFIG
# A job takes whole nodes; a part of one: sbatch --oversubscribe --cpus-per-task=16 --gpus-per-node=2 ...
# It saves 300 seconds before its time limit (--signal=B:USR1@SECONDS: more where saving takes longer), and requeues
# itself. After scancel it saves too, if SLURM's KillWait (30 seconds unless set) leaves the time, and is not requeued.
set -euo pipefail

# First of all, since a signal without a handler ends this script.
asked="" launcher=""
# shellcheck disable=SC2317  # traps call it
pass_on() {  # TERM after USR1 counts as TERM: who cancels a job does not want it back
    asked=$1
    echo "run_train.sh: job $SLURM_JOB_ID: asked to stop by $1" >&2
    if [[ -n $launcher ]]; then kill -s "$1" "$launcher" 2>/dev/null || true; fi
}
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    trap 'pass_on USR1' USR1
    trap 'pass_on TERM' TERM INT
fi

fail() { echo "run_train.sh: $1" >&2; exit 2; }

repo=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)
# Under sbatch this file is a copy in a spool folder: the repository is where the job was submitted from.
[[ -f $repo/train.py ]] || repo=${SLURM_SUBMIT_DIR:-$repo}
[[ -f $repo/train.py ]] || fail "$repo: no train.py here; it must lie in the repository, and be submitted from there"

# We stay in the caller's folder, which relative paths are relative to, and import from the repository alone.
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

make_venv() {
    local venv=$repo/.venv wanted
    wanted=$(cksum <"$repo/requirements.txt")
    python=$venv/bin/python
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        [[ $(cat "$venv/.made-from" 2>/dev/null) == "$wanted" ]] ||
            fail "nothing is installed inside a job; run ./run_train.sh --setup on the login node"
        return
    fi
    exec 9>"$repo/.venv.lock"
    if command -v flock >/dev/null; then flock 9; fi
    if [[ $(cat "$venv/.made-from" 2>/dev/null) != "$wanted" ]]; then
        python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
            fail "needs python3 of version 3.10 or later with its venv module (Debian: apt install python3-venv)"
        echo "setting up $venv (once; torch is large)" >&2
        rm -rf "$venv"
        python3 -m venv "$venv"
        # torch first and by its exact version: asked for by another package, a range might take another build
        "$venv/bin/python" -m pip install --quiet "$(grep '^torch==' "$repo/requirements.txt")" >&2
        "$venv/bin/python" -m pip install --quiet -r "$repo/requirements.txt" >&2
        echo "$wanted" >"$venv/.made-from"
    fi
    exec 9>&-
}

choose_python() {  # with the run's arguments, or none for everything
    if [[ -n ${PYTHON:-} ]]; then
        python=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON: no such program"
    elif python=$(command -v python3) && "$python" -m lifecycle --usable "$@" 2>/dev/null; then :
    else make_venv; fi
}

for word in "$@"; do
    if [[ ${1:-} != -m && ($word == --help || $word == -h) ]]; then
        sed -n '/^# Sets up/,/^set /s/^# \{0,1\}//p' "$repo/run_train.sh"
        choose_python
        "$python" "$repo/train.py" --help
        exit
    fi
done
case ${1:-} in
--setup) choose_python; echo "$python"; exit ;;
-m) choose_python; exec "$python" "$@" ;;
"" | --*) set -- "$repo/configs/tiny.toml" "$@" ;;
esac
plan=
for word in "$@"; do if [[ $word == --dry-run ]]; then plan=yes; fi; done
if [[ -z $plan && -z ${SLURM_JOB_ID:-} ]]; then
    # until the launcher, which this process becomes, has handlers of its own
    trap 'echo "stopped before the run began" >&2; exit 75' TERM INT USR1
fi
choose_python "$@"
if [[ -n $plan ]]; then exec "$python" "$repo/train.py" "$@"; fi

gpus() {
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    elif command -v nvidia-smi >/dev/null; then nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
    else echo 0; fi
}

nproc=${NPROC:-${SLURM_GPUS_ON_NODE:-$(gpus)}}
[[ $nproc != 0 ]] || nproc=1  # no GPU
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "NPROC=$nproc: must be a number of processes"
nodes=${SLURM_NNODES:-1}

# The job's cores, not the machine's; without a job those that this process may use.
cores=${SLURM_CPUS_ON_NODE:-$(nproc 2>/dev/null || echo 1)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}

# Where a signal reaches torchrun itself, that of torch 2.12 and later waits so many seconds until it kills its
# processes. They may be saving, and its own 30 are short for that.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
# Else the processes that torchrun starts again find the addresses of those before them in its store, and cannot connect
# (github.com/pytorch/pytorch/issues/135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

restarts=${MAX_RESTARTS:-${SLURM_JOB_ID:+3}}
restarts=${restarts:-0}
[[ $restarts =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS=$restarts: must be a number"
torchrun=("$python" -m torch.distributed.run "--nproc-per-node=$nproc" "--max-restarts=$restarts")
if [[ -n ${SLURM_JOB_ID:-} ]]; then
    # scancel sends TERM to every process of the job. The ranks save and end by themselves, and torchrun after them;
    # did it listen too, it would end as a failure, with a traceback on each node.
    # shellcheck disable=SC2016
    torchrun=(bash -c 'trap "" TERM; exec "$@"' bash "${torchrun[@]}" "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
else
    torchrun+=("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")  # USR1 would end it, and its ranks, at once
fi
if ((nodes > 1)); then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    head=${hosts%%$'\n'*}
    # srun of SLURM 22.05 and later takes these over from sbatch by this name alone.
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
    # One task per node with all cores of the job there: torchrun and its processes share them. No --mpi: they find each
    # other by torchrun's rendezvous, with an id of its own for each restart: a late process of the last life must not
    # join this one.
    command=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --export=ALL --cpu-bind=none
        --mpi=none --kill-on-bad-exit=1 "${torchrun[@]}" "--nnodes=$nodes"
        --rdzv-backend=c10d "--rdzv-endpoint=$head:$((29500 + SLURM_JOB_ID % 1000))"
        "--rdzv-id=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" "$repo/train.py")
elif ((nproc > 1 || restarts > 0)); then
    command=("${torchrun[@]}" --standalone "$repo/train.py")
else
    command=("$python" "$repo/train.py")
fi
launch=("$((nodes * nproc))" "$nproc" "${command[@]}" -- "$@")
if [[ -z ${SLURM_JOB_ID:-} ]]; then exec "$python" -m lifecycle "${launch[@]}"; fi

# In a job this script stays, to pass signals on and to requeue.
say() { echo "run_train.sh: job $SLURM_JOB_ID: $1" >&2; }
code=75  # of a job that is asked to stop before there is anything to stop
if [[ -z $asked ]]; then
    "$python" -m lifecycle --in-job "${launch[@]}" &
    launcher=$!
    code=0
    # A signal interrupts `wait`, while the launcher that it was passed on to is still saving. It is passed on twice:
    # one that comes before bash's fork has become the launcher, or before we know its number, is lost.
    while kill -0 "$launcher" 2>/dev/null; do
        if [[ -z $asked ]]; then wait "$launcher" || true; fi
        if [[ -n $asked ]]; then
            sleep 0.5
            kill -s "$asked" "$launcher" 2>/dev/null || true
            while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" || true; done
        fi
    done
    wait "$launcher" || code=$?  # the shell has kept it
fi
# 75: stopped after saving. 128 + 10 or 15: the signal came before the launcher could handle it, and so before the run.
if [[ -n $asked && $code =~ ^(138|143)$ ]]; then code=75; fi
if [[ $code == 75 ]]; then
    why=
    if [[ $asked == USR1 ]]; then why="ahead of its time limit"; fi
    # Preempted in a partition with a GraceTime: TERM went to the ranks and not to this script. SLURM requeues the job
    # when the grace is over, but not one that has ended by then.
    if [[ -z $asked && $(scontrol show job "$SLURM_JOB_ID") == *PreemptTime=[0-9]* ]]; then why="being preempted"; fi
    if [[ -n $why ]]; then
        say "stopped, $why; requeueing it, to go on where it stopped"
        scontrol requeue "$SLURM_JOB_ID" || say "it could not be requeued; submit it again to go on"
    else
        say "stopped; it does not requeue itself: unless SLURM does, submit it again to go on"
    fi
fi
exit "$code"
