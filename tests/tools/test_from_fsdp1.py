"""FSDP1 and Accelerate files against the options that they must become; torch's own names; exit codes."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields

import pytest
import tomli
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

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
sharding_strategy: 2 => dp_replicate = 1, dp_shard = "auto", reshard_after_forward = false
fsdp_reshard_after_forward: False => reshard_after_forward = false
reshard_after_forward: NO_SHARD => dp_replicate = "auto", dp_shard = 1
sharding_strategy: null\nignored_modules: []\nprocess_group: ~ =>
forward_prefetch: yes\nbackward_prefetch: 1 => prefetch_forward = 1, prefetch_backward = 1
forward_prefetch: off\nbackward_prefetch: => prefetch_forward = 0, prefetch_backward = 0
cpu_offload: {offload_params: true}\nbackward_prefetch_policy: NO_PREFETCH => cpu_offload = true, prefetch_backward = 0
fsdp_offload_params: 'no'\nfsdp_activation_checkpointing: True => cpu_offload = false, recompute = "full"
fsdp_config: {fsdp_state_dict_type: FULL_STATE_DICT, fsdp_use_orig_params: false} =>
mixed_precision: {param_dtype: torch.bfloat16} => param_dtype = "bfloat16", reduce_dtype = "float32"
mp_policy: {reduce_dtype: bf16, output_dtype: fp32} => reduce_dtype = "bfloat16", output_dtype = "float32"
mixed_precision: bf16\nfsdp_version: 1 => param_dtype = "bfloat16", reduce_dtype = "float32"
mixed_precision: 'no'\nfsdp_version: 1\ndynamo_backend: 'NO' => compile = false
gradient_accumulation_steps: 4\nsync_each_batch: false\nfsdp_version: 1 => sync_every_micro_batch = false
dynamo_config: {dynamo_backend: INDUCTOR}\nfsdp_version: 1 => compile = true
parallelism_config: {parallelism_config_tp_size: 8}\nfsdp_version: 2 => tp = 8
parallelism_config_dp_shard_size: 4\nparallelism_config_cp_size: 1\nfsdp_version: 2 => dp_shard = 4, cp = 1
parallelism_config_dp_replicate_size: 2\nfsdp_version: 2 => dp_replicate = 2
"""


@pytest.mark.parametrize("text, options", table(BECOMES))
def test_file_becomes_options(text, options, convert):
    code, tables, out, err = convert(text)
    assert (code, err) == (0, ""), err
    expected = {"param_dtype": "float32"} | tomli.loads(options.replace(", ", "\n"))
    assert tables == {"parallel": expected}, out


PROBLEMS = r"""
sharding_strategy: 6 => = 6: unknown: known values are FULL_SHARD
sharding_strategy: FUL_SHARD => did you mean FULL_SHARD?
sharding_strategy: [FULL_SHARD] => = ['FULL_SHARD']: unknown
sharding_strategy: HYBRID_SHARD => num_machines is missing, not a number of replicas
num_machines: 0\nsharding_strategy: 4 => num_machines is 0,
fsdp_config: {fsdp_shardin_strategy: 1} => did you mean fsdp_sharding_strategy?
fsdp_reshard_after_forward: 8 => no equivalent: true, false, or HYBRID_SHARD
fsdp_reshard_after_forward: -2 => unknown
fsdp_forward_prefetch: 2 => known values are TRUE, FALSE
backward_prefetch: BackwardPrefetch.BACKWARD_POST => no equivalent: FSDP2 gathers before
mixed_precision: {param_dtype: torch.half} => float16 needs a loss scaler
mixed_precision: fp8\nfsdp_version: 1 => mixed_precision = fp8: unknown
distributed_type: MULTI_GPU\nfsdp_version: 1 => MULTI_GPU: unknown
deepspeed_config: {zero_stage: 3}\nfsdp_version: 1 => there is FSDP alone
sharding_strategy: 1\nreshard_after_forward: no => = false: sharding_strategy says reshard_after_forward = true
fsdp_forward_prefetch: true\nforward_prefetch: false => contradiction
ignored_modules: größe => = gr\xf6\xdfe: no equivalent
"""
HOSTILE = (r'forward_prefetch: "a\n[run]\nb = 1"', r"a\n[run]\nb = 1")  # stays in its comment
LONG = (f"ignored_modules: {'x' * 81}", f"{'x' * 77}...: no equivalent")


