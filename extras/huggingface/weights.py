"""Hugging Face weights of Llama and Qwen3: mapping names, and reading tensors into a rank's local shards.

Conversion only renames: both sides use the half-split RoPE layout, so no rows are permuted.
"""

import contextlib
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import config
from config import ConfigError
from data import hub
from extras.huggingface import config as hf_config
from model.build import meta_model
from model.llama import Llama
from parallel.ranks import all_gather_objects, check_same_on_all_ranks, on_each_rank, rank_and_size
from schema import together, toml

NAMES = {  # our parameter name -> theirs; N: index of the block
    "embedding.weight": "model.embed_tokens.weight",
    "blocks.N.attention_norm.weight": "model.layers.N.input_layernorm.weight",
    "blocks.N.attention.q_proj.weight": "model.layers.N.self_attn.q_proj.weight",
    "blocks.N.attention.k_proj.weight": "model.layers.N.self_attn.k_proj.weight",
    "blocks.N.attention.v_proj.weight": "model.layers.N.self_attn.v_proj.weight",
    "blocks.N.attention.o_proj.weight": "model.layers.N.self_attn.o_proj.weight",
    "blocks.N.attention.q_norm.weight": "model.layers.N.self_attn.q_norm.weight",
    "blocks.N.attention.k_norm.weight": "model.layers.N.self_attn.k_norm.weight",
    "blocks.N.feed_forward_norm.weight": "model.layers.N.post_attention_layernorm.weight",
    "blocks.N.feed_forward.gate_proj.weight": "model.layers.N.mlp.gate_proj.weight",
    "blocks.N.feed_forward.up_proj.weight": "model.layers.N.mlp.up_proj.weight",
    "blocks.N.feed_forward.down_proj.weight": "model.layers.N.mlp.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
CONSTANT = ".rotary_emb.inv_freq"  # the end of a name that old checkpoints have: ignored
DTYPES = ("F32", "BF16", "F16")  # the dtypes that are read, by safetensors' codes
PEFT_WEIGHTS = "adapter_model.safetensors"
SUMMED = 2**20  # elements hashed at a time for fingerprint(), in full rows
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def hf_name(name: str) -> str:
    """blocks.0.attention.q_proj.weight -> model.layers.0.self_attn.q_proj.weight; an adapter's name -> PEFT's. Raises
    ConfigError for a parameter that transformers' Llama and Qwen3 do not have."""
    if is_adapter(name):  # ....q_proj.lora_a.weight -> base_model.model....q_proj.lora_A.weight
        projection, part = name.removesuffix(".weight").rsplit(".", 1)
        theirs = hf_name(f"{projection}.weight").removesuffix(".weight")
        return f"base_model.model.{theirs}.lora_{part[-1].upper()}.weight"
    number = "".join(re.findall(r"^blocks\.(\d+)\.", name))
    ours = re.sub(r"^blocks\.\d+\.", "blocks.N.", name)
    if ours not in NAMES:
        raise ConfigError(
            f"{name}: has no name in a Hugging Face folder of a Llama or Qwen3 model; NAMES in "
            "extras/huggingface/weights.py lists them, for folders of another architecture"
        )
    return NAMES[ours].replace("N", number)


def shapes(m: config.Model) -> dict[str, list[int]]:
    """Shape of each parameter by our name, in the model's order; a tied matrix appears once, as embedding.weight."""
    with torch.device("meta"):
        return {name: list(p.shape) for name, p in Llama(m).named_parameters()}


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file; dtype is safetensors' code."""

    path: Path
    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class Weights:
    """Location of each parameter in a Hugging Face folder. Holds no tensor and no open file."""

    stored: dict[str, Stored]  # by our name
    sums: dict[tuple, int] | None = (
        None  # hash terms of the slices read so far; None: no fingerprint() is needed
    )

    def read_into(self, name: str, offsets: tuple[int, ...], out: Tensor) -> bool:
        """Fills `out`, of any dtype and device, with the slice of its shape that starts at `offsets`. Returns False if
        there is no such parameter. The file is mapped only during the copy, so reading allocates no memory; hashing
        allocates that of a block of rows. Raises ConfigError."""
        if (stored := self.stored.get(name)) is None:
            return False
        rows = len(out) if self.sums is None else SUMMED // math.prod(out.shape[1:])
        for begin in range(0, len(out), max(1, rows)):
            part, where = out[begin : begin + max(1, rows)], (offsets[0] + begin, *offsets[1:])
            with opened(
                stored.path
            ) as file:  # reopened per block: pages read through a mapping count as resident
                values = file.get_slice(stored.name)[
                    tuple(slice(first, first + length) for first, length in zip(where, part.shape))
                ]
                part.copy_(values)
                if (
                    self.sums is not None
                    and not is_adapter(name)
                    and (name, *where) not in self.sums
                ):
                    self.sums[(name, *where)] = weighted_sum(name, where, stored.shape, values)
        return True

    def file_digests(self) -> dict[str, str]:
        """{file name: a hash of its size and of 64 KiB at 16 places}: tells copies of different weights apart."""
        found = {}
        for path in sorted({stored.path for stored in self.stored.values()}):
            size = path.stat().st_size
            digest = hashlib.sha256(str(size).encode())
            with path.open("rb") as file:
                for i in range(16):
                    file.seek(size * i // 16)
                    digest.update(file.read(2**16))
            found[path.name] = digest.hexdigest()
        return found

    def base(self) -> str | None:
        """The fingerprint of the model that all ranks have read, if adapters are trained on it. Collective."""
        return None if self.sums is None else fingerprint(all_gather_objects(self.sums))

    def read(self, name: str) -> Tensor:
        """A full parameter in float32, the dtype of checkpoints. Raises ConfigError."""
        out = torch.empty(self.stored[name].shape)
        self.read_into(name, (0,) * out.ndim, out)
        return out


def weighted_sum(name: str, offsets: tuple[int, ...], shape: list[int], values: Tensor) -> int:
    """A slice's term of its parameter's hash: the sum modulo 2^64 of each value's float32 bits times one random number
    of its row and one of its column (multilinear hashing, https://arxiv.org/abs/1202.4961). The terms add up to the
    same hash however the parameter is sharded."""
    total = values.float().view(torch.int32)
    for dim in reversed(range(values.ndim)):
        noise = hashlib.shake_128(f"{name} {dim}".encode()).digest(8 * shape[dim])
        numbers = torch.frombuffer(bytearray(noise), dtype=torch.int64)[offsets[dim] :][
            : values.shape[dim]
        ]
        total = (total * numbers).sum(-1)
    return int(total.item()) % 2**64


def fingerprint(ranks: list[dict[tuple, int]]) -> str:
    """The hash of a model's weights, from every rank's `sums`; a slice that several ranks read counts once."""
    found: dict[str, int] = {}
    for (name, *_), part in {place: part for sums in ranks for place, part in sums.items()}.items():
        found[name] = (found.get(name, 0) + part) % 2**64
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def weights_to_read(cfg: config.Config, step: int) -> Weights | None:
    """The Hugging Face weights that a run reads when it starts (step 0) or resumes from a checkpoint of this step. At
    the start: `init_from`, and the adapter in lora.init_from. On resume: only a frozen base. Raises ConfigError."""
    if (name := origin(cfg, step)) is None:
        return None
    folder = hub.local(name, hub.WEIGHTS)
    if cfg.lora and not folder.is_dir():
        raise ConfigError(
            f"[model] init_from = {toml(cfg.model.init_from)}: is not there, and the adapters need their "
            "base: name the folder where it lies now (of a tool, --base)"
        )
    stored = open_model(folder, cfg.model)
    if cfg.lora and cfg.lora.init_from and not step:
        stored |= open_adapter(cfg)
    return Weights(stored, {} if cfg.lora else None)


def origin(cfg: config.Config, step: int) -> str | None:
    """The folder or id whose weights a run reads when it starts or resumes after `step`."""
    return None if step and not cfg.lora else cfg.model.init_from


def open_weights(cfg: config.Config, step: int) -> Weights | None:
    """weights_to_read(), each rank's from its own copy of the folder; the others of a machine wait while its first rank
    fetches a repository. Raises ConfigError on every rank if any rank's raises it, or if copies differ."""
    name = None if rank_and_size()[1] else origin(cfg, step)
    on_each_rank(lambda: name and hub.local(name, hub.WEIGHTS))
    weights = on_each_rank(lambda: weights_to_read(cfg, step))
    check_same_on_all_ranks("weights", weights.file_digests() if weights else {})
    return weights


def import_safetensors(path: Path) -> ModuleType:
    """The package, which only Hugging Face folders need. Raises ConfigError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise ConfigError(
            f"{path}: needs safetensors: {sys.executable} -m pip install safetensors"
        ) from None
    return safetensors


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file for reading. Raises ConfigError if it is missing, truncated or corrupt."""
    safetensors = import_safetensors(path)
    try:
        if not path.is_file():  # opening a named pipe would block
            raise ConfigError(
                f"{path}: {'is no regular file' if path.exists() else 'is not there'}"
            )
        with safetensors.safe_open(path, "pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ConfigError(
            f"{path}: is no safetensors file, or cut short: {error}; nothing else is read"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def scan(folder: Path) -> dict[str, Stored]:
    """Every tensor of a Hugging Face folder, by its name there. Raises ConfigError naming every malformed file."""
    index, listed = folder / INDEX, None
    if (folder / SINGLE).exists():
        names = [SINGLE]
    elif index.exists():
        weight_map = hf_config.read_json(index).get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(name, str) and "/" not in name for name in weight_map.values())
        ):
            raise ConfigError(
                f"{index}: needs weight_map: tensors' names, and files of this folder"
            )
        names = sorted({*weight_map.values()})
        listed = {
            (folder / name, key) for key, name in weight_map.items() if not key.endswith(CONSTANT)
        }
    else:
        pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
        raise ConfigError(
            f"{folder}: has neither {SINGLE} nor {INDEX}"
            + (
                f"; {', '.join(pickled)}: pickled files can run code and are not read; load them with transformers and "
                "save_pretrained() what you trust"
                if pickled
                else ""
            )
        )
    headers = together(*(partial(read_header, folder / name) for name in names))
    found = {(stored.path, stored.name): stored for header in headers for stored in header.values()}
    if listed is not None and listed != found.keys():
        raise ConfigError(
            *(
                f"{path}: has no {key}, which {INDEX} lists"
                for path, key in sorted(listed - found.keys())
            ),
            *(
                f"{path}: has {key}, which {INDEX} does not list"
                for path, key in sorted(found.keys() - listed)
            ),
        )
    return {key: stored for (_, key), stored in found.items()}


def read_header(path: Path) -> dict[str, Stored]:
    with opened(path) as file:  # safetensors checks that the tensors fill the file
        entries = {key: file.get_slice(key) for key in file.keys() if not key.endswith(CONSTANT)}  # noqa: SIM118  no dict
        return {
            key: Stored(path, key, entry.get_dtype(), entry.get_shape())
            for key, entry in entries.items()
        }


def open_model(folder: Path, m: config.Model) -> dict[str, Stored]:
    """The tensors of a Hugging Face folder by our names. Reads headers, and compares a tied lm_head.weight. Raises
    ConfigError naming every missing, unexpected or malformed tensor.

    With tied embeddings, lm_head.weight may be present and must equal the embedding; if it does not, config.json is
    wrong about the model.
    """
    found = scan(folder)
    tied = found.pop(hf_name("head.weight"), None) if m.tie_embeddings else None
    stored = matched(folder, found, shapes(m))
    if tied:
        embedding = stored["embedding.weight"]
        with opened(tied.path) as file, opened(embedding.path) as other:
            # mapped: compared without a copy
            pair = file.get_tensor(tied.name), other.get_tensor(embedding.name)
        if pair[0].dtype != pair[1].dtype or not torch.equal(*pair):
            raise ConfigError(
                f"{tied.path}: {tied.name} differs from {embedding.name}, but config.json has "
                "tie_word_embeddings"
            )
    return stored


def open_adapter(cfg: config.Config) -> dict[str, Stored]:
    """The tensors of PEFT's adapter folder, lora.init_from, by our names. Raises ConfigError for a mismatch."""
    assert cfg.lora and cfg.lora.init_from
    path, theirs = (
        Path(cfg.lora.init_from, PEFT_WEIGHTS),
        hf_config.read_adapter(Path(cfg.lora.init_from)),
    )
    if (alpha := theirs.get("lora_alpha")) != cfg.lora.alpha:
        raise ConfigError(
            f"[lora] alpha = {cfg.lora.alpha:g}: {path.parent} has lora_alpha = {alpha}; leave it out"
        )
    parameters = meta_model(cfg.model, cfg.lora).named_parameters()
    return matched(
        path, read_header(path), {name: [*p.shape] for name, p in parameters if is_adapter(name)}
    )


def matched(path: Path, found: dict[str, Stored], ours: dict[str, list[int]]) -> dict[str, Stored]:
    """The found tensors by our names. ours: expected shapes. Raises ConfigError if any is missing, extra or wrong."""
    wanted = {hf_name(name): shape for name, shape in ours.items()}
    problems = [f"{path}: has no {name}" for name in wanted.keys() - found.keys()]
    for name, stored in found.items():
        if name not in wanted:
            problems.append(f"{stored.path}: has {name}, which this model does not")
        elif stored.dtype not in DTYPES or stored.shape != wanted[name]:
            problems.append(
                f"{stored.path}: {name} is {stored.dtype} {stored.shape}; must be {' or '.join(DTYPES)} of "
                f"shape {wanted[name]}"
            )
    if problems:
        raise ConfigError(*sorted(problems))
    return {name: found[hf_name(name)] for name in ours}
