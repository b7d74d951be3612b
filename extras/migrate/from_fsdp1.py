"""FSDP1 or Accelerate settings in YAML -> our [parallel] table in TOML, with a comment on what
became of every key.

    ./run_train.sh -m migrate.from_fsdp1 accelerate.yaml

Reads the output of `accelerate config`, or FullyShardedDataParallel's keyword arguments as YAML.
Exits with 1 if a key or value is unknown, contradicts another or has no equivalent (stderr repeats
those), with 2 if it cannot read the file.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import tomli

import config
from config import ConfigError, run_tool
from schema import nearest

# Keys | their values | our options and a remark, or why there are none. Values are as word()
# normalizes them. A digit next to a name is torch's enum value; `number` is any integer above 0.
# FSDP keys come first, also with prefix fsdp_.
FSDP_TABLE = """
version | 1 2 | implied: FSDP2, always
sharding_strategy | FULL_SHARD 1 | dp_replicate = 1, dp_shard = "auto", reshard_after_forward = true
sharding_strategy | SHARD_GRAD_OP 2 | dp_replicate = 1, dp_shard = "auto", reshard_after_forward = false
sharding_strategy | NO_SHARD 3 | dp_replicate = "auto", dp_shard = 1; each rank is a replica
sharding_strategy | HYBRID_SHARD 4 | dp_replicate = {machines}, dp_shard = "auto", reshard_after_forward = true
sharding_strategy | HYBRID_SHARD_ZERO2 5 | dp_replicate = {machines}, dp_shard = "auto", reshard_after_forward = false
reshard_after_forward | TRUE FALSE | reshard_after_forward = {value}
reshard_after_forward | 0 number | no equivalent: true, false, or HYBRID_SHARD, whose all-gathers stay inside a machine
forward_prefetch | TRUE | prefetch_forward = 1
forward_prefetch | FALSE | prefetch_forward = 0
backward_prefetch backward_prefetch_policy | BACKWARD_PRE 1 | prefetch_backward = 1
backward_prefetch backward_prefetch_policy | BACKWARD_POST 2 | no equivalent: FSDP2 gathers before the gradients, always
backward_prefetch backward_prefetch_policy | NO_PREFETCH NULL | prefetch_backward = 0; FSDP2's order, still one ahead
offload_params cpu_offload | TRUE FALSE | cpu_offload = {value}
activation_checkpointing | TRUE | recompute = "full"
activation_checkpointing | FALSE | recompute = "none"
param_dtype reduce_dtype output_dtype | BFLOAT16 FLOAT32 | {key} = "{value}"
param_dtype reduce_dtype output_dtype | FLOAT16 | no equivalent: float16 needs a loss scaler; write bfloat16
param_dtype | NULL | param_dtype = "float32"
buffer_dtype | BFLOAT16 FLOAT32 FLOAT16 | implied: dropped, FSDP2 leaves buffers as they are; here that is float32
cast_forward_inputs cast_root_forward_inputs | TRUE FALSE | implied: the model casts its inputs by itself
keep_low_precision_grads | FALSE | implied: gradients are kept in float32, always
keep_low_precision_grads | TRUE | no equivalent: gradients are kept in float32, always
auto_wrap_policy | TRANSFORMER_BASED_WRAP TRANSFORMER_AUTO_WRAP_POLICY MODULEWRAPPOLICY | implied: one unit per block
auto_wrap_policy | SIZE_BASED_WRAP SIZE_BASED_AUTO_WRAP_POLICY NO_WRAP | no equivalent: units are one per block, always
transformer_layer_cls_to_wrap min_num_params | any | implied: units are one per block, always
state_dict_type | SHARDED_STATE_DICT 3 FULL_STATE_DICT 1 | implied: checkpoints are always sharded, and load anywhere
state_dict_type | LOCAL_STATE_DICT 2 | no equivalent: there are no flat parameters; write SHARDED_STATE_DICT
sync_module_states cpu_ram_efficient_loading | TRUE FALSE | implied: each rank makes its own shards of the same weights
use_orig_params limit_all_gathers | TRUE FALSE | implied: FSDP2 keeps the parameters and bounds its memory, always
device_id param_init_fn | any | implied: each rank takes its local GPU; parallel/materialize.py gives values
ignored_modules ignored_states ignored_parameters ignored_params | any | no equivalent: every parameter is sharded
process_group device_mesh mesh | any | no equivalent: the mesh spans all ranks; set dp_replicate and dp_shard
"""
ACCELERATE_TABLE = """
distributed_type | FSDP | implied: always
mixed_precision | BFLOAT16 | param_dtype = "bfloat16"
mixed_precision | FALSE NULL | param_dtype = "float32"
mixed_precision | FLOAT16 | no equivalent: float16 needs a loss scaler; write bf16
num_machines | number | not ours: sbatch --nodes={value} says it; a hybrid strategy makes it dp_replicate
num_processes | number | not ours: the launch says it, by NPROC or SLURM
gradient_accumulation_steps | number | not ours: train.global_batch_size = {value} x micro_batch_size x ranks says it
sync_each_batch | TRUE FALSE | sync_every_micro_batch = {value}
use_cpu | TRUE | device = "cpu"
use_cpu | FALSE | implied: a GPU where there is one
dynamo_backend | INDUCTOR | compile = true; each block by itself
dynamo_backend | FALSE | compile = false
dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph | DEFAULT FALSE | implied: torch.compile's own defaults
dynamo_use_regional_compilation | TRUE FALSE | implied: each block is compiled by itself
parallelism_config_dp_replicate_size | number | dp_replicate = {value}
parallelism_config_dp_shard_size | number | dp_shard = {value}
parallelism_config_tp_size | number | tp = {value}
parallelism_config_cp_size | number | cp = {value}
parallelism_config_cp_comm_strategy | any | not ours: keys and values are all-gathered
mpirun_config | any | not ours: run_train.sh launches
tp_config | any | no equivalent: write parallelism_config_tp_size
deepspeed_config megatron_lm_config fp8_config | any | no equivalent: there is FSDP alone
compute_environment machine_rank main_process_ip main_process_port rdzv_backend | any | not ours: run_train.sh launches
same_network gpu_ids main_training_function enable_cpu_affinity commands | any | not ours: run_train.sh launches
debug command_file ipex_config downcast_bf16 tpu_env tpu_vm tpu_name tpu_zone | any | not ours: no part of sharding
tpu_use_cluster tpu_use_sudo | any | not ours: no part of sharding
"""
SYNONYMS = {
    "YES": "TRUE",
    "ON": "TRUE",
    "NO": "FALSE",
    "OFF": "FALSE",
    "": "NULL",
    "~": "NULL",
    "NONE": "NULL",
    "BF16": "BFLOAT16",
    "FP32": "FLOAT32",
    "FLOAT": "FLOAT32",
    "FP16": "FLOAT16",
    "HALF": "FLOAT16",
}
# keys whose value may be a table of the keys above
NESTED = {
    "fsdp_config",
    "mixed_precision",
    "mixed_precision_policy",
    "mp_policy",
    "cpu_offload",
    "dynamo_config",
    "parallelism_config",
}
NUMBER = re.compile("[1-9][0-9]{0,8}")


def rules(table: str) -> dict[str, dict[str, str]]:
    """{key: {value: its effect}}"""
    found = {}
    for row in table.strip().split("\n"):
        keys, values, effect = row.split(" | ")
        for key in keys.split():
            found.setdefault(key, {}).update(dict.fromkeys(values.split(), effect))
    return found


FSDP = rules(FSDP_TABLE)
# Accelerate also accepts a strategy's name here.
FSDP["reshard_after_forward"] |= {
    name: effect for name, effect in FSDP["sharding_strategy"].items() if len(name) > 1
}
RULES = FSDP | rules(ACCELERATE_TABLE)


def word(value: Any) -> str:
    """A value in normalized spelling: `ShardingStrategy._hybrid_shard` becomes HYBRID_SHARD, `no`
    FALSE."""
    if not isinstance(value, str):
        return "[...]" if value else "NULL"
    bare = re.sub(r"^[A-Za-z_][\w.]*\.", "", value.strip()).strip("_").replace("-", "_").upper()
    return SYNONYMS.get(bare, bare)


def show(value: Any) -> str:
    """A key or value for a comment: printable ASCII, at most 80 characters."""
    text = ascii(value)[1:-1] if isinstance(value, str) else ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def resolve(name: str, value: Any, machines: str) -> tuple[str, dict[str, Any], str]:
    """(outcome for a key, the options that it sets, a remark)."""
    if name not in RULES:
        return (
            "unknown",
            {},
            f"no such key is known{nearest(name, [*RULES, *(f'fsdp_{key}' for key in FSDP)])}",
        )
    row = RULES[name]
    text = word(value)
    if text in row:
        effect = row[text]
    elif text == "NULL":
        effect = "implied: not set there, so the default here stands"
    elif NUMBER.fullmatch(text) and "number" in row:
        effect = row["number"]
    else:
        effect = row.get("any")
    if not effect:
        known = [value for value in row if not value.isdigit()] or [*row]
        return "unknown", {}, f"known values are {', '.join(known)}{nearest(text, known)}"
    if "{machines}" in effect and not NUMBER.fullmatch(machines):
        return (
            "no equivalent",
            {},
            f"num_machines is {show(machines)}, not a number of replicas; set it, convert again",
        )
    effect = effect.format(key=name, value=text.lower(), machines=machines)
    kind, colon, remark = effect.partition(": ")
    if colon:
        return kind, {}, remark
    settings, _, remark = effect.partition("; ")
    options = tomli.loads(settings.replace(", ", "\n"))
    return "kept" if name in options else "renamed", options, remark


def entries(table: dict, where: str = "") -> Iterator[tuple[str, str, Any]]:
    """(dotted path, key as in RULES, value) of every entry in the file."""
    for key, value in table.items():
        bare = key.lower().removeprefix("fsdp_")
        name = bare if bare in FSDP else key.lower()
        if isinstance(value, dict) and value and name in NESTED:
            yield from entries(value, f"{where}{key}.")
        else:
            yield where + key, name, value


def convert(raw: dict) -> tuple[dict[str, Any], list[str], list[str]]:
    """(our options, a comment on every key, the comments that report problems)."""
    named = {name: value for _, name, value in entries(raw) if word(value) != "NULL"}
    machines = str(named.get("num_machines", "missing"))
    options: dict[str, Any] = {}
    set_by: dict[str, str] = {}  # option -> the key that set it first
    comments = []
    problems = []
    for where, name, value in entries(raw):
        kind, settings, remark = resolve(name, value, machines)
        for option, setting in settings.items():
            if option not in options:
                options[option] = setting
                set_by[option] = show(where)
            elif options[option] != setting:
                kind = "contradiction"
                first = json.dumps(options[option])
                remark = f"{set_by[option]} says {option} = {first}; keep one of the two"
        comment = comment_on(f"{show(where)} = {show(value)}", kind, settings, remark)
        comments.append(comment)
        if kind in ("unknown", "no equivalent", "contradiction"):
            problems.append(comment)
    if "mixed_precision" not in named and "param_dtype" not in named:
        options["param_dtype"] = "float32"
        comments.append("param_dtype = float32, as no other precision is named there")
    if options.get("param_dtype") == "bfloat16" and "reduce_dtype" not in named:
        options["reduce_dtype"] = "float32"
        comments.append(
            "reduce_dtype = float32, where FSDP1 and Accelerate would reduce gradients in bfloat16 "
            "as well"
        )
    return options, comments, problems


def comment_on(entry: str, kind: str, settings: dict[str, Any], remark: str) -> str:
    """The line on an entry: what became of it, the options that it sets, and why."""
    set_options = [f"{option} = {json.dumps(value)}" for option, value in settings.items()]
    texts = [entry, kind, ", ".join(set_options), remark]
    return ": ".join(text for text in texts if text)


def read(path: str) -> dict:
    """The file's tables, each scalar as a string. Nothing in it is executed. Aliases are refused: a
    few of them could expand to gigabytes. Raises ConfigError if there is nothing to convert."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError("to read YAML, install PyYAML: pip install PyYAML") from None

    class Loader(yaml.BaseLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
            seen = []
            for key, _ in node.value:
                if key.value in seen:
                    raise ConfigError(
                        f"line {key.start_mark.line + 1}: {show(key.value)} stands twice; keep one"
                    )
                seen.append(key.value)
            return super().construct_mapping(node, deep=True)

    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8-sig")
        for event in yaml.parse(text, yaml.BaseLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None):
                raise ConfigError(
                    f"line {event.start_mark.line + 1}: an alias (*name) or a tag (!name) is not read"
                )
        raw = yaml.load(text, Loader)
    except (
        OSError,
        ValueError,
        OverflowError,
        RecursionError,
        yaml.YAMLError,
    ) as error:  # an escape may overflow
        raise ConfigError(f"cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not raw or not isinstance(raw, dict):
        raise ConfigError("is empty, or holds no keys; `accelerate config` writes such a file")
    table = raw.get("fsdp_config")
    has_table = isinstance(table, dict) and table
    if not has_table and not any(name in FSDP for _, name, _ in entries(raw)):
        raise ConfigError(
            "has no FSDP part: neither a table fsdp_config nor FullyShardedDataParallel's arguments"
        )
    return raw


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="run_train.sh -m migrate.from_fsdp1", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("file", metavar="ACCELERATE.yaml")
    path = parser.parse_args(argv).file
    try:
        options, comments, problems = convert(read(path))
    except ConfigError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    run = {"run": {"device": options.pop("device")}} if "device" in options else {}
    print(
        *(f"# {text}" for text in comments),
        config.SCHEMA.to_toml({"parallel": options, **run}),
        sep="\n",
        end="",
    )
    for text in problems:
        print(f"{path}: {text}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    run_tool(main)