@pytest.mark.parametrize("text, words", [*table(PROBLEMS), HOSTILE, LONG])
def test_unknown_or_contradicting_entries_are_reported(text, words, convert):
    code, _, out, err = convert(text)
    assert code == 1 and out.isascii() and words in out
    [line] = [line for line in err.splitlines() if words in line]
    assert f"# {line.split(': ', 1)[1]}\n" in out


UNREADABLE = r"""
=> is empty
- fsdp_config => holds no keys
mixed_precision: bf16\nnum_machines: 2 => has no FSDP part
fsdp_config: {} => has no FSDP part
[parallel]\ndp_shard = 1 => cannot be read as YAML
a: 1\n---\nb: 2 => single document
fsdp_config:\n  fsdp_version: 1\n  fsdp_version: 2 => lines 2 and 3: fsdp_version stands twice
"""
TAB = ("fsdp_config:\n\tfsdp_version: 1", "line 2")
DEEP = (f"fsdp_config: {'[' * 9999}", "cannot be read as YAML: maximum recursion")


@pytest.mark.parametrize("text, words", [*table(UNREADABLE), TAB, DEEP])
def test_unreadable_file_is_refused(text, words, tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    with refuses(words):
        from_fsdp1.read(str(path))


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


def test_all_arguments_of_fsdp1_are_known():
    arguments = [*inspect.signature(FullyShardedDataParallel).parameters]
    arguments += [field.name for field in fields(MixedPrecision) if field.name[0] != "_"]
    assert {*arguments} - {"module"} <= {*from_fsdp1.RULES} | from_fsdp1.NESTED
    for member in BackwardPrefetch:
        by_name = from_fsdp1.resolve("backward_prefetch", str(member), "2")
        by_value = from_fsdp1.resolve("backward_prefetch", str(member.value), "2")
        assert by_name == by_value and by_name[0] in ("renamed", "no equivalent")


def test_every_row_sets_options_that_exist():
    """A row that no file of these tests reaches would fail only for a user."""
    for key, row in from_fsdp1.RULES.items():
        for value in row:
            outcome, options, _ = from_fsdp1.resolve(key, "2" if value == "number" else value, "2")
            assert outcome in ("kept", "renamed", "implied", "not ours", "no equivalent"), key
            make_config(**{"run" if "device" in options else "parallel": options})


# Every key that `accelerate config` writes
WRITTEN = """{compute_environment: LOCAL_MACHINE, debug: false, distributed_type: FSDP,
downcast_bf16: 'no', enable_cpu_affinity: false, machine_rank: 0, main_process_ip: 10.0.0.1,
main_process_port: 29500, main_training_function: main, mixed_precision: bf16, num_machines: 4,
num_processes: 32, rdzv_backend: static, same_network: true, tpu_env: [], tpu_use_cluster: false,
tpu_use_sudo: false, use_cpu: false, fsdp_config: {
fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_backward_prefetch: BACKWARD_POST,
fsdp_cpu_ram_efficient_loading: true, fsdp_forward_prefetch: false, fsdp_offload_params: false,
fsdp_sharding_strategy: HYBRID_SHARD, fsdp_state_dict_type: SHARDED_STATE_DICT,
fsdp_sync_module_states: true, fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,
fsdp_use_orig_params: true}}
"""


def test_file_of_accelerate_gets_one_comment_a_key_and_the_exit_code(convert, tmp_path):
    code, _, out, err = convert(WRITTEN)
    keys = re.findall(r"(\w+): [^{]", WRITTEN)
    comments = re.findall(r"^# (?:fsdp_config\.)?(\w+) = ", out, re.M)
    assert comments == [*keys, "reduce_dtype"]  # which the file does not have
    assert code == 1 and "BACKWARD_POST" in err
    code, _, out, err = convert(WRITTEN.replace("_POST", "_PRE"))
    assert code == 0 and err == ""
    assert from_fsdp1.main([str(tmp_path / "missing.yaml")]) == 2


def test_the_page_shows_what_is_printed(convert):
    page = (REPO / "docs/migrate.md").read_text()
    example = re.search(r"<<'END'\n(.*?)END\n.*?```text output\n(.*?)```", page, re.S)
    assert example
    code, _, out, err = convert(example[1])
    assert (code, out, err) == (0, example[2], "")
