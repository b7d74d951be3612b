"""FSDP1 and Accelerate files against what they must become, hostile ones included; real processes for exit codes."""

import pathlib
import re
import subprocess
import sys

import pytest
import tomli

import config
from tests.conftest import REPO, make_config
from tools.migrate import from_fsdp1

pytestmark = pytest.mark.quick

FULL = {"dp_replicate": 1, "dp_shard": "auto", "reshard_after_forward": True}
GRAD_OP = FULL | {"reshard_after_forward": False}
NO_SHARD = {"dp_replicate": "auto", "dp_shard": 1}
HYBRID = {"dp_replicate": 2, "dp_shard": "auto", "reshard_after_forward": True}
HYBRID_2 = HYBRID | {"reshard_after_forward": False}
BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
TWO = "num_machines: 2\n"


@pytest.fixture
def convert(tmp_path, capsys):
    """Converts YAML text in this process: (exit code, the printed tables, stdout, stderr)."""

    def run(text: str | bytes) -> tuple[int, dict, str, str]:
        path = tmp_path / "accelerate.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        code = from_fsdp1.main([str(path)])
        out, err = capsys.readouterr()
        return code, tomli.loads(out), out, err

    return run


def part(entry: str) -> str:
    return f"fsdp_config: {{{entry}}}"


