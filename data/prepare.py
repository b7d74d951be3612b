"""Text -> token files, once. run_train.sh calls it; where the files are there and match, it does nothing.

    python -m data.prepare configs/tiny.toml

Writes train.bin, heldout.bin, tokenizer.model and manifest.json into prepared/{source}-{hash}/, whole or not at all.
A document is held out when its hash falls into the last 1 %, whatever else the corpus holds.
"""

import array
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator

import config
from config import ConfigError
from data.tokenizer import Tokenizer, train_tokenizer
from data.tokens import MANIFEST, read_manifest

FORMAT = 1  # of the files; part of their identity
STDLIB = "python-stdlib"
LOCAL = (".jsonl", ".json", ".parquet", ".txt")
BATCH = 512  # documents handed to the tokenizer's threads at once
TEXT_PIECE = 1 << 16  # characters: a longer .txt file becomes several documents


def identity(cfg: config.Config) -> dict:
    """What makes two preparations the same."""
    d = cfg.data
    found = {"source": d.source, "subset": d.subset, "split": d.split, "text_field": d.text_field,
             "tokenizer": "trained here", "vocab_size": cfg.model.vocab_size, "max_tokens": d.max_tokens,
             "format": FORMAT}
    if d.tokenizer:
        # Its own file says how many pieces it has; the model may have more rows.
        found |= {"tokenizer": hashlib.sha256(Tokenizer(d.tokenizer).model_bytes).hexdigest(), "vocab_size": None}
    if d.source == STDLIB:
        found["python"] = platform.python_version()
    return found


def data_folder(cfg: config.Config) -> pathlib.Path:
    if cfg.data.path:
        return pathlib.Path(cfg.data.path)
    digest = hashlib.sha256(json.dumps(identity(cfg), sort_keys=True).encode()).hexdigest()[:12]
    return pathlib.Path("prepared") / f"{re.sub('[^A-Za-z0-9._-]+', '-', cfg.data.source).strip('-.')}-{digest}"


def is_prepared(cfg: config.Config) -> bool:
    return read_manifest(data_folder(cfg)) is not None


def prepare(cfg: config.Config, say: Callable[[str], None]) -> pathlib.Path:
    """Makes the folder of token files unless it is there and matches. Raises ConfigError, with nothing published."""
    folder = data_folder(cfg)
    if not _matches(folder, cfg):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(folder.with_name(f".{folder.name}.lock"), say):
                if not _matches(folder, cfg):  # another process may have made it meanwhile
                    _make(folder, cfg, say)
        except OSError as error:
            raise ConfigError(f"{error.filename or folder}: data could not be prepared: {error.strerror}") from None
    return folder


def _matches(folder: pathlib.Path, cfg: config.Config) -> bool:
    """Is the folder there, for this configuration? Raises ConfigError where it is there for another one."""
    manifest = read_manifest(folder)
    if manifest is None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: is there but holds no prepared data ({MANIFEST} is missing); move it away")
        return False
    wanted, changed = identity(cfg), []
    for key, value in wanted.items():
        if manifest["identity"].get(key) != value:
            changed.append(f"{folder}: was prepared with {key} = {manifest['identity'].get(key)!r}, the configuration "
                           f"says {value!r}; delete the folder or name another data.path")
    if changed:
        raise ConfigError(*changed)
    if _is_local(cfg.data.source) and (files := _local_files(cfg.data.source)):
        if [_stamp(f) for f in files] != manifest["files"]:
            raise ConfigError(f"[data] source = {cfg.data.source}: changed since {folder} was prepared; delete that "
                              "folder to prepare it again")
    return True


