"""FSDP1 and Accelerate files against the options that they must become; exit codes."""

import re
from collections.abc import Callable

import pytest
import tomli
from torch.distributed.fsdp import ShardingStrategy

import config
from tests.conftest import REPO, make_config, refuses
from tools.migrate import from_fsdp1

pytestmark = pytest.mark.quick


@pytest.fixture
def convert(tmp_path, capsys) -> Callable[[str], tuple[int, dict, str, str]]:
    """Converts YAML in this process: (exit code, the printed tables, stdout, stderr)."""

    def run(text: str) -> tuple[int, dict, str, str]:
        path = tmp_path / "accelerate.yaml"
        path.write_text(text, encoding="utf-8-sig")
        code = from_fsdp1.main([str(path)])
        out, err = capsys.readouterr()
        return code, tomli.loads(out), out, err

    return run


def table(text: str) -> list[list[str]]:
    """The rows `YAML => what becomes of it`; in YAML, \\n is a line's end."""
    rows = []
    for row in text.strip().split("\n"):
        yaml, _, becomes = row.partition("=>")
        rows.append([yaml.strip().replace("\\n", "\n"), becomes.strip()])
    return rows


# Without param_dtype = "float32", which is printed where no precision is named.
BECOMES = r"""
fsdp_reshard_after_forward: False => reshard_after_forward = false
sharding_strategy: null\nignored_modules: []\nprocess_group: ~ =>
forward_prefetch: yes\nbackward_prefetch: 1 => prefetch_forward = 1, prefetch_backward = 1
cpu_offload: {offload_params: true}\nbackward_prefetch_policy: NO_PREFETCH => cpu_offload = true, prefetch_backward = 0
fsdp_offload_params: 'no'\nfsdp_activation_checkpointing: True => cpu_offload = false, recompute = "full"
mp_policy: {reduce_dtype: bf16, output_dtype: fp32} => reduce_dtype = "bfloat16", output_dtype = "float32"
mixed_precision: bf16\nfsdp_version: 1 => param_dtype = "bfloat16", reduce_dtype = "float32"
gradient_accumulation_steps: 4\nsync_each_batch: false\nfsdp_version: 1 => sync_every_micro_batch = false
dynamo_config: {dynamo_backend: INDUCTOR}\nfsdp_version: 1 => compile = true
parallelism_config: {parallelism_config_tp_size: 8}\nfsdp_version: 2 => tp = 8
"""


@pytest.mark.parametrize("text, options", table(BECOMES))
def test_file_becomes_options(text, options, convert):
    code, tables, out, err = convert(text)
    assert (code, err) == (0, ""), err
    expected = {"param_dtype": "float32"} | tomli.loads(options.replace(", ", "\n"))
    assert tables == {"parallel": expected}, out


PROBLEMS = r"""
sharding_strategy: FUL_SHARD => did you mean FULL_SHARD?
sharding_strategy: HYBRID_SHARD => num_machines is missing, not a number of replicas
fsdp_config: {fsdp_shardin_strategy: 1} => did you mean fsdp_sharding_strategy?
backward_prefetch: BackwardPrefetch.BACKWARD_POST => no equivalent: FSDP2 gathers before
mixed_precision: {param_dtype: torch.half} => float16 needs a loss scaler
sharding_strategy: 1\nreshard_after_forward: no => = false: sharding_strategy says reshard_after_forward = true
fsdp_forward_prefetch: true\nforward_prefetch: false => contradiction
"""
HOSTILE = (r'forward_prefetch: "a\n[run]\nb = 1"', r"a\n[run]\nb = 1")  # stays in its comment


@pytest.mark.parametrize("text, words", [*table(PROBLEMS), HOSTILE])
def test_unknown_or_contradicting_entries_are_reported(text, words, convert):
    code, _, out, err = convert(text)
    assert code == 1 and out.isascii() and words in out
    [line] = [line for line in err.splitlines() if words in line]
    assert f"# {line.split(': ', 1)[1]}\n" in out


UNREADABLE = r"""
mixed_precision: bf16\nnum_machines: 2 => has no FSDP part
[parallel]\ndp_shard = 1 => cannot be read as YAML
fsdp_config:\n  fsdp_version: 1\n  fsdp_version: 2 => lines 2 and 3: fsdp_version stands twice
"""


@pytest.mark.parametrize("text, words", table(UNREADABLE))
def test_unreadable_file_is_refused(text, words, tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    with refuses(words):
        from_fsdp1.read(str(path))
    assert from_fsdp1.main([str(path)]) == 2


# (replicas, shards) of 16 ranks on 2 machines, and whether parameters are resharded after forward:
# FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD and _HYBRID_SHARD_ZERO2
MESHES = [(1, 16, True), (1, 16, False), (16, 1, True), (2, 8, True), (2, 8, False)]


@pytest.mark.parametrize("strategy, mesh", [*zip(ShardingStrategy, MESHES, strict=True)])
def test_torchs_strategies_shard_as_they_did(strategy, mesh, convert):
    """In all spellings that torch and Accelerate know."""
    replicas, shards, is_resharded = mesh
    name = strategy.name.strip("_")
    names = (strategy, strategy.name, strategy.value, name.lower(), name.replace("_", "-"))
    for spelling in (*names, f"torch.distributed.fsdp.{strategy}"):
        text = f"num_machines: 2\nuse_cpu: true\nsharding_strategy: {spelling}"
        _, tables, _, err = convert(text)
        train = {"global_batch_size": 16, "micro_batch_size": 1}
        cfg = make_config(train=train, **tables)
        assert err == "" and config.mesh_shape(cfg, 16) == (replicas, shards, 1, 1)
        assert cfg.parallel.reshard_after_forward is is_resharded and cfg.run.device == "cpu"


def test_the_page_shows_what_is_printed(convert):
    page = (REPO / "docs/migrate.md").read_text()
    example = re.search(r"<<'END'\n(.*?)END\n.*?```text output\n(.*?)```", page, re.S)
    assert example
    code, _, out, err = convert(example[1])
    assert (code, out, err) == (0, example[2], "")
