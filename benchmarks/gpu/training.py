"""Does train.py work on this device? Its losses next to a CPU's, a save, a resume, an evaluation, a
sample, and the hashes of what it saved.

configs/tiny.toml on this repository's own text, with document masks. The CPU trains in float32,
uncompiled. A GPU draws other random weights, so it continues from the CPU's first checkpoint: in
bfloat16, compiled. Each check is a command as a user types it.
"""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import REPO
from metrics import read_rows
from system import die_with_parent

# steps after which the CPU's run and the device's save
CPU_SAVES = 4
SAVED = 8
LAST = 12
# nats; on a CPU, bfloat16 differed from float32 by a tenth of it
TOLERANCE = 0.02
SAME_WEIGHTS = 0.005  # of two evaluations in the same precision
NEEDED = ("sentencepiece",)  # packages that preparing text imports


class FailedCheck(Exception):
    """What a check found to be wrong."""


class Skipped(Exception):
    """Why a check cannot be made here."""


@dataclass(frozen=True)
class Runs:
    """Where the runs of train.py lie, and with which options they train."""

    folder: pathlib.Path
    options: list[str]  # of every run
    device_options: list[str]  # of those on the device

    def command(self, name: str, *words: str, processes: int = 1) -> str:
        """Runs ./run_train.sh with these words. Returns its output, which it also writes to
        NAME.log. Raises FailedCheck with the last line of an error."""
        self.folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [str(REPO / "run_train.sh"), *words],
            env={**os.environ, "PYTHON": sys.executable, "NPROC": str(processes)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
        )
        log = self.folder / f"{name}.log"
        log.write_text(done.stdout)
        if done.returncode:
            lines = done.stdout.split("\n")
            last = [line for line in lines if line.strip()][-1:]
            raise FailedCheck(f"exit code {done.returncode}: {' '.join(last)} (see {log})")
        return done.stdout

    def train(self, name: str, steps: int, options: list[str], processes: int = 1) -> None:
        words = [*self.words(name), *options, f"--train.steps={steps}"]
        self.command(f"{name}-{steps}", *words, processes=processes)

    def words(self, name: str) -> list[str]:
        """The configuration and options of a run."""
        return [
            "configs/tiny.toml",
            *self.options,
            f"--data.source={self.folder}/text.jsonl",
            f"--data.path={self.folder}/data",
            "--data.document_mask=true",
            f"--run.output_dir={self.folder}",
            f"--run.name={name}",
            f"--optim.schedule_steps={LAST}",
            "--log.every_steps=1",
            "--log.tensorboard=false",
            f"--eval.every_steps={CPU_SAVES}",
            "--eval.batches=2",
            f"--checkpoint.save_every_steps={CPU_SAVES}",
            "--checkpoint.keep_last=3",
        ]

    def losses(self, name: str, kind: str = "train") -> dict[int, float]:
        """The loss of a run by step, of its steps or its evaluations."""
        rows = read_rows(self.folder / name / "metrics.jsonl")
        return {row["step"]: row["loss"] for row in rows if row["kind"] == kind}

    def start_from_the_cpu(self, name: str) -> None:
        """A new run that holds the CPU's first checkpoint. Raises FailedCheck without one."""
        needs_packages()
        checkpoint = f"checkpoints/step-{CPU_SAVES:08}"
        source = self.folder / "cpu"
        if not (source / checkpoint).exists():
            raise FailedCheck("needs the checkpoint of the run on the CPU")
        shutil.rmtree(self.folder / name, ignore_errors=True)
        shutil.copytree(source / checkpoint, self.folder / name / checkpoint)
        shutil.copy(source / "tokenizer.model", self.folder / name)

    def compared(self, name: str, steps: list[int]) -> dict:
        """The losses of these steps, and how far the CPU's are from them. Raises FailedCheck."""
        differences = {}
        for kind in ("train", "eval"):
            here = self.losses(name, kind)
            on_cpu = self.losses("cpu", kind)
            for step in steps:
                if step not in on_cpu:  # not a step of an evaluation
                    continue
                if step not in here:
                    raise FailedCheck(f"step {step}: no row of kind {kind}")
                difference = abs(here[step] - on_cpu[step])
                differences[kind, step] = difference
                if not difference <= TOLERANCE:  # also if one is NaN
                    raise FailedCheck(
                        f"step {step}: {kind} loss {here[step]:.4f}, on the CPU {on_cpu[step]:.4f}; "
                        f"{TOLERANCE} are allowed"
                    )
        losses = self.losses(name)
        return {
            "losses": {step: losses[step] for step in steps},
            "largest_difference": max(differences.values()),
            "allowed": TOLERANCE,
        }


