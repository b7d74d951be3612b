#!/usr/bin/env bash
#SBATCH --requeue
#SBATCH --open-mode=append
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
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Under sbatch this file is a copy in a spool folder: the repository is where the job was submitted from.
[[ -f $repo/train.py ]] || repo=${SLURM_SUBMIT_DIR:?run_train.sh must lie in the repository}
[[ -f $repo/train.py ]] || { echo "$repo: no train.py here; submit from the repository's folder" >&2; exit 2; }

# We stay in the caller's folder, which relative paths are relative to, and import from the repository alone.
export PYTHONPATH="$repo${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

fail() { echo "run_train.sh: $1" >&2; exit 2; }

make_venv() {
    local venv=$repo/.venv wanted
    wanted=$(cksum <"$repo/requirements.txt")
    exec 9>"$repo/.venv.lock"
    if command -v flock >/dev/null; then flock 9; fi
    if [[ $(cat "$venv/.made-from" 2>/dev/null) != "$wanted" ]]; then
        [[ -z ${SLURM_JOB_ID:-} ]] || fail "nothing is installed inside a job; run ./run_train.sh --setup on the login node"
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
    python=$venv/bin/python
}

choose_python() {  # with the run's arguments, or none for everything
    if [[ -n ${PYTHON:-} ]]; then
        python=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON: no such program"
    elif python=$(command -v python3) && "$python" -m lifecycle --usable "$@" 2>/dev/null; then :
    else make_venv; fi
}

for word in "$@"; do
    [[ $word == --help || $word == -h ]] && [[ ${1:-} != -m ]] || continue
    sed -n '5,17s/^# \{0,1\}//p' "$repo/run_train.sh"
    choose_python
    exec "$python" "$repo/train.py" --help
done
case ${1:-} in
--setup) choose_python; echo "$python"; exit ;;
-m) choose_python; exec "$python" "$@" ;;
"" | --*) set -- "$repo/configs/tiny.toml" "$@" ;;
esac
choose_python "$@"

for word in "$@"; do
    if [[ $word == --dry-run ]]; then exec "$python" "$repo/train.py" "$@"; fi
done

gpus() {
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    elif command -v nvidia-smi >/dev/null; then nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
    else echo 0; fi
}

nproc=${NPROC:-${SLURM_GPUS_ON_NODE:-$(gpus)}}
[[ $nproc != 0 ]] || nproc=1  # no GPU
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "NPROC=$nproc: must be a number of processes"
nodes=${SLURM_NNODES:-1}

cores=$(nproc 2>/dev/null || echo 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}

# Else torchrun's ranks meet again in the store of the life before, and find the addresses of the dead in it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun=("$python" -m torch.distributed.run "--nproc-per-node=$nproc")
if ((nodes > 1)); then
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # An id of its own for each restart: a late process of the last life must not join this one.
    command=(srun --nodes="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1 "${torchrun[@]}" "--nnodes=$nodes"
        --rdzv-backend=c10d "--rdzv-endpoint=$head:$((29500 + SLURM_JOB_ID % 1000))"
        "--rdzv-id=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" "$repo/train.py")
elif ((nproc > 1)); then
    command=("${torchrun[@]}" --standalone "$repo/train.py")
else
    command=("$python" "$repo/train.py")
fi
exec "$python" -m lifecycle $((nodes * nproc)) "$nproc" "${command[@]}" -- "$@"
