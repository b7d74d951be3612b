"""Hugging Face folders of Llama and Qwen3 models, from checkpoints and into them.

    ./run_train.sh -m huggingface export CKPT_OR_RUN OUT [--dtype bfloat16] [--shard-gib 2] [--adapter]
                                                 [--base HF_DIR]
    ./run_train.sh -m huggingface import HF_DIR OUT

Export reads a checkpoint of any world size, or a run's newest valid one. It writes config.json,
generation_config.json, safetensors and the tokenizer, and holds one output file in memory. Import
writes a checkpoint folder to generate from or to export again, and holds one tensor in memory. A
run needs no import: model.init_from reads HF_DIR directly. OUT must be new or an empty folder; it
is published atomically. On failure, exits with 2 and prints each problem.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import config
import system
from checkpoint import catalog, compare, load, newest, save
from config import ConfigError, together
from extras.huggingface import config as hf_config
from extras.huggingface import hub
from extras.huggingface import weights as hf_weights
from model.build import meta_model
from optim import Progress
from tools.prepare.tokenizer import TOKENIZERS, Tokenizer
from tools.reference import check_export
from tools.transformers_tokenizer import inexpressible, read_sentencepiece, tokenizer_config

GIB = 2**30
GENERATION = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"

# Files of a Hugging Face folder


def write_weights(
    folder: Path, m: config.Model, read: Callable[[str], Tensor], dtype: torch.dtype, limit: int
) -> None:
    """Writes safetensors files, with an index if there are several.

    A file contains at most `limit` bytes of tensors, or one larger tensor. read(our name) returns a
    full parameter. Holds the tensors of one file in `dtype`, and one tensor as read, in memory.
    Raises ConfigError.
    """
    sizes = {}
    for name, shape in hf_weights.shapes(m).items():
        sizes[name] = math.prod(shape) * dtype.itemsize
    their_names = {name: hf_weights.hf_name(name) for name in sizes}
    total = sum(sizes.values())
    shards = split_by_size(sizes, limit)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file_name = hf_weights.SINGLE
        if len(shards) > 1:
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # no variable refers to the tensors, so they are freed before the next file's are read
        write_safetensors(
            folder / file_name, {their_names[name]: read(name).to(dtype) for name in names}
        )
        for name in names:
            weight_map[their_names[name]] = file_name
    if len(shards) > 1:
        metadata = {"total_parameters": total // dtype.itemsize, "total_size": total}
        write_json(folder / hf_weights.INDEX, {"metadata": metadata, "weight_map": weight_map})


def split_by_size(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Splits the names, in order, into lists of at most `limit` bytes in total. A larger entry gets
    a list of its own."""
    shards = []
    room = 0
    for name, size in sizes.items():
        if size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    safetensors = hf_weights.import_safetensors(path)
    path.touch()
    mode = path.stat().st_mode  # save_file() lets only the owner read the file
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    path.chmod(mode)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, checkpoint: Path) -> None:
    """Copies a checkpoint's tokenizer, and adds missing files that transformers needs. Raises
    ConfigError."""
    for path in copied_files(checkpoint):
        shutil.copyfile(path, folder / path.name)
    if (folder / TOKENIZER_CONFIG).is_file():
        return
    if (folder / "tokenizer.json").is_file():
        write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast"})
    elif (folder / "tokenizer.model").is_file():
        write_tokenizer_config(folder)


def write_tokenizer_config(folder: Path) -> None:
    """Writes the tokenizer_config.json with which transformers reads the folder's tokenizer.model.
    Prints a warning instead if there is none."""
    model = read_sentencepiece(folder / "tokenizer.model")
    settings = tokenizer_config(model)
    if settings:
        write_json(folder / TOKENIZER_CONFIG, settings)
        return
    print(
        f"tokenizer.model: is copied alone; transformers' LlamaTokenizer cannot express "
        f"{', '.join(inexpressible(model))}: make transformers' files for it yourself",
        file=sys.stderr,
    )


def copy_from_base(folder: Path, base: Path) -> dict[str, Any]:
    """Copies the chat template and the generation settings of the adapters' base, if both have the
    same tokenizer. Returns the base's bos_token_id and eos_token_id, or {}."""
    base_vocabularies = read_vocabularies(base)
    if not any(vocabulary in base_vocabularies for vocabulary in read_vocabularies(folder)):
        return {}
    for path in copied_files(base):
        copy = folder / path.name
        if not copy.exists():
            shutil.copyfile(path, copy)
        elif path.name == TOKENIZER_CONFIG:
            # write_tokenizer_config() wrote it, without a template
            template = hf_config.read_json(path).get("chat_template")
            if template:
                write_json(copy, {"chat_template": template, **hf_config.read_json(copy)})
    ids = {}
    for path in existing(base, "config.json", GENERATION):  # transformers prefers the latter
        settings = hf_config.read_json(path)
        for key in ("bos_token_id", "eos_token_id"):
            if settings.get(key) is not None:
                ids[key] = settings[key]
    return ids


