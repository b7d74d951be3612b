"""Hugging Face folders of Llama and Qwen3 models, from checkpoints and into them.

    python -m huggingface export CKPT_OR_RUN OUT [--dtype bfloat16] [--shard-gib 2] [--adapter] [--base HF_DIR]
    python -m huggingface import HF_DIR OUT

Export reads a checkpoint of any world size, or a run's newest good one. It writes config.json, generation_config.json,
safetensors and the tokenizer, with one output file in memory. Import writes one checkpoint folder, to generate from or
to export again, with one tensor in memory; a run reads HF_DIR directly (model.init_from). OUT is published atomically.
It must be new or an empty folder. Exits with 2 on failure, naming each problem.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import config
import files
from config import ConfigError
from data import hub
from data.hub import GIB, check_room
from extras.huggingface import config as hf_config
from extras.huggingface import weights as hf_weights
from extras.huggingface.tokenizer import fast_tokenizer_files, inexpressible, read_sentencepiece
from model.build import meta_model
from model.llama import parameter_count
from schema import together

GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"


def write_weights(
    folder: Path, m: config.Model, read: Callable[[str], Tensor], dtype: torch.dtype, limit: int
) -> None:
    """Writes safetensors files of at most `limit` bytes of tensors (or one tensor), with an index if there are several.

    read(our name) returns a full parameter. Memory: one file's tensors in `dtype`, and one tensor as read. Raises
    ConfigError, also if the disk is too small.
    """
    sizes = {
        name: math.prod(shape) * dtype.itemsize for name, shape in hf_weights.shapes(m).items()
    }
    theirs = {name: hf_weights.hf_name(name) for name in sizes}
    total = sum(sizes.values())
    check_room(folder, total)
    shards, room = [], 0
    for name, size in sizes.items():
        if size > room:
            shards, room = [*shards, []], limit
        shards[-1].append(name)
        room -= size
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file_name = (
            hf_weights.SINGLE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        weight_map |= {theirs[name]: file_name for name in names}
        write_safetensors(
            folder / file_name, {theirs[name]: read(name).to(dtype) for name in names}
        )
    if len(shards) > 1:
        metadata = {"total_parameters": total // dtype.itemsize, "total_size": total}
        write_json(folder / hf_weights.INDEX, {"metadata": metadata, "weight_map": weight_map})


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    safetensors = hf_weights.import_safetensors(path)
    path.touch()
    mode = path.stat().st_mode  # save_file() makes the file readable by its owner only
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
    path.chmod(mode)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, checkpoint: Path) -> None:
    """Copies a checkpoint's tokenizer, and adds files that transformers needs and it lacks. Raises ConfigError."""
    for path in copied_files(checkpoint):
        shutil.copyfile(path, folder / path.name)
    if (folder / TOKENIZER_CONFIG).is_file():
        return
    made, path = {}, folder / "tokenizer.model"
    if (folder / "tokenizer.json").is_file():
        made = {TOKENIZER_CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast"}}
    elif path.is_file() and not (made := fast_tokenizer_files(model := read_sentencepiece(path))):
        print(
            f"{path.name}: is copied alone; tokenizer.json cannot express {', '.join(inexpressible(model))}: make "
            "transformers' files for it yourself",
            file=sys.stderr,
        )
    for name, content in made.items():
        write_json(folder / name, content)


def copy_from_base(folder: Path, base: Path) -> None:
    """Of merged adapters: the base's chat template and generation settings, if both have the same tokenizer."""
    ours, theirs = (
        [(d / name).read_bytes() for name in hf_weights.TOKENIZER_FILES[:2] if (d / name).is_file()]
        for d in (folder, base)
    )
    if not any(content in theirs for content in ours):
        return
    for path in copied_files(base):
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
        elif path.name == TOKENIZER_CONFIG and (
            template := hf_config.read_json(path).get("chat_template")
        ):
            # made for transformers: of its class, no template
            settings = hf_config.read_json(folder / path.name)
            write_json(folder / path.name, {"chat_template": template, **settings})


def copied_files(folder: Path) -> list[Path]:
    """The files of a checkpoint or a Hugging Face folder that are copied unchanged."""
    return [
        path
        for name in (*hf_weights.TOKENIZER_FILES, GENERATION)
        if (path := folder / name).is_file()
    ]


def token_ids(checkpoint: Path) -> dict[str, Any]:
    """bos_token_id and eos_token_id of the checkpoint's tokenizer; empty if it has none or cannot be loaded."""
    from data.tokenizer import Tokenizer

    if not any((checkpoint / name).is_file() for name in hf_weights.TOKENIZER_FILES[:2]):
        return {}
    try:
        tokenizer = Tokenizer(checkpoint)
    except (ConfigError, ImportError) as error:
        print(f"BOS and EOS tokens are left out of config.json: {error}", file=sys.stderr)
        return {}
    found: dict = {
        f"{key}_token_id": ids[0]
        for key, ids in (("bos", tokenizer.bos), ("eos", tokenizer.eos))
        if ids
    }
    if (checkpoint / "chat_template.jinja").is_file():
        # of a run on conversations: an answer ends with its end of turn
        from extras.chat.conversations import Chat

        ends = [*dict.fromkeys([*tokenizer.eos[:1], *Chat(checkpoint).end_of_turn()])]
        found |= {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    return found


def context_length(folder: Path) -> int | None:
    """max_position_embeddings of a Hugging Face folder, if its config.json has it. Raises ConfigError."""
    length = hf_config.read_json(folder / "config.json").get("max_position_embeddings")
    return length if type(length) is int and length > 0 else None


@contextlib.contextmanager
def published(out: Path) -> Iterator[Path]:
    """Yields an empty folder, syncs it after the block and renames it to `out`. A failure leaves nothing; a kill leaves
    .NAME.tmp, which the next call removes. Raises ConfigError if `out` is not new or empty, or is being written."""
    temporary, made = (
        out.with_name(f".{out.name}.tmp"),
        [parent for parent in out.parents if not parent.exists()],
    )
    folder = temporary / out.name
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        held = files.lock(temporary / "lock")
    except TimeoutError:
        raise ConfigError(f"{out}: is being written by another process") from None
    try:
        if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
            raise ConfigError(
                f"{out}: is there already, and nothing is overwritten; choose another, or remove it"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        for path in folder.iterdir():
            files.sync(path)
        files.publish(folder, out)  # replaces at most an empty folder
    finally:
        # before the release: another process may use it then
        shutil.rmtree(temporary, ignore_errors=True)
        held.release()
        with contextlib.suppress(OSError):  # parents that were made for `out` and are empty
            for parent in made:
                parent.rmdir()


def export_checkpoint(
    source: Path, folder: Path, dtype: str, limit: int, adapter: bool, base: str | None
) -> None:
    from checkpoint import catalog, compare, load

    checkpoint = catalog.find(source)
    cfg, reader = catalog.read_config(checkpoint, base), load.Reader(checkpoint)
    hf_config.check_rendered(cfg.model, cfg.lora if adapter else None)
    model = meta_model(cfg.model, cfg.lora)
    load.check_tensors(reader, model, None)

    def read(name: str) -> Tensor:
        item = reader.metadata.state_dict_metadata[f"model.{name}"]
        full = torch.empty(item.size, dtype=item.properties.dtype)
        load.read_tensors(reader, {f"model.{name}": full})  # unsharded, whichever ranks saved it
        return full

    def merge(name: str) -> Tensor:
        from extras.lora.adapters import merged

        assert weights  # adapters have a base
        path = name.rpartition(".")[0]
        return merged(
            model.get_submodule(path),
            weights.read(name),
            lambda part: read(f"{path}.{part}.weight"),
        )

    if adapter:
        if not cfg.lora:
            raise ConfigError(
                f"--adapter: the run {cfg.run.name} has no [lora]; export it whole, without --adapter"
            )
        assert cfg.model.init_from  # adapters have a base
        tensors = {
            hf_weights.hf_name(name): read(name).to(getattr(torch, dtype))
            for name, _ in model.named_parameters()
            if hf_weights.is_adapter(name)
        }
        write_safetensors(folder / hf_weights.PEFT_WEIGHTS, tensors)
        write_json(
            folder / hf_config.ADAPTER, hf_config.render_adapter(cfg.lora, cfg.model.init_from)
        )
        return
    weights, seq_len = hf_weights.weights_to_read(cfg, step=1), cfg.train.seq_len
    write_tokenizer(folder, checkpoint)
    if weights:
        assert cfg.model.init_from  # where the weights are
        base_folder = hub.local(cfg.model.init_from)
        seq_len = max(seq_len, context_length(base_folder) or 0)
        copy_from_base(folder, base_folder)
    ids = token_ids(checkpoint)
    if not (folder / GENERATION).is_file():
        write_json(folder / GENERATION, ids)
    ids |= hf_config.read_json(folder / GENERATION)  # that of an import may list several EOS tokens
    write_json(folder / "config.json", hf_config.render(cfg.model, seq_len, dtype, ids))
    write_weights(folder, cfg.model, merge if weights else read, getattr(torch, dtype), limit)
    if weights:
        assert weights.sums is not None  # read to be compared
        compare.check_base(checkpoint, cfg.model.init_from, hf_weights.fingerprint([weights.sums]))


def write_checkpoint(
    folder: Path,
    model: nn.Module,
    read: Callable[[str], Tensor],
    state: dict,
    extra_files: list[Path],
) -> None:
    """Writes a weights-only checkpoint into an empty folder, from a single process outside any run. `read` returns each
    parameter of the meta model by name. Raises OSError, and whatever `read` raises."""
    from checkpoint import load, manifest, save

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
        raise min(error.failures.items())[1][0] from None
    save.write_manifest(folder, extra_files, state, manifest.hash_files(folder, writer.files))


def import_folder(name: str, folder: Path) -> None:
    source = hub.local(name, hub.WEIGHTS)
    # the problems of both, before the first ends this
    together(
        lambda: hf_config.read(source / "config.json", config.SCHEMA),
        lambda: hf_weights.scan(source),
    )
    if (source / GENERATION).is_file():
        # fail now, not in a later export, if it is malformed
        hf_config.read_json(source / GENERATION)
    train = {"seq_len": length} if (length := context_length(source)) else {}
    cfg = config.from_dict(
        {"run": {"name": "imported"}, "model": {"init_from": name}, "train": {"steps": 1, **train}},
        name,
    )
    weights, model = hf_weights.weights_to_read(cfg, step=0), meta_model(cfg.model)

    def read(name: str) -> Tensor:
        assert weights  # init_from is set
        full = weights.read(name)
        if not full.sum().isfinite():
            stored = weights.stored[name]
            raise ConfigError(f"{stored.path}: {stored.name} holds values that are not finite")
        return full

    check_room(folder, 4 * parameter_count(model))
    state = {"step": 0, "config": config.to_dict(cfg), "torch": torch.__version__}
    write_checkpoint(folder, model, read, state, copied_files(source))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m huggingface", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="{export,import}")
    for name, source, text in (
        ("export", "CKPT_OR_RUN", "a checkpoint, or a run's newest, to a Hugging Face folder"),
        ("import", "HF_DIR", "a Hugging Face folder to one checkpoint folder"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("source", type=Path, metavar=source)
        command.add_argument("out", type=Path, metavar="OUT")
        if name == "export":
            command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
            command.add_argument(
                "--adapter", action="store_true", help="the adapter alone, as PEFT's folder"
            )
            command.add_argument(
                "--base", metavar="HF_DIR", help="of adapters: where their base lies now"
            )
            command.add_argument(
                "--shard-gib", type=float, default=2.0, metavar="G", help="a file's size, at most"
            )
    args = parser.parse_args(argv)

    # here, as only a tool's main() may: model/ does not depend on checkpoint/
    from checkpoint import catalog

    # a single process is intended
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    out, exporting = Path(os.path.abspath(args.out)), args.command == "export"
    try:
        if exporting and not 0 < args.shard_gib < math.inf:
            raise ConfigError(f"--shard-gib {args.shard_gib}: must be greater than 0")
        if catalog.NAME.fullmatch(out.name) and (exporting or int(out.name.split("-")[1])):
            raise ConfigError(f"{out}: is the name of a run's checkpoint; choose another")
        if out == Path.cwd() or not out.name:
            raise ConfigError(
                f"{out}: is the current folder or /, which cannot be replaced; name one in it"
            )
        with published(out) as folder:
            if exporting:
                export_checkpoint(
                    args.source,
                    folder,
                    args.dtype,
                    int(args.shard_gib * GIB),
                    args.adapter,
                    args.base,
                )
            else:
                import_folder(str(args.source), folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or out}: {error.strerror or error}") from None
    files.print_line(f"wrote {out}")
    if not exporting:
        source = json.dumps(str(args.source))
        files.print_line(
            f"to train from these weights, leave it and set model.init_from = {source}"
        )
    return 0


if __name__ == "__main__":
    config.run_tool(main)
