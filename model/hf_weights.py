"""Weights of a Hugging Face folder of the Llama family: their names and ours, and reading them into a run's shards.

Converting is renaming: both sides turn the halves of a head (RoPE), so no row is permuted.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import config
import hf_config
from config import ConfigError
from model.llama import Llama
from model.safetensors import BLOCK, Stored, differences, read_elements, read_header

NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "blocks.N.attention_norm.weight": "model.layers.N.input_layernorm.weight",
    "blocks.N.attention.q_proj.weight": "model.layers.N.self_attn.q_proj.weight",
    "blocks.N.attention.k_proj.weight": "model.layers.N.self_attn.k_proj.weight",
    "blocks.N.attention.v_proj.weight": "model.layers.N.self_attn.v_proj.weight",
    "blocks.N.attention.o_proj.weight": "model.layers.N.self_attn.o_proj.weight",
    "blocks.N.feed_forward_norm.weight": "model.layers.N.post_attention_layernorm.weight",
    "blocks.N.feed_forward.gate_proj.weight": "model.layers.N.mlp.gate_proj.weight",
    "blocks.N.feed_forward.up_proj.weight": "model.layers.N.mlp.up_proj.weight",
    "blocks.N.feed_forward.down_proj.weight": "model.layers.N.mlp.down_proj.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "chat_template.jinja")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def hf_name(name: str) -> str:
    """A parameter's name there. Raises KeyError for one that has none."""
    parts = name.split(".")
    number = parts[1] if parts[0] == "blocks" else ""
    return NAMES[name.replace(f".{number}.", ".N.", 1) if number else name].replace(".N.", f".{number}.")


def shapes(m: config.Model) -> dict[str, list[int]]:
    """Shape of each parameter by our name, in the model's order; a tied matrix once, as embedding.weight."""
    with torch.device("meta"):
        return {name: list(p.shape) for name, p in Llama(m).named_parameters()}


@dataclass(frozen=True)
class Weights:
    """Where each parameter lies in a Hugging Face folder; made by open_weights(), on one rank, for all."""

    stored: dict[str, Stored]  # by our name

    def read_rows(self, name: str, first: int, out: Tensor) -> None:
        """Fills `out` (rows, ...), of any dtype and device, with a parameter's rows from `first` on: reads these bytes
        only, and holds a block of them beside `out`. Raises ConfigError."""
        read_elements(self.stored[name], first * math.prod(out.shape[1:]), out.view(-1))

    def read_into(self, name, offsets, out):
        self.read_rows(name, offsets[0], out)

    def read(self, name: str) -> Tensor:
        """A whole parameter in float32, as checkpoints hold it."""
        out = torch.empty(self.stored[name].shape)
        self.read_rows(name, 0, out)
        return out


def open_weights(m: config.Model) -> Weights | None:
    """The weights that `init_from` names, None where it is absent. Reads the headers of the folder's safetensors files
    and checks them against the model. Raises ConfigError naming all that is missing, unexpected or malformed.

    Ignored: rotary_emb.inv_freq, a constant that old checkpoints hold. With tied embeddings lm_head.weight may be there
    too, and must be equal to the embedding: config.json would be wrong about a model where it is not.
    """
    if m.init_from is None:
        return None
    return match_weights(Path(m.init_from), scan(Path(m.init_from)), m)


def scan(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder by its name there."""
    if (folder / SINGLE).exists():
        files, weight_map = [SINGLE], None
    elif (folder / INDEX).exists():
        weight_map = hf_config.read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(
                isinstance(name, str) and name not in ("", ".", "..") and "/" not in name and "\0" not in name
                for name in weight_map.values()):
            raise ConfigError(f"{folder / INDEX}: needs weight_map: tensors' names, and files of this folder")
        files = sorted(set(weight_map.values()))
    else:
        pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
        raise ConfigError(f"{folder}: has neither {SINGLE} nor {INDEX}" + (
            f"; {', '.join(pickled)}: pickled files can run code and are not read; load them with transformers and "
            "save_pretrained() what you trust" if pickled else ""))
    found: dict[str, Stored] = {}
    problems = []
    for file in files:
        try:
            tensors, wrong = read_header(folder / file)
        except ConfigError as error:
            problems += error.problems
            continue
        except OSError as error:
            problems.append(f"{folder / file}: cannot be read: {error.strerror}")
            continue
        problems += wrong
        if weight_map is not None:
            problems += [f"{folder / file}: has no {name}, which {INDEX} says is there"
                         for name, there in weight_map.items() if there == file and name not in tensors]
            problems += [f"{folder / file}: has {name}, which {INDEX} does not say is there"
                         for name in tensors if weight_map.get(name) != file]
        found |= tensors
    if problems:
        raise ConfigError(*problems)
    return found


def match_weights(folder: Path, found: dict[str, Stored], m: config.Model) -> Weights:
    """The tensors of scan() under our names. Raises ConfigError where they are not this model's."""
    wanted = {hf_name(name): shape for name, shape in shapes(m).items()}
    head, embedding = hf_name("head.weight"), hf_name("embedding.weight")
    found = {name: stored for name, stored in found.items() if not name.endswith(".rotary_emb.inv_freq")}
    tied = found.pop(head, None) if m.tie_embeddings else None
    problems = sorted(differences(folder, found, wanted))
    if tied and not problems and not _equal(tied, found[embedding]):
        problems.append(f"{tied.path}: {head} differs from {embedding}, but config.json says tie_word_embeddings")
    if problems:
        raise ConfigError(*problems)
    return Weights({name: found[hf_name(name)] for name in shapes(m)})


def _equal(one: Stored, other: Stored) -> bool:
    if (one.shape, one.code) != (other.shape, other.code):
        return False
    step = BLOCK // 4
    for start in range(0, math.prod(one.shape), step):
        parts = [torch.empty(min(step, math.prod(one.shape) - start)) for _ in range(2)]
        for stored, part in zip((one, other), parts):
            read_elements(stored, start, part)
        if not torch.equal(*parts):
            return False
    return True


def has_another_tokenizer(folder: Path, files: Iterable[Path]) -> bool:
    """Whether a Hugging Face folder has a tokenizer, and it is none of these files."""
    theirs = [path.read_bytes() for name in TOKENIZER_FILES[:2] if (path := folder / name).is_file()]
    return bool(theirs) and not any(path.read_bytes() in theirs for path in files)
