"""Where and how a run is started: variables of other launchers, schedulers, links, other files in
the callers folder."""

import json
from pathlib import Path

from tests.conftest import words
from tests.field.formats import CHAT, alpaca, array, tokenizer
from tests.field.situation import DONE, Situation

TEXT = {"mine.txt": words(1, 4000)}
TRAIN = "base.toml --data.source=mine.txt"


def assert_format_is_recorded(folder: Path) -> None:
    assert 'format = "alpaca"' in (folder / "outputs/field/config.toml").read_text()
    environment = json.loads((folder / "outputs/field/environment.json").read_text())
    assert "--data.source=mine.json" in environment["command"]
    assert not any("format" in word for word in environment["command"])


SITUATIONS = [
    Situation(
        "a shell whose outer job has left WORLD_SIZE and RANK",
        TRAIN,
        ("WORLD_SIZE=4: another launcher started this process", "env -u"),
        TEXT,
        exit_code=2,
        environment={
            "WORLD_SIZE": "4",
            "RANK": "0",
            "MASTER_ADDR": "10.255.255.1",
            "MASTER_PORT": "29500",
        },
    ),
    Situation(
        "a pod of several, in which run_train.sh evaluates",
        f"{TRAIN} --eval-only",
        ("PET_NNODES=2: another launcher started this process", "torchrun train.py CONFIG"),
        TEXT,
        exit_code=2,
        environment={"PET_NNODES": "2", "PET_NODE_RANK": "1"},
    ),
    Situation(
        "a notebook that has set all variables for its one process",
        TRAIN,
        (DONE,),
        TEXT,
        ranks=2,
        environment={
            "WORLD_SIZE": "1",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "10.255.255.1",
            "MASTER_PORT": "29500",
            "PET_NPROC_PER_NODE": "7",
            "PET_MASTER_ADDR": "10.255.255.1",
            "TORCHELASTIC_RUN_ID": "other",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        },
    ),
    Situation(
        "torch's most detailed debugging",
        TRAIN,
        (DONE,),
        TEXT,
        environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ),
    Situation(
        "torch's most detailed debugging, for a plan",
        f"{TRAIN} --dry-run",
        ("GiB",),
        TEXT,
        environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        needs=("planner",),
    ),
    Situation(
        "rows whose format the launcher finds, for a report of what was typed",
        f"{CHAT} --data.source=mine.json --checkpoint.save_every_steps=1",
        ("more steps", DONE),
        {"tok": tokenizer, "mine.json": array(alpaca)},
        never=("--data.format=",),
        check=assert_format_is_recorded,
        needs=("chat", "reports"),
    ),
    Situation(
        "GPUs of SLURM by their type",
        TRAIN,
        (DONE,),
        TEXT,
        environment={"NPROC": "", "SLURM_GPUS_ON_NODE": "gpu:h100:1"},
    ),
    Situation(
        "a job of several nodes whose list is missing",
        TRAIN,
        ("SLURM_",),  # without srun that is named first
        TEXT,
        exit_code=2,
        environment={"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": ""},
    ),
    Situation(
        "files of the callers that are called as our modules and Python's",
        TRAIN,
        (DONE,),
        {
            **TEXT,
            "config.py": "raise SystemExit('the callers config.py')",
            "data.py": "raise SystemExit('the callers data.py')",
            "launch/__init__.py": "raise SystemExit('the callers launch')",
            "random.py": "raise SystemExit('the callers random.py')",
        },
    ),
    Situation(
        "--config before the configuration",
        "--config base.toml",
        ("--config needs --dry-run", "file comes first, without --config"),
        exit_code=2,
        needs=("planner",),
    ),
    Situation(
        "Python without docstrings",
        "--help",
        ("sbatch", "[optim]"),
        environment={"PYTHONOPTIMIZE": "2"},
    ),
    Situation(
        "a link to a disk that is not mounted, for the runs",
        f"{TRAIN} --run.output_dir=runs",
        ("runs is a link to /not/mounted, which is not there",),
        {**TEXT, "runs": lambda path: path.symlink_to("/not/mounted")},
        exit_code=2,
    ),
    Situation(
        "a link to a disk that is not mounted, for the data",
        f"{TRAIN} --data.path=tokens",
        ("tokens: is a link to /not/mounted, which is not there",),
        {**TEXT, "tokens": lambda path: path.symlink_to("/not/mounted")},
        exit_code=2,
    ),
    Situation(
        "a run's folder in which no file can be made",
        TRAIN,
        ("outputs/field/.status.json.tmp: Is a directory",),
        {**TEXT, "outputs/field/.status.json.tmp/file": ""},
        exit_code=1,  # it may be mended without another command
    ),
]