@contextlib.contextmanager
def _one_at_a_time(lock: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {lock.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: pathlib.Path, cfg: config.Config, say: Callable[[str], None]) -> None:
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed; the lock is ours
    temporary.mkdir()
    try:
        threads = os.cpu_count() or 1
        files = [_stamp(f) for f in _local_files(cfg.data.source)] if _is_local(cfg.data.source) else []
        if cfg.data.tokenizer:
            tokenizer = Tokenizer(cfg.data.tokenizer)
            (temporary / "tokenizer.model").write_bytes(tokenizer.model_bytes)
        else:
            (temporary / "tokenizer.model").write_bytes(_train_tokenizer(cfg, threads, say))
            tokenizer = Tokenizer(temporary / "tokenizer.model")
        if tokenizer.vocab_size > cfg.model.vocab_size:
            raise ConfigError(f"[model] vocab_size = {cfg.model.vocab_size}: smaller than the tokenizer "
                              f"{cfg.data.tokenizer}, which has {tokenizer.vocab_size} pieces")
        counts = _write_tokens(temporary, cfg.data, tokenizer, threads, say)
        manifest = {"identity": identity(cfg), "vocab_size": tokenizer.vocab_size, **counts, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2))
        os.sync()  # what the new name promises must survive a power cut
        if folder.exists():
            folder.rmdir()  # an empty one, by _matches
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    say(f"prepared {folder}: {counts['tokens']['train']:,} tokens to train on, {counts['tokens']['heldout']:,} held out")


def _train_tokenizer(cfg: config.Config, threads: int, say: Callable[[str], None]) -> bytes:
    """On the first part of the source: 2,000 characters per piece, 4 million at least, is where more text stops to
    change a byte-pair vocabulary much."""
    wanted = max(4_000_000, 2_000 * cfg.model.vocab_size)
    say(f"training a tokenizer of {cfg.model.vocab_size:,} pieces on up to {wanted / 1e6:,.0f} MB of {cfg.data.source}")

    def sample() -> Iterator[str]:
        size = 0
        for _, text in documents(cfg.data):
            yield text
            size += len(text)
            if size >= wanted:
                return

    return train_tokenizer(sample(), cfg.model.vocab_size, threads)


def _write_tokens(folder: pathlib.Path, d: config.Data, tokenizer: Tokenizer, threads: int,
                  say: Callable[[str], None]) -> dict:
    """Writes train.bin and heldout.bin: each document between its begin and end marks. Returns the counts."""
    small = tokenizer.vocab_size <= 1 << 16
    tokens, docs = {"train": 0, "heldout": 0}, {"train": 0, "heldout": 0}
    began = said = time.monotonic()
    size = 0
    with contextlib.ExitStack() as stack:
        out = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in tokens}
        for batch in _batches(documents(d), BATCH):
            try:
                encoded = tokenizer.encode([text for _, text in batch], threads)
            except ValueError:
                for where, text in batch:  # again, one by one, to name the document
                    try:
                        tokenizer.encode([text])
                    except ValueError as error:
                        raise ConfigError(f"{where}: {error}") from None
            for (_, text), ids in zip(batch, encoded):
                split = "heldout" if is_held_out(text) else "train"
                row = array.array("H" if small else "i", [*tokenizer.bos, *ids, *tokenizer.eos])
                if sys.byteorder == "big":
                    row.byteswap()
                row.tofile(out[split])
                tokens[split] += len(row)
                docs[split] += 1
                size += len(text)
                if d.max_tokens and tokens["train"] >= d.max_tokens:
                    break
            if time.monotonic() - said > 5:
                said = time.monotonic()
                say(f"preparing {d.source}: {sum(docs.values()):,} documents, {sum(tokens.values()):,} tokens, "
                    f"{size / 1e6 / (said - began):.1f} MB/s")
            if d.max_tokens and tokens["train"] >= d.max_tokens:
                break
    if not sum(docs.values()):
        raise ConfigError(f"[data] source = {d.source}: holds no text")
    return {"dtype": "uint16" if small else "int32", "tokens": tokens, "documents": docs}


def is_held_out(text: str) -> bool:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) % 100 == 99


def _batches(items: Iterator, size: int) -> Iterator[list]:
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