# YAML, exit code, the options without param_dtype = "float32" (printed where no precision is named), words of stdout.
CASES = {
    # sharding strategy, in each spelling
    "full": (part("fsdp_sharding_strategy: FULL_SHARD"), 0, FULL, ["renamed"]),
    "grad op": (part("fsdp_sharding_strategy: SHARD_GRAD_OP"), 0, GRAD_OP, []),
    "no shard": (part("fsdp_sharding_strategy: NO_SHARD"), 0, NO_SHARD, ["each rank is a replica"]),
    "hybrid": (TWO + part("fsdp_sharding_strategy: HYBRID_SHARD"), 0, HYBRID, ["num_machines = 2"]),
    "hybrid zero 2": (TWO + part("fsdp_sharding_strategy: HYBRID_SHARD_ZERO2"), 0, HYBRID_2, []),
    "private name": (TWO + part("fsdp_sharding_strategy: _HYBRID_SHARD_ZERO2"), 0, HYBRID_2, []),
    "integer 1": (part("fsdp_sharding_strategy: 1"), 0, FULL, ["fsdp_sharding_strategy = 1"]),
    "integer 2": (part("fsdp_sharding_strategy: 2"), 0, GRAD_OP, []),
    "integer 3": (part("fsdp_sharding_strategy: 3"), 0, NO_SHARD, []),
    "integer as text": (TWO + part("fsdp_sharding_strategy: '4'"), 0, HYBRID, []),
    "integer 5": (TWO + part("fsdp_sharding_strategy: 5"), 0, HYBRID_2, []),
    "integer 6": (
        part("fsdp_sharding_strategy: 6"),
        1,
        {},
        ["unknown", "known values are FULL_SHARD"],
    ),
    "lower case": (part("fsdp_sharding_strategy: full_shard"), 0, FULL, []),
    "hyphens": (part("fsdp_sharding_strategy: shard-grad-op"), 0, GRAD_OP, []),
    "enum": ("sharding_strategy: ShardingStrategy.FULL_SHARD", 0, FULL, []),
    "whole path": (
        "sharding_strategy: torch.distributed.fsdp.ShardingStrategy.NO_SHARD",
        0,
        NO_SHARD,
        [],
    ),
    "misspelt value": (
        part("fsdp_sharding_strategy: FUL_SHARD"),
        1,
        {},
        ["did you mean FULL_SHARD?"],
    ),
    "float is no enum": (part("fsdp_sharding_strategy: 2.1"), 1, {}, ["= 2.1: unknown"]),
    "null strategy": (part("fsdp_sharding_strategy: null"), 0, {}, ["not set there"]),
    "hybrid, machines missing": (
        part("fsdp_sharding_strategy: HYBRID_SHARD"),
        1,
        {},
        ["num_machines is missing"],
    ),
    "hybrid, one machine": (
        "num_machines: 1\n" + part("fsdp_sharding_strategy: 4"),
        0,
        {**HYBRID, "dp_replicate": 1},
        [],
    ),
    "hybrid, no machine": (
        "num_machines: 0\n" + part("fsdp_sharding_strategy: 4"),
        1,
        {},
        ["num_machines is 0,"],
    ),
    "hybrid, odd machines": (
        "num_machines: [2]\n" + part("fsdp_sharding_strategy: 4"),
        1,
        {},
        ["num_machines = ['2']: unknown"],
    ),
    # FSDP2's own key
    "reshard true": (
        part("fsdp_version: 2, fsdp_reshard_after_forward: true"),
        0,
        {"reshard_after_forward": True},
        ["FSDP2, always", "kept"],
    ),
    "reshard false": (
        part("fsdp_reshard_after_forward: False"),
        0,
        {"reshard_after_forward": False},
        [],
    ),
    "reshard integer": (
        part("fsdp_reshard_after_forward: 8"),
        1,
        {},
        ["no equivalent", "HYBRID_SHARD"],
    ),
    "reshard 1": (part("fsdp_reshard_after_forward: 1"), 1, {}, ["no equivalent"]),
    "reshard 0": (part("fsdp_reshard_after_forward: 0"), 1, {}, ["no equivalent"]),
    "reshard negative": (part("fsdp_reshard_after_forward: -2"), 1, {}, ["unknown"]),
    "reshard huge": (part("fsdp_reshard_after_forward: " + "9" * 5000), 1, {}, ["unknown"]),
    "reshard by strategy": (part("fsdp_reshard_after_forward: FULL_SHARD"), 0, FULL, []),
    "both agree": (
        part("fsdp_sharding_strategy: 2, fsdp_reshard_after_forward: false"),
        0,
        GRAD_OP,
        [],
    ),
    "both contradict": (
        part("fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: false"),
        1,
        FULL,
        ["contradiction", "fsdp_config.fsdp_sharding_strategy says reshard_after_forward = true"],
    ),
    "one key in two spellings": (
        part("fsdp_forward_prefetch: true, forward_prefetch: false"),
        1,
        {"prefetch_forward": 1},
        ["contradiction"],
    ),
    "parallelism_config": (
        "parallelism_config: {parallelism_config_dp_replicate_size: 2, "
        "parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 1}\n"
        + part("fsdp_version: 2"),
        0,
        {"dp_replicate": 2, "dp_shard": 4, "tp": 1},
        [],
    ),
    "tensor and context parallel": (
        "parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_cp_size: 4}\n"
        + part("fsdp_version: 2"),
        0,
        {"tp": 2, "cp": 4},
        [],
    ),
    "version 3": (part("fsdp_version: 3"), 1, {}, ["known values are 1, 2"]),
    # prefetch
    "forward": (part("fsdp_forward_prefetch: true"), 0, {"prefetch_forward": 1}, []),
    "no forward": (part("fsdp_forward_prefetch: no"), 0, {"prefetch_forward": 0}, []),
    "forward of 2": (part("fsdp_forward_prefetch: 2"), 1, {}, ["known values are TRUE, FALSE"]),
    "backward pre": (part("fsdp_backward_prefetch: BACKWARD_PRE"), 0, {"prefetch_backward": 1}, []),
    "backward, old key": (
        part("fsdp_backward_prefetch_policy: BACKWARD_PRE"),
        0,
        {"prefetch_backward": 1},
        [],
    ),
    "backward post": (part("fsdp_backward_prefetch: BACKWARD_POST"), 1, {}, ["no equivalent"]),
    "backward off": (
        part("fsdp_backward_prefetch: NO_PREFETCH"),
        0,
        {"prefetch_backward": 0},
        ["still one ahead"],
    ),
    "backward null": ("backward_prefetch: null", 0, {"prefetch_backward": 0}, ["still one ahead"]),
    "backward enum": (
        "backward_prefetch: BackwardPrefetch.BACKWARD_POST",
        1,
        {},
        ["no equivalent"],
    ),
    # precision
    "bf16": (
        "mixed_precision: bf16\n" + part("fsdp_version: 1"),
        0,
        BF16,
        ["where FSDP1 and Accelerate would reduce"],
    ),
    "no": ("mixed_precision: 'no'\n" + part("fsdp_version: 1"), 0, {"param_dtype": "float32"}, []),
    "bare no": (
        "mixed_precision: no\n" + part("fsdp_version: 1"),
        0,
        {"param_dtype": "float32"},
        [],
    ),
    "none named": (
        part("fsdp_version: 1"),
        0,
        {"param_dtype": "float32"},
        ["no other precision is named"],
    ),
    "fp16": (
        "mixed_precision: fp16\n" + part("fsdp_version: 1"),
        1,
        {"param_dtype": None},
        ["loss scaler"],
    ),
    "fp8": (
        "mixed_precision: fp8\n" + part("fsdp_version: 1"),
        1,
        {"param_dtype": None},
        ["unknown"],
    ),
    "policy": (
        "mixed_precision: {param_dtype: torch.bfloat16, reduce_dtype: bf16, buffer_dtype: bfloat16, "
        "cast_forward_inputs: true, cast_root_forward_inputs: true, keep_low_precision_grads: false}",
        0,
        {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
        ["buffer_dtype = bfloat16: implied: dropped"],
    ),
    "policy without reduce": ("mixed_precision: {param_dtype: bfloat16}", 0, BF16, []),
    "policy of FSDP2": (
        "mp_policy: {param_dtype: bf16, reduce_dtype: torch.float32, output_dtype: fp32}",
        0,
        BF16 | {"output_dtype": "float32"},
        [],
    ),
    "policy of nothing": (
        "mixed_precision: {param_dtype: null}",
        0,
        {"param_dtype": "float32"},
        [],
    ),
    "half policy": (
        "mixed_precision: {param_dtype: torch.half}",
        1,
        {"param_dtype": None},
        ["loss scaler"],
    ),
    "policies contradict": (
        "mixed_precision: bf16\nmp_policy: {param_dtype: float32}",
        1,
        BF16,
        ["contradiction", "mixed_precision says"],
    ),
    "low precision gradients": (
        "mixed_precision: {keep_low_precision_grads: true}",
        1,
        {},
        ["no equivalent"],
    ),
    # the other arguments
    "offload": (part("fsdp_offload_params: true"), 0, {"cpu_offload": True}, []),
    "offload, nested": (
        "cpu_offload: {offload_params: true}",
        0,
        {"cpu_offload": True},
        ["cpu_offload.offload_params = true"],
    ),
    "offload, bare": ("cpu_offload: false", 0, {"cpu_offload": False}, ["kept"]),
    "recompute": (part("fsdp_activation_checkpointing: true"), 0, {"recompute": "full"}, []),
    "no recompute": (part("fsdp_activation_checkpointing: false"), 0, {"recompute": "none"}, []),
    "blocks": (
        part(
            "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_transformer_layer_cls_to_wrap: 'A,B'"
        ),
        0,
        {},
        ["one unit per block", "= A,B: implied"],
    ),
    "by size": (
        part("fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 100000000"),
        1,
        {},
        ["fsdp_min_num_params = 100000000", "no equivalent: units are one per block"],
    ),
    "no wrap": (part("fsdp_auto_wrap_policy: NO_WRAP"), 1, {}, []),
    "sharded": (part("fsdp_state_dict_type: SHARDED_STATE_DICT"), 0, {}, ["implied"]),
    "full state": (part("fsdp_state_dict_type: FULL_STATE_DICT"), 0, {}, ["always sharded"]),
    "local state": (part("fsdp_state_dict_type: LOCAL_STATE_DICT"), 1, {}, ["no equivalent"]),
    "done by itself": (
        part(
            "fsdp_sync_module_states: true, fsdp_use_orig_params: false, limit_all_gathers: true, "
            "fsdp_cpu_ram_efficient_loading: true"
        ),
        0,
        {},
        ["fsdp_use_orig_params = false: implied"],
    ),
    "device and start": (
        "device_id: 0\nparam_init_fn: my.function\nprocess_group: null\nignored_modules: []",
        0,
        {},
        ["device_id = 0: implied", "materialize", "ignored_modules = []: implied"],
    ),
    "ignored": ("ignored_modules: [head]", 1, {}, ["every parameter is sharded"]),
    "mesh": ("device_mesh: [2, 4]", 1, {}, ["set dp_replicate and dp_shard"]),
    "group": ("process_group: mine", 1, {}, ["set dp_replicate and dp_shard"]),
    # the rest of Accelerate's file
    "accumulation": (
        "gradient_accumulation_steps: 4\nsync_each_batch: false\n" + part("fsdp_version: 1"),
        0,
        {"sync_every_micro_batch": False},
        ["global_batch_size = 4 x"],
    ),
    "compile": (
        "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default}\n"
        + part("fsdp_version: 1"),
        0,
        {"compile": True},
        [],
    ),
    "no compile": ("dynamo_backend: 'NO'\n" + part("fsdp_version: 1"), 0, {"compile": False}, []),
    "other compiler": (
        "dynamo_backend: AOT_EAGER\n" + part("fsdp_version: 1"),
        1,
        {},
        ["known values are INDUCTOR"],
    ),
    "another type": (
        "distributed_type: MULTI_GPU\n" + part("fsdp_version: 1"),
        1,
        {},
        ["MULTI_GPU: unknown"],
    ),
    "deepspeed": (
        "deepspeed_config: {zero_stage: 3}\n" + part("fsdp_version: 1"),
        1,
        {},
        ["there is FSDP alone"],
    ),
    "no deepspeed": ("deepspeed_config: {}\n" + part("fsdp_version: 1"), 0, {}, []),
    "processes": (
        "num_processes: many\n" + part("fsdp_version: 1"),
        1,
        {},
        ["num_processes = many: unknown"],
    ),
    "marker as a value": (
        "num_processes: number\n" + part("fsdp_version: any"),
        1,
        {},
        ["= number: unknown"],
    ),
    # hostile
    "misspelt key": (
        part("fsdp_shardin_strategy: 1"),
        1,
        {},
        ["did you mean fsdp_sharding_strategy?"],
    ),
    "key of nothing": (
        part("qwzx: 1"),
        1,
        {},
        ["fsdp_config.qwzx = 1: unknown: no such key is known"],
    ),
    "list for a word": (
        part("fsdp_sharding_strategy: [FULL_SHARD]"),
        1,
        {},
        ["= ['FULL_SHARD']: unknown"],
    ),
    "table for a word": (part("fsdp_forward_prefetch: {a: b}"), 1, {}, ["unknown"]),
    "nested lists": (part("fsdp_forward_prefetch: " + "[" * 200 + "]" * 200), 1, {}, ["[[[..."]),
    "line break in a value": (
        part(r'fsdp_forward_prefetch: "a\n[run]\nb = 1"'),
        1,
        {},
        [r"a\n[run]\nb = 1"],
    ),
    "line break in a key": (part(r'"a\r\nb": 1'), 1, {}, [r"a\r\nb"]),
    "half a character": (part(r'fsdp_forward_prefetch: "\ud800\x7f"'), 1, {}, [r"\ud800\x7f"]),
    "not ASCII": (part("fsdp_forward_prefetch: wahr, größe: 1"), 1, {}, [r"gr\xf6\xdfe = 1"]),
    "braces": (
        part('fsdp_transformer_layer_cls_to_wrap: "{machines}{0}"'),
        0,
        {},
        ["{machines}{0}"],
    ),
    "byte order mark": (b"\xef\xbb\xbf" + part("fsdp_sharding_strategy: 1").encode(), 0, FULL, []),
    "a fsdp_config that is text": (
        "sharding_strategy: 1\nfsdp_config: full",
        1,
        FULL,
        ["fsdp_config = full: unknown"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_becomes(name, convert):
    text, code, options, words = CASES[name]
    expected = {
        key: value
        for key, value in ({"param_dtype": "float32"} | options).items()
        if value is not None
    }
    found, tables, out, err = convert(text)
    assert (found, tables) == (code, {"parallel": expected}), out
    assert out.isascii() and all(word in out for word in words), out
    assert bool(err) == bool(code) and all(
        line.split(": ", 1)[1] in out for line in err.splitlines()
    )


UNREADABLE = {
    "empty": ("", "is empty"),
    "only a comment": ("# nothing\n", "is empty"),
    "list": ("- fsdp_config\n", "holds no keys"),
    "text": ("fsdp", "holds no keys"),
    "no FSDP part": ("mixed_precision: bf16\nnum_machines: 2\n", "has no FSDP part"),
    "empty FSDP part": ("fsdp_config: {}\n", "has no FSDP part"),
    "null FSDP part": ("fsdp_config: null\n", "has no FSDP part"),
    "list as FSDP part": ("fsdp_config: [fsdp_sharding_strategy]\n", "has no FSDP part"),
    "not YAML": ("fsdp_config: {", "line 1"),
    "TOML": ("[parallel]\ndp_shard = 1\n", "cannot be read as YAML"),
    "tab": ("fsdp_config:\n\tfsdp_version: 1\n", "line 2"),
    "two documents": ("a: 1\n---\nb: 2\n", "single document"),
    "duplicate key": (
        "fsdp_config:\n  fsdp_version: 1\n  fsdp_version: 2\n",
        "line 3: fsdp_version stands twice",
    ),
    "key that is a list": ("? [a]\n: 1\n", "line 1, column 3"),
    "not UTF-8": (b"fsdp_config: {a: \xff}", "utf-8"),
    "binary": (bytes(range(256)), "cannot be read"),
    "control character": ("fsdp_config: {a: \x01}", "special characters"),
    "escape out of range": (r'"\U00ffffff": 1', "cannot be read"),
    "escape that overflows": (r'"\Uffffffff": 1', "cannot be read"),
    "object": (
        "fsdp_config: !!python/object/apply:os.system ['touch owned']\n",
        "line 1: an alias (*name) or a tag",
    ),
    "object in a list": ("ignored_modules: [!!python/name:os.system '']\n", "tag"),
    "alias": ("a: &a [1]\nfsdp_config: {b: *a}\n", "line 2: an alias"),
    "bomb": (
        "a: &a [x, x]\n"
        + "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in zip("abcdefgh", "bcdefghi")),
        "alias",
    ),
    "endless table": ("fsdp_config: &a {b: *a}\n", "alias"),
    "deep": ("[" * 1100, "cannot be read"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_refuses(name, tmp_path, capsys, monkeypatch):
    text, word = UNREADABLE[name]
    path = tmp_path / "accelerate.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.chdir(tmp_path)
    assert from_fsdp1.main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and err.startswith(f"{path}: ") and word in err
    assert not (tmp_path / "owned").exists()


# An entry, the spellings of one value in YAML 1.1, torch and Accelerate, and the options that it becomes.
SPELLINGS = [
    ("offload_params", ("true", "True", "yes", "YES", "on", "'true'"), {"cpu_offload": True}),
    ("offload_params", ("false", "no", "No", "off", "'off'"), {"cpu_offload": False}),
    ("offload_params", ("null", "~", "", "None", "''"), {}),  # not set
    (
        "param_dtype",
        ("bf16", "BF16", "bfloat16", "torch.bfloat16"),
        {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    ),
    ("param_dtype", ("fp32", "float", "float32", "torch.float32", "~"), {"param_dtype": "float32"}),
    ("output_dtype", ("fp32", "torch.float"), {"output_dtype": "float32"}),
    ("output_dtype", ("fp16", "half", "torch.half", "float16"), None),  # no equivalent
]


@pytest.mark.parametrize("key, spellings, options", SPELLINGS)
def test_all_spellings_of_a_value_become_the_same(key, spellings, options, convert):
    for spelling in spellings:
        code, tables, out, _ = convert(f"sharding_strategy: 1\n{key}: {spelling}\n")
        assert code == (options is None) == ("float16 needs a loss scaler" in out), out
        expected = {**FULL, "param_dtype": "float32", **(options or {})}
        assert tables == {"parallel": expected}, spelling


def test_a_comment_shows_up_to_80_characters_of_a_value(convert):
    for length, shown in ((80, "x" * 80), (81, "x" * 77 + "...")):
        _, _, out, _ = convert(f"sharding_strategy: 1\nignored_modules: {'x' * length}\n")
        assert f"# ignored_modules = {shown}: no equivalent" in out


def test_says_that_yaml_cannot_be_imported(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert from_fsdp1.main([str(tmp_path / "any.yaml")]) == 2
    assert "pip install PyYAML" in capsys.readouterr().err


# 16 ranks on 2 machines: (replicas, shards) by FSDP1's own definition of each strategy.
SHAPES = {
    "FULL_SHARD": (1, 16),
    "SHARD_GRAD_OP": (1, 16),
    "NO_SHARD": (16, 1),
    "HYBRID_SHARD": (2, 8),
    "_HYBRID_SHARD_ZERO2": (2, 8),
}


@pytest.mark.parametrize("precision", ["bf16", "no"])
@pytest.mark.parametrize("strategy", SHAPES)
def test_printed_table_makes_a_valid_configuration(strategy, precision, convert):
    code, tables, _, _ = convert(
        f"num_machines: 2\nmixed_precision: {precision}\nuse_cpu: true\n"
        + part(
            f"fsdp_sharding_strategy: {strategy}, fsdp_offload_params: true, fsdp_forward_prefetch: true, "
            "fsdp_backward_prefetch: NO_PREFETCH, fsdp_activation_checkpointing: true"
        )
    )
    cfg = make_config(train={"global_batch_size": 16, "micro_batch_size": 1}, **tables)
    assert code == 0 and config.mesh_shape(cfg, 16) == (*SHAPES[strategy], 1, 1)
    assert (
        cfg.run.device == "cpu"
        and cfg.parallel.param_dtype == {"bf16": "bfloat16", "no": "float32"}[precision]
    )
    assert cfg.parallel.reshard_after_forward is (
        strategy not in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    )
    assert (cfg.parallel.cpu_offload, cfg.parallel.recompute) == (True, "full")
    assert (cfg.parallel.prefetch_forward, cfg.parallel.prefetch_backward) == (1, 0)


def test_every_row_sets_options_that_there_are():
    """And values that the options take: a row that no file of these tests reaches would fail only on a user."""
    for key, row in from_fsdp1.RULES.items():
        for value in row:
            kind, options, _ = from_fsdp1.resolve(key, "2" if value == "number" else value, "2")
            assert kind in ("kept", "renamed", "implied", "not ours", "no equivalent"), (key, value)
            section = {"run": options} if "device" in options else {"parallel": options}
            make_config(**section)


# A file as `accelerate config` writes it, but for BACKWARD_POST.
WRITTEN = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
enable_cpu_affinity: false
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_POST
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
num_machines: 4
num_processes: 32
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def test_one_comment_for_every_key(convert):
    _, _, out, _ = convert(WRITTEN)
    keys = [line.split(":")[0].strip() for line in WRITTEN.splitlines() if line != "fsdp_config:"]
    comments = [
        line[2:].removeprefix("fsdp_config.").split(" = ")[0]
        for line in out.splitlines()
        if line[:2] == "# "
    ]
    assert comments == [*keys, "reduce_dtype"]  # which the file does not have


def process(path: pathlib.Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tools.migrate.from_fsdp1", path],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONIOENCODING": "ascii"},
    )


def test_process_with_a_value_without_equivalent(tmp_path):
    (tmp_path / "a.yaml").write_text(WRITTEN)
    done = process(tmp_path / "a.yaml")
    assert done.returncode == 1 and tomli.loads(done.stdout)["parallel"]["dp_replicate"] == 4
    assert (
        len(done.stderr.splitlines()) == 1
        and "fsdp_backward_prefetch = BACKWARD_POST" in done.stderr
    )


def test_process_that_succeeds(tmp_path):
    (tmp_path / "ä.yaml").write_text(WRITTEN.replace("_POST", "_PRE"))
    done = process(tmp_path / "ä.yaml")
    assert (done.returncode, done.stderr) == (0, "") and tomli.loads(done.stdout)[
        "parallel"
    ] == BF16 | {
        "dp_replicate": 4,
        "dp_shard": "auto",
        "reshard_after_forward": True,
        "prefetch_forward": 0,
        "prefetch_backward": 1,
        "cpu_offload": False,
    }


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_process_without_a_file(tmp_path, name):
    done = process(tmp_path / name)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr


def test_the_page_shows_what_is_printed(convert):
    page = (REPO / "docs/migrate.md").read_text()
    source, shown = re.search(
        r"<<'END'\n(.*?)END\n.*?```text output\n(.*?)```", page, re.S
    ).groups()
    code, _, out, err = convert(source)
    assert (code, out, err) == (0, shown, "")