def keep_one_template(folder: Path) -> None:
    """Removes the chat template from tokenizer_config.json if there is also chat_template.jinja.
    transformers prefers the latter, but other programs prefer the former."""
    path = folder / TOKENIZER_CONFIG
    if not (folder / CHAT_TEMPLATE).is_file() or not path.is_file():
        return
    settings = hf_config.read_json(path)
    if settings.pop("chat_template", None) is not None:
        write_json(path, settings)


def read_vocabularies(folder: Path) -> list[bytes]:
    """The bytes of tokenizer.json and tokenizer.model, if they exist."""
    return [path.read_bytes() for path in existing(folder, *TOKENIZERS)]


def copied_files(folder: Path) -> list[Path]:
    """The files of a checkpoint or a Hugging Face folder to copy unchanged."""
    return existing(folder, *hf_weights.TOKENIZER_FILES, GENERATION)


def existing(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    return [path for path in paths if path.is_file()]


def token_ids(checkpoint: Path) -> dict[str, Any]:
    """bos_token_id and eos_token_id of the checkpoint's tokenizer; empty if it has none or cannot
    be loaded."""
    if not existing(checkpoint, *TOKENIZERS):
        return {}
    try:
        tokenizer = Tokenizer(checkpoint)
    except (ConfigError, ImportError) as error:
        print(f"BOS and EOS tokens are left out of config.json: {error}", file=sys.stderr)
        return {}
    ids: dict[str, Any] = {}
    if tokenizer.bos:
        ids["bos_token_id"] = tokenizer.bos[0]
    if tokenizer.eos:
        ids["eos_token_id"] = tokenizer.eos[0]
    return ids


def end_of_turn(checkpoint: Path) -> list[int]:
    """The tokens that end an assistant's turn; empty without a tokenizer or a chat template."""
    if not existing(checkpoint, CHAT_TEMPLATE) or not existing(checkpoint, *TOKENIZERS):
        return []
    try:
        from tools.prepare.chat.conversations import Chat

        ends = Chat(checkpoint).end_of_turn()
        reason = "the chat template cannot be rendered, or ends a turn with no special token"
    except (ConfigError, ImportError) as error:
        ends = []
        reason = str(error)
    if not ends:
        print(
            f"{GENERATION} lacks the end of turn, which is unknown, and answers may not end: {reason}",
            file=sys.stderr,
        )
    return ends


def as_list(ids: Any) -> list[int]:
    """The token ids in a value of eos_token_id."""
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def write_generation_config(folder: Path, checkpoint: Path, base: dict[str, Any]) -> dict[str, Any]:
    """Writes generation_config.json. Returns the token ids for config.json.

    Its EOS tokens are the base's, the tokenizer's and the end of turn. An imported
    generation_config.json stays unchanged. `base` holds the ids of copy_from_base().
    """
    path = folder / GENERATION
    ids = token_ids(checkpoint)
    if (checkpoint / GENERATION).is_file():
        return ids | hf_config.read_json(path)
    ends = as_list(base.get("eos_token_id")) + as_list(ids.get("eos_token_id"))
    ends = [*dict.fromkeys(ends + end_of_turn(checkpoint))]
    ids |= base
    if ends:  # most folders store a single id as a number, not a list
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    settings = hf_config.read_json(path) if path.is_file() else {}
    write_json(path, settings | ids)
    return ids


def context_length(folder: Path) -> int | None:
    """max_position_embeddings in a Hugging Face folder's config.json; None if it is missing. Raises
    ConfigError."""
    length = hf_config.read_json(folder / "config.json").get("max_position_embeddings")
    return length if type(length) is int and length > 0 else None


# The output folder


@contextlib.contextmanager
def published(out: Path) -> Iterator[Path]:
    """Yields an empty folder. After the block, syncs it and renames it to `out`.

    A failure leaves nothing behind. A kill leaves .NAME.tmp, which the next call removes. Raises
    ConfigError if `out` is not new or empty, or if another process is writing it.
    """
    temporary = out.with_name(f".{out.name}.tmp")
    folder = temporary / out.name
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        lock = system.lock(temporary / "lock")
    except TimeoutError:
        raise ConfigError(f"{out}: is being written by another process") from None
    try:
        if not is_new_or_empty(out):
            raise ConfigError(
                f"{out}: exists, and nothing is overwritten; choose another, or remove it"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        for path in folder.iterdir():
            system.sync(path)
        system.publish(folder, out)  # replaces at most an empty folder
    finally:
        # remove it before releasing the lock, since another process may use it afterwards
        shutil.rmtree(temporary, ignore_errors=True)
        lock.release()


def is_new_or_empty(folder: Path) -> bool:
    if folder.is_symlink():
        return False
    if not folder.exists():
        return True
    return folder.is_dir() and not any(folder.iterdir())


# Export


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's model. Reads its parameters by name."""

    path: Path
    cfg: config.Config
    model: nn.Module  # on meta
    reader: load.Reader

    def read(self, name: str) -> Tensor:
        """Reads a full parameter, whichever ranks saved it."""
        item = self.reader.metadata.state_dict_metadata[f"model.{name}"]
        full = torch.empty(item.size, dtype=item.properties.dtype)
        load.read_tensors(self.reader, {f"model.{name}": full})
        return full

    def read_merged(self, name: str, base: hf_weights.Weights) -> Tensor:
        """Reads a full parameter of the base, and merges its adapter into it."""
        from extras.lora.adapters import merged

        path = name.rpartition(".")[0]
        return merged(
            self.model.get_submodule(path),
            base.read(name),
            lambda matrix: self.read(f"{path}.{matrix}.weight"),
        )


def write_companions(saved: SavedModel, folder: Path) -> dict[str, Any]:
    """Writes the files other than the model that generating text needs: the tokenizer, one chat
    template and the generation settings. Returns the token ids for config.json. Raises
    ConfigError."""
    write_tokenizer(folder, saved.path)
    base_ids = {}
    if saved.cfg.lora:
        assert saved.cfg.model.init_from  # adapters have a base
        base_ids = copy_from_base(folder, hub.local(saved.cfg.model.init_from))
    keep_one_template(folder)
    return write_generation_config(folder, saved.path, base_ids)


def export_model(saved: SavedModel, folder: Path, dtype: str, limit: int) -> None:
    """Writes a model's Hugging Face folder. Merges adapters into their base. A file contains at
    most `limit` bytes of tensors. Raises ConfigError."""
    cfg = saved.cfg
    base = hf_weights.weights_to_read(cfg, step=1)
    seq_len = cfg.train.seq_len
    if base:
        assert cfg.model.init_from  # names the base
        seq_len = max(seq_len, context_length(hub.local(cfg.model.init_from)) or 0)
    ids = write_companions(saved, folder)
    write_json(folder / "config.json", hf_config.render(cfg.model, seq_len, dtype, ids))

    def read(name: str) -> Tensor:
        return saved.read_merged(name, base) if base else saved.read(name)

    write_weights(folder, cfg.model, read, getattr(torch, dtype), limit)
    if base:
        assert base.sums is not None  # computed while reading
        compare.check_base(saved.path, cfg.model.init_from, hf_weights.fingerprint([base.sums]))


def export_adapter(saved: SavedModel, folder: Path, dtype: str) -> None:
    """Writes a run's adapters as a folder for PEFT. After a run on conversations, adds the
    tokenizer, chat template and generation settings, which end an answer. Raises ConfigError."""
    cfg = saved.cfg
    if cfg.lora is None:
        raise ConfigError(
            f"--adapter: the run {cfg.run.name} has no [lora]; export it whole, without --adapter"
        )
    assert cfg.model.init_from  # adapters have a base
    tensors = {}
    for name, _ in saved.model.named_parameters():
        if hf_weights.is_adapter(name):
            tensors[hf_weights.hf_name(name)] = saved.read(name).to(getattr(torch, dtype))
    write_safetensors(folder / hf_weights.PEFT_WEIGHTS, tensors)
    settings = hf_config.render_adapter(cfg.lora, cfg.model.init_from)
    write_json(folder / hf_config.ADAPTER, settings)
    if (saved.path / CHAT_TEMPLATE).is_file():
        write_companions(saved, folder)


# Import


def import_folder(name: str, folder: Path) -> None:
    """Writes a Hugging Face folder, or the repository with this id, as a checkpoint. Raises
    ConfigError and OSError."""
    source = hub.local(name, hub.WEIGHTS)
    # report the problems of both together
    together(
        lambda: hf_config.read(source / "config.json"),
        lambda: hf_weights.scan(source),
    )
    if (source / GENERATION).is_file():
        # if it is malformed, fail now and not in a later export
        hf_config.read_json(source / GENERATION)
    train = {"steps": 1}
    length = context_length(source)
    if length:
        train["seq_len"] = length
    raw = {"run": {"name": "imported"}, "model": {"init_from": name}, "train": train}
    cfg = config.from_dict(raw, name)
    model = meta_model(cfg.model)
    weights = hf_weights.weights_to_read(cfg, step=0)
    assert weights  # init_from is set

    def read(parameter: str) -> Tensor:
        full = weights.read(parameter)
        if not full.sum().isfinite():
            stored = weights.stored[parameter]
            raise ConfigError(f"{stored.path}: {stored.name} holds values that are not finite")
        return full

    progress = asdict(Progress())  # before the first step
    state = {**progress, "config": config.to_dict(cfg), "torch": torch.__version__}
    write_checkpoint(folder, model, read, state, copied_files(source))


def write_checkpoint(
    folder: Path,
    model: nn.Module,
    read: Callable[[str], Tensor],
    state: dict,
    extra_files: list[Path],
) -> None:
    """Writes a weights-only checkpoint into an empty folder, from a single process.

    `model` is on the meta device; read(name) returns each of its parameters. Raises OSError, and
    whatever `read` raises.
    """

    class ReadWhenWritten(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Tensor:
            return read(write_item.index.fqn.removeprefix("model."))

    writer = save.Writer(folder)
    try:
        dcp.save(
            load.tensors_of(model, None),
            storage_writer=writer,
            planner=ReadWhenWritten(),
            no_dist=True,
        )
    except dcp.CheckpointException as error:  # a BaseException
        first_rank = min(error.failures)
        exception, _ = error.failures[first_rank]
        raise exception from None
    contents = {path.name: path.read_bytes() for path in extra_files}
    save.write_manifest(folder, contents, state, writer.entries)


# The command line


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_train.sh -m huggingface", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="{export,import}")
    export = commands.add_parser(
        "export", help="a checkpoint, or a run's newest, to a Hugging Face folder"
    )
    export.add_argument("source", type=Path, metavar="CKPT_OR_RUN")
    export.add_argument("out", type=Path, metavar="OUT")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    export.add_argument(
        "--adapter", action="store_true", help="the adapter alone, as PEFT's folder"
    )
    export.add_argument("--base", metavar="HF_DIR", help="of adapters: where their base lies now")
    export.add_argument(
        "--shard-gib", type=float, default=2.0, metavar="G", help="a file's size, at most"
    )
    import_ = commands.add_parser("import", help="a Hugging Face folder to one checkpoint folder")
    import_.add_argument("source", type=Path, metavar="HF_DIR")
    import_.add_argument("out", type=Path, metavar="OUT")
    return parser.parse_args(argv)


def check_output(out: Path, is_export: bool) -> None:
    """Raises ConfigError if a run could take `out` for its checkpoint, or if it cannot be replaced.

    An import may be named step-00000000. An export must not be named like a checkpoint.
    """
    if catalog.NAME.fullmatch(out.name):
        step = int(out.name.split("-")[1])
        if is_export or step > 0:
            raise ConfigError(f"{out}: is the name of a run's checkpoint; choose another")
    if out == Path.cwd() or not out.name:
        raise ConfigError(
            f"{out}: is the current folder or /, which cannot be replaced; name one in it"
        )


def export_command(args: argparse.Namespace, checkpoint: Path, folder: Path) -> None:
    """Writes a checkpoint's Hugging Face folder. Raises ConfigError."""
    cfg = newest.read_config(checkpoint, args.base)
    saved = SavedModel(checkpoint, cfg, meta_model(cfg.model, cfg.lora), load.Reader(checkpoint))
    # after merging, adapters are part of the weights
    check_export(cfg if args.adapter else replace(cfg, lora=None))
    load.check_tensors(saved.reader, saved.model, None)
    if args.adapter:
        export_adapter(saved, folder, args.dtype)
    else:
        export_model(saved, folder, args.dtype, int(args.shard_gib * GIB))
    if not checkpoint.exists():  # if it was removed meanwhile, OUT may lack optional files
        raise ConfigError(f"{checkpoint}: was removed while it was read")


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    # this tool needs only a single process
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    out = Path(os.path.abspath(args.out))
    is_export = args.command == "export"
    try:
        check_output(out, is_export)
        with published(out) as folder:
            if is_export:
                newest.read_newest(args.source, lambda path: export_command(args, path, folder))
            else:
                import_folder(str(args.source), folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: {error.strerror or error}") from None
    system.print_line(f"wrote {out}")
    if is_export and args.adapter and (out / GENERATION).is_file():
        system.print_line(
            "transformers and PEFT take what ends an answer from the base alone: call "
            f'generate(generation_config=GenerationConfig.from_pretrained("{out}"))'
        )
    if not is_export:
        source = json.dumps(str(args.source))
        system.print_line(
            f"to train from these weights, leave it and set model.init_from = {source}"
        )
    return 0


if __name__ == "__main__":
    config.run_tool(main)