def on_the_cpu(runs: Runs) -> dict:
    """The losses that the device's are compared with."""
    needs_packages()
    shutil.rmtree(runs.folder, ignore_errors=True)
    runs.folder.mkdir(parents=True)
    write_text(runs.folder / "text.jsonl")
    runs.train("cpu", LAST, ["--run.device=cpu", "--parallel.param_dtype=float32"])
    losses = runs.losses("cpu")
    if sorted(losses) != [*range(1, LAST + 1)]:
        raise FailedCheck(f"rows of steps {sorted(losses)}, not of 1 to {LAST}")
    return {"losses": losses}


def write_text(path: pathlib.Path) -> None:
    """This repository's own code and pages: short documents, so that masks matter."""
    documents = []
    for file in sorted([*REPO.glob("*.py"), *REPO.glob("docs/*.md")]):
        for text in re.split(r"\n\n\n|\n(?=#)", file.read_text()):
            documents.append(json.dumps({"text": text}) + "\n")
    path.write_text("".join(documents))


def train_and_save(runs: Runs) -> dict:
    runs.start_from_the_cpu("device")
    runs.train("device", SAVED, runs.device_options)
    return runs.compared("device", [*range(CPU_SAVES + 1, SAVED + 1)])


def resume(runs: Runs) -> dict:
    needs_checkpoint(runs, SAVED)
    runs.train("device", LAST, runs.device_options)
    return runs.compared("device", [*range(SAVED + 1, LAST + 1)])


def evaluation(runs: Runs) -> dict:
    """Of the last checkpoint, against the evaluation during training."""
    needs_checkpoint(runs, LAST)
    words = [*runs.words("device"), *runs.device_options, f"--train.steps={LAST}"]
    output = runs.command("evaluation", *words, "--eval-only")
    row = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    trained = runs.losses("device", "eval")[LAST]
    if not abs(row["loss"] - trained) <= SAME_WEIGHTS:
        raise FailedCheck(f"loss {row['loss']:.4f}, during training {trained:.4f}")
    return {"loss": row["loss"], "during_training": trained}


def generate(runs: Runs) -> dict:
    needs_checkpoint(runs, LAST)
    words = ["-m", "generate", str(runs.folder / "device"), "--prompt", "def ", "--tokens", "20"]
    text = runs.command("generate", *words)
    return {"text": text[-200:]}


def verify(runs: Runs) -> dict:
    """The hashes of both of the device's checkpoints."""
    needs_checkpoint(runs, LAST)
    output = runs.command("verify", "-m", "checkpoint", "verify", str(runs.folder / "device"))
    return {"output": output.splitlines()}


def two_gpus(runs: Runs) -> dict:
    """FSDP2 over NCCL: two processes, each with a GPU."""
    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise Skipped("needs two GPUs")
    runs.start_from_the_cpu("two")
    runs.train("two", SAVED, runs.device_options, processes=2)
    return runs.compared("two", [*range(CPU_SAVES + 1, SAVED + 1)])


def needs_packages(*others: str) -> None:
    for name in (*NEEDED, *others):
        if not importlib.util.find_spec(name):
            raise Skipped(f"needs the package {name}")


def needs_checkpoint(runs: Runs, step: int) -> None:
    needs_packages()
    if not (runs.folder / f"device/checkpoints/step-{step:08}").exists():
        raise FailedCheck(f"needs the device's checkpoint of step {step}")


def gpu_tests(runs: Runs) -> dict:
    """The tests marked gpu, but not the one of this program."""
    if not torch.cuda.is_available():
        raise Skipped("needs a GPU")
    needs_packages("pytest")
    files = []
    for path in sorted((REPO / "tests").rglob("test_*.py")):
        if "pytest.mark.gpu" in path.read_text():
            files.append(str(path))
    output = runs.command("tests", "-m", "pytest", "-m", "gpu", "-q", "--color=no", *files)
    return {"tests": output.splitlines()[-1]}


TRAINING: dict[str, Callable[[Runs], dict]] = {
    "on the CPU": on_the_cpu,
    "train, save": train_and_save,
    "resume": resume,
    "evaluate": evaluation,
    "generate": generate,
    "verify": verify,
    "two GPUs": two_gpus,
}
GPU_TESTS: dict[str, Callable[[Runs], dict]] = {"marked gpu": gpu_tests}
