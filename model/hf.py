"""Hugging Face folders of the Llama family, from checkpoints and into them.

    python -m model.hf export CKPT_OR_RUN OUT [--dtype bfloat16] [--shard-gib 5]
    python -m model.hf import HF_DIR OUT

Export takes a checkpoint of any number of ranks, or a run's newest good one, and writes config.json,
generation_config.json, safetensors and the tokenizer. Import writes one checkpoint folder, to generate from and to
export again; a run that is to be trained from HF_DIR reads it itself, with model.init_from. Both go tensor by tensor:
the memory they need is the largest one's. OUT appears whole or not at all, and an OUT with anything in it is refused.
Exits with 2 where it cannot be done, naming each problem.
"""

import argparse
import contextlib
import fcntl
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import config
import hf_config
from config import ConfigError
from model.hf_tokenizer import fast_tokenizer_files, read_sentencepiece
from model.hf_weights import INDEX, SINGLE, TOKENIZER_FILES, hf_name, match_weights, scan, shapes
from model.llama import meta_model
from model.safetensors import BLOCK, memory, render_header

GIB = 2**30
GENERATION = "generation_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def hf_config_json(cfg: config.Config, dtype: str, bos: Any, eos: Any) -> dict[str, Any]:
    """config.json. Rotary settings and dtype are in it twice, as transformers 5 and as older ones read them.

    max_position_embeddings is the length that was trained with (or imported), or what the rotary table is stretched to
    where that length is not beyond the one that it was stretched from.
    """
    m = cfg.model
    rope, stretched = {"rope_type": "default"}, 0
    if s := m.rope_scaling:
        rope = {"rope_type": "llama3", **config.to_dict(cfg)["model"]["rope_scaling"]}
        if cfg.train.seq_len <= s.original_max_position_embeddings:
            stretched = int(s.factor * s.original_max_position_embeddings)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(m, name) for name, key in hf_config.KEYS.items()},
        "head_dim": m.width_per_head,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": max(cfg.train.seq_len, stretched),
        "rope_theta": m.rope_theta,
        "rope_scaling": rope if m.rope_scaling else None,
        "rope_parameters": {**rope, "rope_theta": m.rope_theta},
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def write_weights(folder: Path, m: config.Model, pieces: Callable[[str], Iterable[Tensor]], dtype: torch.dtype,
                  limit: int) -> None:
    """Writes safetensors of at most `limit` bytes each (or one tensor), with an index where there are several.

    pieces(our name) gives a parameter's rows in order, in pieces; of one piece and a block of it in `dtype` is what is
    held of the weights.
    """
    files: list[list[str]] = [[]]
    wanted, size = shapes(m), 0
    for name, shape in wanted.items():
        length = math.prod(shape) * dtype.itemsize
        if files[-1] and size + length > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += length
    weight_map = {}
    for number, names in enumerate(files, 1):
        file_name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= {hf_name(name): file_name for name in names}
        with (folder / file_name).open("wb") as file:
            file.write(render_header(((hf_name(name), dtype, wanted[name]) for name in names), {"format": "pt"}))
            for name in names:
                for piece in pieces(name):
                    for part in piece.view(-1).split(BLOCK // 4):
                        part = part.to(dtype)
                        file.write(memory(part))
                    del piece, part  # before the next is read
    if len(files) > 1:
        total = sum(math.prod(shape) for shape in wanted.values())
        write_json(folder / INDEX, {"metadata": {"total_parameters": total, "total_size": total * dtype.itemsize},
                                    "weight_map": weight_map})


def write_tokenizer(folder: Path, checkpoint: Path, marks: tuple[int | None, int | None]) -> tuple[Any, Any]:
    """Copies the tokenizer of a checkpoint, and writes what transformers needs beside it where it stands alone. Returns
    the ids of begin and end mark for config.json; `marks` are those of a tokenizer.json, as far as they are known."""
    for path in carried(checkpoint):
        shutil.copyfile(path, folder / path.name)
    bos, eos = marks
    if not (folder / "tokenizer_config.json").is_file():
        if (folder / "tokenizer.json").is_file():
            write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
        elif (path := folder / "tokenizer.model").is_file():
            model = read_sentencepiece(path)
            bos, eos = model.bos, model.eos
            if (made := fast_tokenizer_files(model)) is None:
                print(f"{path.name}: is no byte-pair model of text as it stands; make transformers' files for it "
                      "yourself", file=sys.stderr)
            for name, content in (made or {}).items():
                write_json(folder / name, content)
    if (folder / GENERATION).is_file():
        theirs = hf_config.read_json(folder / GENERATION)
        return theirs.get("bos_token_id", bos), theirs.get("eos_token_id", eos)
    write_json(folder / GENERATION, {key: value for key, value in (("bos_token_id", bos), ("eos_token_id", eos))
                                     if value is not None})
    return bos, eos


def carried(folder: Path) -> list[Path]:
    """A folder's files that are copied as they are, without those that write_tokenizer() makes again from the
    sentencepiece model beside them: the model says more than they do."""
    found = [folder / name for name in (*TOKENIZER_FILES, GENERATION) if (folder / name).is_file()]
    made = {}
    with contextlib.suppress(ConfigError):  # whatever else that is, it is not ours
        made = fast_tokenizer_files(read_sentencepiece(folder / "tokenizer.model")) or {}
    return [path for path in found if not (path.name in made and hf_config.read_json(path) == made[path.name])]


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_free(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise ConfigError(f"{out}: is there already, and nothing is written over; choose another, or remove it")


@contextlib.contextmanager
def published(out: Path) -> Iterator[Path]:
    """An empty folder beside `out` that becomes `out` once all in it is on disk. What fails leaves nothing; what is
    killed leaves .NAME.tmp, which the next one clears. Raises ConfigError where another process writes it."""
    temporary = out.with_name(f".{out.name}.tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    handle = os.open(temporary, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{out}: is being written by another process") from None
        except OSError:  # no locks on this file system: nothing keeps a second one out
            pass
        if not temporary.exists() or os.stat(temporary).st_ino != os.fstat(handle).st_ino:
            raise ConfigError(f"{out}: has just been written by another process")
        check_free(out)  # now that nobody else can make it
        try:
            for left in temporary.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            yield temporary
            for path in [*temporary.iterdir(), temporary]:
                sync(path)
            temporary.rename(out)  # onto an empty folder at most
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync(out.parent)
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_room(folder: Path, m: config.Model, dtype: torch.dtype) -> None:
    needed = sum(math.prod(shape) for shape in shapes(m).values()) * dtype.itemsize
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(f"{folder.parent}: {needed / GIB:,.2f} GiB are needed, {free / GIB:,.2f} GiB are free")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m model.hf", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command", metavar="{export,import}")
    export = commands.add_parser("export", help="a checkpoint, or a run's newest, to a Hugging Face folder")
    export.add_argument("source", type=Path, metavar="CKPT_OR_RUN")
    export.add_argument("out", type=Path, metavar="OUT")
    export.add_argument("--dtype", choices=DTYPES, default="float32")
    export.add_argument("--shard-gib", type=float, default=5.0, metavar="G", help="a file's size")
    bring = commands.add_parser("import", help="a Hugging Face folder to one checkpoint folder")
    bring.add_argument("source", type=Path, metavar="HF_DIR")
    bring.add_argument("out", type=Path, metavar="OUT")
    args = parser.parse_args(argv)

    # Upwards, as a tool's main may: the model itself knows nothing of checkpoints.
    from checkpoint import catalog, load, writer
    from data.tokenizer import Tokenizer

    def marks(checkpoint: Path) -> tuple[int | None, int | None]:
        if not (checkpoint / "tokenizer.json").is_file():
            return None, None
        try:
            tokenizer = Tokenizer(checkpoint)
        except ConfigError as error:  # without the package they stay unknown
            print(f"begin and end mark are left open in config.json: {error}", file=sys.stderr)
            return None, None
        return next(iter(tokenizer.bos), None), next(iter(tokenizer.eos), None)

    def export_from(source: Path) -> Callable[[Path], None]:
        checkpoint = catalog.find(source)
        cfg, reader = catalog.read_config(checkpoint), load.open_reader(checkpoint)
        load.check_tensors(checkpoint, reader, load.tensors_of(meta_model(cfg.model), None), weights_only=True)

        def write(folder: Path) -> None:
            check_room(folder, cfg.model, DTYPES[args.dtype])
            bos, eos = write_tokenizer(folder, checkpoint, marks(checkpoint))
            write_json(folder / "config.json", hf_config_json(cfg, args.dtype, bos, eos))
            write_weights(folder, cfg.model, lambda name: [load.read_tensor(checkpoint, reader, f"model.{name}")],
                          DTYPES[args.dtype], int(args.shard_gib * GIB))
        return write

    def import_from(source: Path) -> Callable[[Path], None]:
        found, problems = {}, []
        for look in (lambda: config.read_hf_model(source / "config.json"), lambda: scan(source)):
            try:
                found = look()
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(*problems)
        length = hf_config.read_json(source / "config.json").get("max_position_embeddings")
        if (source / GENERATION).is_file():
            hf_config.read_json(source / GENERATION)  # an export will need it
        cfg = config.from_dict({
            "run": {"name": "imported"}, "model": {"init_from": str(source)},
            "train": {"steps": 1, **({"seq_len": length} if type(length) is int and length > 0 else {})}}, str(source))
        weights = match_weights(source, found, cfg.model)
        state = {"step": 0, "config": config.to_dict(cfg), "torch": torch.__version__}
        extra_files = carried(source)

        def read(name: str) -> Tensor:
            whole = weights.read(name)
            if not whole.sum().isfinite():
                raise ConfigError(f"{weights.stored[name].path}: {hf_name(name)} holds values that are not finite")
            return whole

        def write(folder: Path) -> None:
            check_room(folder, cfg.model, torch.float32)
            writer.write_weights(folder, meta_model(cfg.model), read, state, extra_files)
        return write

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process works alone, as meant
    out = Path(os.path.abspath(args.out))
    try:
        if not 0 < getattr(args, "shard_gib", 1) < math.inf:
            raise ConfigError(f"--shard-gib {args.shard_gib}: must be greater than 0")
        if catalog.NAME.fullmatch(out.name) and (args.command == "export" or int(out.name.split("-")[1])):
            raise ConfigError(f"{out}: is the name of a run's checkpoint; choose another")
        if out == Path.cwd():
            raise ConfigError(f"{out}: is the current folder, which cannot be replaced; name one in it")
        check_free(out)
        write = (export_from if args.command == "export" else import_from)(args.source)
        with published(out) as folder:
            write(folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename or out}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"wrote {out}")
    if args.command == "import":
        print(f"to train from these weights, leave it and set model.init_from = {json.dumps(str(args.source))}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
