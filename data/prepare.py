"""Text -> token files, once. run_train.sh calls it; where the files are there and match, it does nothing.

    python -m data.prepare configs/tiny.toml

Writes train.bin, heldout.bin, where their documents end, tokenizer.model and manifest.json into
prepared/{source}-{hash}/, whole or not at all.
A document is held out when its hash falls into the last 1 %, whatever else the corpus holds.
"""

import contextlib
import fcntl
import glob
import hashlib
import itertools
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
from typing import Any, BinaryIO

import config
from config import ConfigError
from data.encode import encode_all
from data.tokenizer import Tokenizer, read_model, train_tokenizer
from data.tokens import MANIFEST, read_manifest

FORMAT = 2  # of the files; part of their identity
STDLIB = "python-stdlib"
LOCAL = (".jsonl", ".json", ".parquet", ".txt")
SYNC_SECONDS = 5.0  # between two points that a killed preparation goes on from
BEGUN, PROGRESS = "begun.json", "progress.json"  # of an unfinished one: what it prepares, and how far it is
TEXT_PIECE = 1 << 16  # characters: a longer .txt file becomes several documents


def identity(cfg: config.Config) -> dict:
    """What makes two preparations the same."""
    d = cfg.data
    found = {"source": d.source, "subset": d.subset, "split": d.split, "text_field": d.text_field,
             "tokenizer": "trained here", "vocab_size": cfg.model.vocab_size, "max_tokens": d.max_tokens,
             "format": FORMAT}
    if d.tokenizer:
        # Its own file says how many pieces it has; the model may have more rows.
        found |= {"tokenizer": hashlib.sha256(read_model(d.tokenizer)).hexdigest(), "vocab_size": None}
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
    files = _local_files(cfg.data.source) if _is_local(cfg.data.source) else []
    if files and [_stamp(f) for f in files] != manifest["files"]:  # the text may be gone, but not be another
        raise ConfigError(f"[data] source = {cfg.data.source}: changed since {folder} was prepared; delete that "
                          "folder, or prepare into another with data.path")
    return True


@contextlib.contextmanager
def _one_at_a_time(lock: pathlib.Path, say: Callable[[str], None]) -> Iterator[None]:
    while True:
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another process that prepares into {lock.parent}")
                fcntl.flock(file, fcntl.LOCK_EX)
            if lock.exists() and lock.samefile(f"/dev/fd/{file.fileno()}"):  # else its last holder removed it
                try:
                    yield
                finally:
                    lock.unlink()
                return


def _make(folder: pathlib.Path, cfg: config.Config, say: Callable[[str], None]) -> None:
    """In a folder beside, which a preparation that was killed leaves to the next one, and one that found its input
    wrong does not."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    files = [_stamp(f) for f in _local_files(cfg.data.source)] if _is_local(cfg.data.source) else []
    begun = json.loads(json.dumps({"identity": identity(cfg), "files": files}))
    if _read_json(temporary / BEGUN) != begun:
        shutil.rmtree(temporary, ignore_errors=True)
    try:
        model = temporary / "tokenizer.model"
        if not model.exists():
            temporary.mkdir(exist_ok=True)
            content = Tokenizer(cfg.data.tokenizer).model_bytes if cfg.data.tokenizer else _train_tokenizer(cfg, say)
            _replace(model, content)
            _replace(temporary / BEGUN, json.dumps(begun).encode())
        tokenizer = Tokenizer(model)
        if tokenizer.vocab_size > cfg.model.vocab_size:
            raise ConfigError(f"[model] vocab_size = {cfg.model.vocab_size}: smaller than the tokenizer "
                              f"{cfg.data.tokenizer}, which has {tokenizer.vocab_size} pieces")
        counts = _write_tokens(temporary, cfg.data, tokenizer.vocab_size, say)
        for name in (BEGUN, PROGRESS):
            (temporary / name).unlink(missing_ok=True)
        manifest = {"identity": identity(cfg), "vocab_size": tokenizer.vocab_size, **counts, "files": files,
                    "sha256": {path.name: _sha256(path) for path in sorted(temporary.iterdir())}}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2))
        os.sync()  # what the new name promises must survive a power cut
        if folder.exists():
            folder.rmdir()  # an empty one, by _matches
        temporary.rename(folder)
    except ConfigError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    tokens = counts["tokens"]
    say(f"prepared {folder}: {tokens['train']:,} tokens to train on, {tokens['heldout']:,} held out")


def _read_json(path: pathlib.Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def _replace(path: pathlib.Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all."""
    with path.with_suffix(".new").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".new").rename(path)


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _train_tokenizer(cfg: config.Config, say: Callable[[str], None]) -> bytes:
    """On the first part of the source: 2,000 characters per piece, 4 million at least, is where more text stops to
    change a byte-pair vocabulary much."""
    next(documents(cfg.data))  # what is wrong with the source is said first
    wanted = max(4_000_000, 2_000 * cfg.model.vocab_size)
    say(f"training a tokenizer of {cfg.model.vocab_size:,} pieces on up to {wanted / 1e6:,.0f} MB of {cfg.data.source}")

    def sample() -> Iterator[str]:
        size = 0
        for text in documents(cfg.data):
            yield text
            size += len(text)
            if size >= wanted:
                return

    return train_tokenizer(sample(), cfg.model.vocab_size, os.cpu_count() or 1)