# Sources. Each yields (where, text); empty documents are left out.


def documents(d: config.Data) -> Iterator[tuple[str, str]]:
    """A new kind of source is a branch here and a function below. Raises ConfigError naming file and row."""
    if d.source == STDLIB:
        found = _stdlib()
    elif _is_local(d.source):
        found = _local(d)
    else:
        found = _hugging_face(d)
    return ((where, text) for where, text in found if text)


def _stdlib() -> Iterator[tuple[str, str]]:
    """Python's own standard library, file by file: real text that every machine has. Without its tests, which
    some systems leave out and which hold deliberately broken files."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "test", "tests"}.intersection(parts):
            with contextlib.suppress(UnicodeDecodeError):
                yield str(path), path.read_bytes().decode()


def _is_local(source: str) -> bool:
    return source.endswith(LOCAL) or pathlib.Path(source).exists()


def _local_files(source: str) -> list[pathlib.Path]:
    path = pathlib.Path(source)
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix in LOCAL)
    return [path] if path.exists() else sorted(map(pathlib.Path, glob.glob(source, recursive=True)))


def _stamp(path: pathlib.Path) -> list:
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns]


def _local(d: config.Data) -> Iterator[tuple[str, str]]:
    files = _local_files(d.source)
    if not files:
        raise ConfigError(f"[data] source = {d.source}: no such file")
    for path in files:
        if path.suffix == ".parquet":
            yield from _rows(path, "parquet", d)
        elif path.suffix in (".jsonl", ".json"):
            yield from _json_lines(path, d.text_field)
        elif path.suffix == ".txt":
            yield from _text_pieces(path)
        else:
            raise ConfigError(f"[data] source = {path}: must be one of {', '.join(LOCAL)}")


def _json_lines(path: pathlib.Path, field: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}: line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{where}: is not valid JSON: {error}") from None
                yield where, _field(where, row, field)


def _text_pieces(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """A file is a document; a long one is cut at line ends, so that some of it can be held out."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            number = 1
            while lines := file.readlines(TEXT_PIECE):
                yield f"{path}: line {number}", "".join(lines)
                number += len(lines)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error.reason}") from None


def _rows(path: pathlib.Path, kind: str, d: config.Data) -> Iterator[tuple[str, str]]:
    yield from _load_dataset(d, kind, data_files=str(path), split="train", where=str(path))


def _hugging_face(d: config.Data) -> Iterator[tuple[str, str]]:
    yield from _load_dataset(d, d.source, name=d.subset, split=d.split, where=d.source)


def _load_dataset(d: config.Data, *args, where: str, **options) -> Iterator[tuple[str, str]]:
    import datasets

    try:
        rows = iter(datasets.load_dataset(*args, streaming=True, **options))
        for number in range(1, sys.maxsize):
            row = next(rows, None)
            if row is None:
                return
            yield f"{where}: row {number}", _field(f"{where}: row {number}", row, d.text_field)
    except (ConfigError, GeneratorExit):
        raise
    except Exception as error:  # the library raises what its many readers raise
        raise ConfigError(f"[data] source = {d.source}: cannot be read: {type(error).__name__}: "
                          f"{str(error).splitlines()[0] if str(error) else ''}") from None


def _field(where: str, row: object, field: str) -> str:
    if not isinstance(row, dict) or field not in row:
        found = f"its fields are {', '.join(row)}" if isinstance(row, dict) else f"it is {type(row).__name__}"
        raise ConfigError(f"{where}: has no field {field!r} (data.text_field); {found}")
    if not isinstance(row[field], str):
        raise ConfigError(f"{where}: field {field!r} must be text, not {type(row[field]).__name__}")
    return row[field]


def main(argv: list[str]) -> int:
    try:
        args = config.parse_arguments(argv)
        prepare(config.load(args.config, args.overrides), lambda text: print(text, file=sys.stderr, flush=True))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
