"""The commands of the table of meshes in docs/fsdp2.md."""

import re

import pytest

import config
from tests import cases
from tests.conftest import REPO, needs_extra

pytestmark = [pytest.mark.first, pytest.mark.slow]

# 4 divides neither 46 nor 38
MODEL = {"dim": 46, "n_heads": 4, "n_kv_heads": 4, "head_dim": 6, "ffn_dim": 76}
TABLE = re.findall(
    r"^\| .+ \| `NPROC=(\d) ./run_train.sh (\S+) (.+?)`", (REPO / "docs/fsdp2.md").read_text(), re.M
)


@needs_extra("float8", "huggingface", "lora", "optimizers", "reports")
def test_the_commands_of_the_documented_table_train(on_ranks, corpus, prepared, tmp_path):
    """With their options, on a smaller model and in this folder."""
    small = [
        f"--model.{key}={value}"
        for key, value in {**MODEL, "n_layers": 1, "vocab_size": 320}.items()
    ]
    small += [
        f"--data.source={corpus}",
        f"--data.path={prepared}",
        f"--run.output_dir={tmp_path}",
        "--run.device=cpu",
        "--train.steps=1",
        "--train.seq_len=32",
        "--optim.warmup_steps=1",
    ]
    runs: dict[int, list[list[str]]] = {}
    for number, (ranks, _, options) in enumerate(TABLE):
        off = [] if "tensorboard" in options else ["--log.tensorboard=false"]
        off += ["--eval.batches=1"] if "eval" in options else ["--eval=off"]
        # sides that 16 divides
        wide = ["--model.dim=48", "--model.ffn_dim=80"] if "float8" in options else []
        command = [*small, *wide, f"--run.name=r{number}", *off, *options.split()]
        if "compile" in options:  # half a minute each: compiled meshes train in tests/parallel
            assert config.load(str(REPO / "configs/tiny.toml"), command).parallel.compile
        else:
            runs.setdefault(int(ranks), []).append(command)
    assert len(TABLE) >= 18 and {path for _, path, _ in TABLE} == {"configs/tiny.toml"}
    for ranks, commands in runs.items():
        assert on_ranks(ranks, cases.train_files, str(REPO / "configs/tiny.toml"), commands)[0] == [
            1
        ] * len(commands)
    assert (
        list((tmp_path / "r0").glob("*"))
        and config.load(str(tmp_path / "r3/config.toml")).parallel.tp == 2
    )