def _write_tokens(folder: pathlib.Path, d: config.Data, vocab_size: int, say: Callable[[str], None]) -> dict:
    """Writes train.bin and heldout.bin: each document between its begin and end marks; and train.ends.bin and
    heldout.ends.bin: for each document the position after its last token, 8 bytes little-endian. Returns the counts.

    Every few seconds the files are synced and progress.json says how far they are good: from there it goes on when it
    was killed, reading what was read but not tokenizing it again.
    """
    small = vocab_size <= 1 << 16
    width, splits = 2 if small else 4, ("train", "heldout")
    at = _read_json(folder / PROGRESS) or {"read": 0, "characters": 0, "tokens": dict.fromkeys(splits, 0),
                                           "documents": dict.fromkeys(splits, 0)}
    tokens, docs = at["tokens"], at["documents"]
    if at["read"]:
        say(f"going on after {at['read']:,} documents of {d.source}, which were prepared before")
    began, known = time.monotonic(), at["characters"]
    said = synced = began
    with contextlib.ExitStack() as files:
        def opened(name: str, size: int) -> BinaryIO:
            file = files.enter_context((folder / name).open("r+b" if (folder / name).exists() else "w+b"))
            file.truncate(size)
            file.seek(size)
            return file

        out = {split: opened(f"{split}.bin", width * tokens[split]) for split in splits}
        ends = {split: opened(f"{split}.ends.bin", 8 * docs[split]) for split in splits}

        def sync() -> None:
            for file in (*out.values(), *ends.values()):
                file.flush()
                os.fsync(file.fileno())
            _replace(folder / PROGRESS, json.dumps(at).encode())

        full = bool(d.max_tokens) and tokens["train"] >= d.max_tokens
        source = () if full else itertools.islice(documents(d), at["read"], None)
        with contextlib.closing(encode_all(folder / "tokenizer.model", small, source)) as encoded:
            for chunk in encoded:
                start = 0
                for held_out, length in zip(chunk.held_out, chunk.lengths):
                    split = "heldout" if held_out else "train"
                    out[split].write(chunk.tokens[width * start : width * (start + length)])
                    start += length
                    tokens[split] += length
                    docs[split] += 1
                    ends[split].write(tokens[split].to_bytes(8, "little"))
                    if full := bool(d.max_tokens) and tokens["train"] >= d.max_tokens:
                        break
                at["read"] += len(chunk.lengths)
                at["characters"] += chunk.characters
                now = time.monotonic()
                if full or now - synced > SYNC_SECONDS:
                    synced = now
                    sync()
                if now - said > 5:
                    said = now
                    say(_how_far(d, at, (at["characters"] - known) / (now - began)))
                if full:
                    break
        sync()
    return {"dtype": "uint16" if small else "int32", "tokens": tokens, "documents": docs}


def _how_far(d: config.Data, at: dict, rate: float) -> str:
    """A line for a person; rate in characters per second of this launch."""
    total = sum(at["tokens"].values())
    line = f"preparing {d.source}: {sum(at['documents'].values()):,} documents, {total:,} tokens, {rate / 1e6:.1f} MB/s"
    if d.max_tokens:
        done = min(1.0, at["tokens"]["train"] / d.max_tokens)
        seconds = at["characters"] / max(done, 1e-9) * (1 - done) / max(rate, 1.0)
        line += f", {done:.1%}, {int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d} left"
    return line


