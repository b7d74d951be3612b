"""Does train.py work on this device? Its losses next to a CPU's, a save, a resume, an evaluation, a
sample, the hashes of what it saved; and the tests marked gpu.

python -m benchmarks.gpu.checks CHECK FOLDER cpu|cuda [--section.key=value ...]     prints JSON

configs/tiny.toml on this repository's own text, with document masks. A GPU draws other random
weights, so it continues from the CPU's first checkpoint. Each check is a method of Runs.
"""

import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import torch

from benchmarks import REPO, read_rows
from benchmarks.gpu.arms import ON_A_CPU
from system import die_with_parent

SAVES, SAVED, LAST = 4, 8, 12  # steps after which the CPU's run and the device's save, and end
TOLERANCE = 0.02  # nats; on a CPU, bfloat16 differed from float32 by a tenth of it
SAME_WEIGHTS = 0.005  # of two evaluations in the same precision
OPTIONS = f"""--data.document_mask=true --optim.schedule_steps={LAST} --log.every_steps=1
    --log.tensorboard=false --eval.every_steps={SAVES} --eval.batches=2
    --checkpoint.save_every_steps={SAVES} --checkpoint.keep_last=3"""


class Runs:
    """The runs of train.py in a folder, and with which options they train."""

    def __init__(self, folder: pathlib.Path, device: str, options: list[str]):
        data = [f"--data.source={folder}/text.jsonl", f"--data.path={folder}/data"]
        common = [*options, *OPTIONS.split(), *data, f"--run.output_dir={folder}"]
        self.folder, self.common = folder, ["configs/tiny.toml", *common]
        self.cpu_options = f"--run.device=cpu {ON_A_CPU}"
        on_gpu = "--run.device=cuda --parallel.param_dtype=bfloat16 --parallel.compile=true"
        self.device = on_gpu if device == "cuda" else self.cpu_options

    def command(self, log: str, *words: str, processes: int = 1) -> list[str]:
        """The lines that ./run_train.sh prints with these words, which also are in a log."""
        environment = {**os.environ, "PYTHON": sys.executable, "NPROC": str(processes)}
        path = self.folder / f"{log}.log"
        with path.open("w") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            argv = [str(REPO / "run_train.sh"), *words]
            done = subprocess.run(argv, **streams, env=environment, preexec_fn=die_with_parent)
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        if done.returncode:
            last = " ".join(lines[-1:])
            raise RuntimeError(f"failed: exit code {done.returncode}: {last} (see {path})")
        return lines

    def train(self, name: str, steps: int, options: str, processes: int = 1) -> list[str]:
        named = [f"--run.name={name}", f"--train.steps={steps}", *options.split()]
        return self.command(f"{name}-{steps}", *self.common, *named, processes=processes)

    def losses(self, name: str, kind: str = "train") -> dict[int, float]:
        rows = read_rows(self.folder / name / "metrics.jsonl")
        return {row["step"]: row["loss"] for row in rows if row["kind"] == kind}

    def checkpoint(self, name: str, step: int) -> pathlib.Path:
        path = self.folder / name / f"checkpoints/step-{step:08}"
        if not path.exists():
            raise RuntimeError(f"failed: needs the checkpoint of step {step} of the run {name}")
        return path

    def continue_the_cpus(self, name: str, processes: int = 1) -> dict:
        source = self.checkpoint("cpu", SAVES)
        shutil.rmtree(self.folder / name, ignore_errors=True)
        shutil.copytree(source, self.folder / name / "checkpoints" / source.name)
        shutil.copy(self.folder / "cpu/tokenizer.model", self.folder / name)
        self.train(name, SAVED, self.device, processes=processes)
        return self.compared(name, range(SAVES + 1, SAVED + 1))

    def compared(self, name: str, steps: range) -> dict:
        """These steps' losses, and how far the CPU's are from them."""
        largest = 0.0
        for kind in ("train", "eval"):
            here, on_cpu = self.losses(name, kind), self.losses("cpu", kind)
            for step in [*steps] if kind == "train" else on_cpu.keys() & steps:
                loss, expected = here.get(step, math.nan), on_cpu.get(step, math.nan)
                largest = max(largest, abs(loss - expected))
                if not abs(loss - expected) <= TOLERANCE:  # also if there is none, or it is NaN
                    losses = f"{kind} loss {loss:.4f}, on the CPU {expected:.4f}"
                    raise RuntimeError(f"failed: step {step}: {losses}; {TOLERANCE} are allowed")
        shown = {step: loss for step, loss in self.losses(name).items() if step in steps}
        return {"losses": shown, "largest_difference": largest, "allowed": TOLERANCE}

    def cpu(self) -> dict:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        documents = []  # this repository's own code and pages: short ones, so that masks matter
        for file in sorted([*REPO.glob("*.py"), *REPO.glob("docs/*.md")]):
            documents += re.split(r"\n\n\n|\n(?=#)", file.read_text())
        lines = [json.dumps({"text": text}) + "\n" for text in documents]
        (self.folder / "text.jsonl").write_text("".join(lines))
        self.train("cpu", LAST, self.cpu_options)
        return {"losses": self.losses("cpu")}

    def train_and_save(self) -> dict:
        return self.continue_the_cpus("device")

    def resume(self) -> dict:
        self.checkpoint("device", SAVED)
        self.train("device", LAST, self.device)
        return self.compared("device", range(SAVED + 1, LAST + 1))

    def read(self) -> dict:
        """The last checkpoint: its evaluation against that during training, a sample, its hashes."""
        run = str(self.checkpoint("device", LAST).parents[1])
        lines = self.train("device", LAST, f"{self.device} --eval-only")
        loss = json.loads([line for line in lines if line.startswith("{")][-1])["loss"]
        trained = self.losses("device", "eval")[LAST]
        if not abs(loss - trained) <= SAME_WEIGHTS:
            raise RuntimeError(f"failed: loss {loss:.4f}, during training {trained:.4f}")
        text = self.command("generate", "-m", "generate", run, "--prompt", "def ", "--tokens", "20")
        hashes = self.command("verify", "-m", "checkpoint", "verify", run)
        return {"loss": loss, "during_training": trained, "text": text[-3:], "output": hashes}

    def two(self) -> dict:
        """FSDP2 over NCCL: two processes, each with a GPU."""
        if torch.cuda.device_count() < 2:
            raise RuntimeError("skipped: needs two GPUs")
        return self.continue_the_cpus("two", processes=2)

    def tests(self) -> dict:
        """Those marked gpu, but not the one of this program."""
        if not torch.cuda.is_available():
            raise RuntimeError("skipped: needs a GPU")
        files = [str(p) for p in (REPO / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text()]
        self.folder.mkdir(parents=True, exist_ok=True)
        words = ["-m", "pytest", "-m", "gpu", "-q", "--color=no", *sorted(files)]
        return {"tests": self.command("tests", *words)[-1]}


def main(argv: list[str]) -> None:
    check, folder, device, *options = argv
    needed = "pytest" if check == "tests" else "sentencepiece"
    try:
        if not importlib.util.find_spec(needed):
            raise RuntimeError(f"skipped: needs the package {needed}")
        row = getattr(Runs(pathlib.Path(folder), device, options), check)()
    except RuntimeError as status:  # what is wrong, or why it cannot be checked here
        row = {"status": str(status)}
    print(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])
