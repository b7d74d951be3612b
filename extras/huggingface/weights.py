"""Maps the names of Llama's and Qwen3's Hugging Face weights, and reads tensors into local shards.

Conversion only renames. Both sides use the half-split RoPE layout, so no rows are permuted.
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
from config import ConfigError, together, toml
from extras.huggingface import config as hf_config
from extras.huggingface import hub
from model.build import meta_model
from model.llama import Llama
from parallel.ranks import all_gather_objects, check_same_on_all_ranks, on_each_rank, rank_and_size

# our parameter name -> theirs; N is the index of the block
NAMES = {
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
# a single file of tensors, or the index of several files
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
# ignored tensors of old checkpoints have names that end like this
CONSTANT = ".rotary_emb.inv_freq"
# supported dtypes, as safetensors' codes
DTYPES = ("F32", "BF16", "F16")
# elements to hash at a time for fingerprint(), in full rows
HASHED_AT_ONCE = 2**20
ROWS_COMPARED = 1024  # rows of a tied matrix to compare at a time
MOST_PROBLEMS = 10  # an error names at most so many tensors
# names of wrapper modules (DDP, torch.compile, FSDP1), which the names of saved tensors may contain
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def hf_name(name: str) -> str:
    """Maps our name of a parameter to transformers', and an adapter's name to PEFT's.

    blocks.0.attention.q_proj.weight -> model.layers.0.self_attn.q_proj.weight. Raises ConfigError
    if transformers' Llama and Qwen3 have no such parameter.
    """
    if is_adapter(name):  # ....q_proj.lora_a.weight -> base_model.model....q_proj.lora_A.weight
        projection, matrix = name.removesuffix(".weight").rsplit(".lora_", 1)
        theirs = hf_name(f"{projection}.weight").removesuffix(".weight")
        return f"base_model.model.{theirs}.lora_{matrix.upper()}.weight"
    block = re.match(r"blocks\.(\d+)\.", name)
    number = block[1] if block else ""
    pattern = re.sub(r"^blocks\.\d+\.", "blocks.N.", name)
    if pattern not in NAMES:
        raise ConfigError(
            f"{name}: has no name in a Hugging Face folder of a Llama or Qwen3 model; NAMES in "
            "extras/huggingface/weights.py lists them, for folders of another architecture"
        )
    return NAMES[pattern].replace("N", number)


def shapes(m: config.Model) -> dict[str, list[int]]:
    """The shape of each parameter by our name, in the model's order. Contains a tied matrix once,
    as embedding.weight."""
    with torch.device("meta"):
        return {name: [*parameter.shape] for name, parameter in Llama(m).named_parameters()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file. dtype is safetensors' code."""

    path: Path
    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class Weights:
    """The location of each parameter in a Hugging Face folder. Has no tensors and no open files."""

    stored: dict[str, StoredTensor]  # by our name
    # hash terms of the slices read so far, by (our name, *offsets); None if no fingerprint() is
    # needed
    sums: dict[tuple, int] | None = None

    def read_into(self, name: str, offsets: tuple[int, ...], out: Tensor) -> bool:
        """Fills `out` with the parameter's slice of out's shape that starts at `offsets`. `out` may
        have any dtype and device.

        Maps the file only during the copy, so reading allocates no memory. Hashing allocates a
        block of rows. Returns False if there is no such parameter. Raises ConfigError.
        """
        stored = self.stored.get(name)
        if stored is None:
            return False
        rows = len(out)
        if self.sums is not None:
            rows = HASHED_AT_ONCE // math.prod(out.shape[1:])
        rows = max(1, rows)
        for begin in range(0, len(out), rows):
            start = (offsets[0] + begin, *offsets[1:])
            self._read_slice(name, stored, start, out[begin : begin + rows])
        return True

    def _read_slice(
        self, name: str, stored: StoredTensor, offsets: tuple[int, ...], out: Tensor
    ) -> None:
        ranges = [slice(first, first + length) for first, length in zip(offsets, out.shape)]
        # open the file for each slice, because pages read through a mapping count as resident
        with open_safetensors(stored.path) as file:
            values = file.get_slice(stored.name)[tuple(ranges)]
            out.copy_(values)
            if self.sums is None or is_adapter(name):
                return
            key = (name, *offsets)
            if key not in self.sums:
                self.sums[key] = weighted_sum(name, offsets, stored.shape, values)

    def file_digests(self) -> dict[str, str]:
        """A hash of each file's size and of 64 KiB at 16 offsets, by file name. It distinguishes
        copies of different weights."""
        digests = {}
        for path in sorted({stored.path for stored in self.stored.values()}):
            size = path.stat().st_size
            digest = hashlib.sha256(str(size).encode())
            with path.open("rb") as file:
                for i in range(16):
                    file.seek(size * i // 16)
                    digest.update(file.read(2**16))
            digests[path.name] = digest.hexdigest()
        return digests

    def base(self) -> str | None:
        """The fingerprint of the model that all ranks have read; None if the run has no adapters.
        Collective."""
        return None if self.sums is None else fingerprint(all_gather_objects(self.sums))

    def read(self, name: str) -> Tensor:
        """Reads a full parameter in float32, the dtype of checkpoints. Raises ConfigError."""
        full = torch.empty(self.stored[name].shape)
        self.read_into(name, (0,) * full.ndim, full)
        return full


def weighted_sum(name: str, offsets: tuple[int, ...], shape: list[int], values: Tensor) -> int:
    """A slice's term in the hash of its parameter, whose shape is `shape`.

    Multiplies each value's float32 bits by a random number of its row and one of its column, and
    sums the products modulo 2^64 (multilinear hashing, https://arxiv.org/abs/1202.4961). The terms
    add up to the same hash however the parameter is sharded.
    """
    total = values.float().view(torch.int32)
    for dim in reversed(range(values.ndim)):
        random_bytes = hashlib.shake_128(f"{name} {dim}".encode()).digest(8 * shape[dim])
        factors = torch.frombuffer(bytearray(random_bytes), dtype=torch.int64)
        begin = offsets[dim]
        total = (total * factors[begin : begin + values.shape[dim]]).sum(-1)
    return int(total.item()) % 2**64


def fingerprint(ranks: list[dict[tuple, int]]) -> str:
    """The hash of a model's weights, from every rank's `sums`."""
    terms = {}
    for sums in ranks:
        terms |= sums  # counts a slice once even if several ranks read it
    hashes: dict[str, int] = {}
    for (name, *_), term in terms.items():
        hashes[name] = (hashes.get(name, 0) + term) % 2**64
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


# Weights of a run


def weights_to_read(cfg: config.Config, step: int) -> Weights | None:
    """The Hugging Face weights that a run reads when it starts (step 0) or resumes after `step`.

    At the start, a run reads `init_from`, and the adapter in lora.init_from. On resume, it reads
    only a frozen base. Raises ConfigError.
    """
    name = origin(cfg, step)
    if name is None:
        return None
    folder = hub.local(name, hub.WEIGHTS)
    if cfg.lora and not folder.is_dir():
        raise ConfigError(
            f"[model] init_from = {toml(cfg.model.init_from)}: is not there, and the adapters need "
            "their base: name the folder where it lies now (of a tool, --base)"
        )
    stored = open_model(folder, cfg.model)
    if cfg.lora is None:
        return Weights(stored)
    if cfg.lora.init_from and step == 0:
        stored |= open_adapter(cfg)
    return Weights(stored, sums={})


def origin(cfg: config.Config, step: int) -> str | None:
    """The folder or id whose weights a run reads when it starts or resumes after `step`."""
    if step > 0 and cfg.lora is None:  # all weights are in the checkpoint
        return None
    return cfg.model.init_from


def open_weights(cfg: config.Config, step: int) -> Weights | None:
    """Calls weights_to_read() on every rank, which may have its own copy of the folder. Collective.

    The first rank of each machine fetches a repository, while the others wait. Raises ConfigError
    on every rank if it is raised on any rank, or if the copies differ.
    """
    name = origin(cfg, step)
    _, local_rank, _ = rank_and_size()

    def fetch() -> None:
        if name and local_rank == 0:
            hub.local(name, hub.WEIGHTS)

    on_each_rank(fetch)
    weights = on_each_rank(lambda: weights_to_read(cfg, step))
    check_same_on_all_ranks("weights", weights.file_digests() if weights else {})
    return weights


# Files


def import_safetensors(path: Path) -> ModuleType:
    """Imports safetensors, which only Hugging Face folders need. Raises ConfigError if it is not
    installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise ConfigError(
            f"{path}: needs safetensors: {sys.executable} -m pip install safetensors"
        ) from None
    return safetensors


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file for reading. Raises ConfigError if it is missing, truncated or
    corrupt."""
    safetensors = import_safetensors(path)
    try:
        if not path.is_file():  # opening a named pipe would block
            problem = "is no regular file" if path.exists() else "is not there"
            raise ConfigError(f"{path}: {problem}")
        with safetensors.safe_open(path, "pt") as file:
            yield file
    except safetensors.SafetensorError as error:
        hub.refuse_pointer(path)
        raise ConfigError(
            f"{path}: is no safetensors file, or cut short: {error}; nothing else is read"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Reads the header of a safetensors file. Returns its tensors by name. Raises ConfigError."""
    tensors = {}
    with open_safetensors(path) as file:  # safetensors checks that the tensors fill the file
        for name in file.keys():  # noqa: SIM118  not a dict
            if not name.endswith(CONSTANT):
                entry = file.get_slice(name)
                tensors[name] = StoredTensor(path, name, entry.get_dtype(), entry.get_shape())
    return tensors


def scan(folder: Path) -> dict[str, StoredTensor]:
    """Lists every tensor of a Hugging Face folder, by its name there. Raises ConfigError, which
    names every malformed file."""
    index = folder / INDEX
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if not index.exists():
        raise ConfigError(f"{folder}: has neither {SINGLE} nor {INDEX}")
    weight_map = read_weight_map(index)
    file_names = sorted({*weight_map.values()})
    for name in file_names:  # report only the first pointer
        hub.refuse_pointer(folder / name)
    headers = together(*(partial(read_header, folder / name) for name in file_names))
    header_of = dict(zip(file_names, headers))
    tensors = {}
    problems = []
    for name, file_name in weight_map.items():
        if name in header_of[file_name]:
            tensors[name] = header_of[file_name][name]
        elif not name.endswith(CONSTANT):
            problems.append(f"{folder / file_name}: has no {name}, which {INDEX} lists")
    if problems:
        raise ConfigError(*problems)
    return tensors


def read_weight_map(index: Path) -> dict[str, str]:
    """Reads {tensor: file} from an index. Raises ConfigError."""
    weight_map = hf_config.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        weight_map = {}
    in_this_folder = all(isinstance(name, str) and "/" not in name for name in weight_map.values())
    if not weight_map or not in_this_folder:
        raise ConfigError(f"{index}: needs weight_map: tensors' names, and files of this folder")
    return weight_map


def open_model(folder: Path, m: config.Model) -> dict[str, StoredTensor]:
    """The tensors of a Hugging Face folder by our names. Reads only headers, and the values of a
    tied lm_head.weight. Raises ConfigError, which names missing, unexpected and malformed
    tensors."""
    tensors = without_wrappers(scan(folder))
    head = None
    if m.tie_embeddings:
        head = tensors.pop(hf_name("head.weight"), None)
    stored = match_names(folder, tensors, shapes(m))
    if head:
        check_tied(head, stored["embedding.weight"])
    return stored


def check_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    """Raises ConfigError if a folder has a tied lm_head.weight that differs from the embedding. In
    this case, config.json is wrong about the model."""
    with (
        open_safetensors(head.path) as head_file,
        open_safetensors(embedding.path) as embedding_file,
    ):
        # these are mapped; the comparison copies a block of rows at a time to float32
        head_weight = head_file.get_tensor(head.name)
        embedding_weight = embedding_file.get_tensor(embedding.name)
    is_equal = head_weight.shape == embedding_weight.shape
    blocks = zip(head_weight.split(ROWS_COMPARED), embedding_weight.split(ROWS_COMPARED))
    if not is_equal or not all(torch.equal(a.float(), b.float()) for a, b in blocks):
        raise ConfigError(
            f"{head.path}: {head.name} differs from {embedding.name}, but config.json has "
            "tie_word_embeddings"
        )


def open_adapter(cfg: config.Config) -> dict[str, StoredTensor]:
    """The tensors of PEFT's adapter folder, lora.init_from, by our names. Raises ConfigError if
    they do not fit."""
    assert cfg.lora and cfg.lora.init_from
    folder = Path(cfg.lora.init_from)
    alpha = hf_config.read_adapter(folder).get("lora_alpha")
    if alpha != cfg.lora.alpha:
        raise ConfigError(
            f"[lora] alpha = {cfg.lora.alpha:g}: {folder} has lora_alpha = {alpha}; leave it out"
        )
    expected = {}
    for name, parameter in meta_model(cfg.model, cfg.lora).named_parameters():
        if is_adapter(name):
            expected[name] = [*parameter.shape]
    path = folder / PEFT_WEIGHTS
    if not path.exists():
        raise ConfigError(f"{path}: is not there")
    return match_names(path, without_wrappers(read_header(path)), expected)


def without_wrappers(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Removes WRAPPERS, which no parameter's name contains, from the names of tensors. Raises
    ConfigError if two tensors then have the same name."""
    unwrapped: dict[str, StoredTensor] = {}
    for tensor in tensors.values():
        name = ".".join(part for part in tensor.name.split(".") if part not in WRAPPERS)
        if name in unwrapped:
            raise ConfigError(
                f"{tensor.path}: {tensor.name} and {unwrapped[name].name} are both {name}; keep one"
            )
        unwrapped[name] = tensor
    return unwrapped


def match_names(
    path: Path, tensors: dict[str, StoredTensor], expected: dict[str, list[int]]
) -> dict[str, StoredTensor]:
    """The tensors of a file or folder by our names. `expected` has the shapes by our names. Raises
    ConfigError, which names the first missing, unexpected or malformed tensors."""
    their_shapes = {hf_name(name): shape for name, shape in expected.items()}
    if tensors and not their_shapes.keys() & tensors.keys():
        raise ConfigError(
            f"{path}: names its tensors as no Llama or Qwen3 model of transformers does, "
            f"{min(tensors)} for example, and has no {min(their_shapes)}; load it with what wrote "
            "it, and save it with transformers' or PEFT's save_pretrained()"
        )
    problems = [f"{path}: has no {name}" for name in their_shapes.keys() - tensors.keys()]
    for name, tensor in tensors.items():
        if name not in their_shapes:
            problems.append(f"{tensor.path}: has {name}, which this model does not")
        elif tensor.dtype not in DTYPES or tensor.shape != their_shapes[name]:
            problems.append(
                f"{tensor.path}: {name} is {tensor.dtype} {tensor.shape}; must be "
                f"{' or '.join(DTYPES)} of shape {their_shapes[name]}"
            )
    if problems:
        shown = sorted(problems)[:MOST_PROBLEMS]
        if len(problems) > MOST_PROBLEMS:
            shown.append(
                f"{path}: {len(problems) - MOST_PROBLEMS} more tensors do not fit the model"
            )
        raise ConfigError(*shown)
    return {name: tensors[hf_name(name)] for name in expected}