# Sources. Each yields (where, text) and raises ConfigError.


def documents(d: config.Data) -> Iterator[str]:
    """The source's documents in order, empty ones left out. A new kind of source is a branch here and a function below.
    Raises ConfigError naming file and row."""
    found = False
    for where, text in _stdlib() if d.source == STDLIB else _local(d) if _is_local(d.source) else _hugging_face(d):
        if not isinstance(text, str):
            raise ConfigError(f"{where}: field {d.text_field!r} must be text, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate, which JSON can spell
            raise ConfigError(f"{where}: is not valid Unicode: {error.reason} at character {error.start}") from None
        found = found or bool(text)
        if text:
            yield text
    if not found:
        raise ConfigError(f"[data] source = {d.source}: holds no text")


def _stdlib() -> Iterator[tuple[str, object]]:
    """Python's own standard library, file by file: real text that every machine has. Without its tests, which
    some systems leave out and which hold deliberately broken files."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "test", "tests"}.intersection(parts):
            with contextlib.suppress(UnicodeDecodeError):
                yield str(path), path.read_bytes().decode()


def _is_local(source: str) -> bool:
    """A path or pattern, not the id of a Hugging Face dataset: those are NAME or OWNER/NAME, with no file's suffix."""
    suffixes = (*LOCAL, ".csv", ".tsv", ".gz", ".zst", ".zip", ".xz", ".arrow")
    return (source.endswith(suffixes) or pathlib.Path(source).exists()
            or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source))


def _local_files(source: str) -> list[pathlib.Path]:
    path = pathlib.Path(source)
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix in LOCAL)
    return [path] if path.exists() else sorted(map(pathlib.Path, glob.glob(source, recursive=True)))


def _stamp(path: pathlib.Path) -> list:
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns]


def _local(d: config.Data) -> Iterator[tuple[str, object]]:
    files = _local_files(d.source)
    if not files:
        raise ConfigError(f"[data] source = {d.source}: no such file (or folder, or pattern) of {', '.join(LOCAL)}")
    for path in files:
        if path.suffix == ".parquet":
            yield from _load_dataset(d, str(path), "parquet", data_files=str(path), split="train")
        elif path.suffix in (".jsonl", ".json"):
            yield from _json_lines(path, d.text_field)
        elif path.suffix == ".txt":
            yield from _text_pieces(path)
        else:
            raise ConfigError(f"[data] source = {path}: must be one of {', '.join(LOCAL)}")


def _json_lines(path: pathlib.Path, field: str) -> Iterator[tuple[str, object]]:
    """Line by line and not through `datasets`, which names neither line nor field of a bad one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(f"{path}: line {number}: is not valid JSON: {error}") from None
                yield f"{path}: line {number}", _field(f"{path}: line {number}", row, field)


def _text_pieces(path: pathlib.Path) -> Iterator[tuple[str, object]]:
    """A file is a document; a long one is cut at line ends, so that some of it can be held out."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(TEXT_PIECE):
                yield str(path), "".join(lines)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error.reason}") from None


def _hugging_face(d: config.Data) -> Iterator[tuple[str, object]]:
    return _load_dataset(d, d.source, d.source, name=d.subset, split=d.split)


def _load_dataset(d: config.Data, where: str, *args, **options) -> Iterator[tuple[str, object]]:
    import datasets

    try:
        for number, row in enumerate(datasets.load_dataset(*args, streaming=True, **options), 1):
            yield f"{where}: row {number}", _field(f"{where}: row {number}", row, d.text_field)
    except (ConfigError, GeneratorExit):
        raise
    except Exception as error:  # the library raises whatever its many readers raise
        first_line = str(error).partition("\n")[0]
        raise ConfigError(f"[data] source = {d.source}: cannot be read: {type(error).__name__}: {first_line}") from None


def _field(where: str, row: object, field: str) -> object:
    if not isinstance(row, dict) or field not in row:
        found = f"its fields are {', '.join(row)}" if isinstance(row, dict) else f"it is {type(row).__name__}"
        raise ConfigError(f"{where}: has no field {field!r} (data.text_field); {found}")
    return row[field]


def main(argv: list[str]) -> int:
    _, cfg = config.from_command_line(argv, __doc__)
    try:
        prepare(cfg, lambda text: print(text, file=sys.stderr, flush=True))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
