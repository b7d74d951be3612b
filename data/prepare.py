"""Text -> token files, once. run_train.sh calls it; where the files are there and match, it does nothing.

    python -m data.prepare configs/tiny.toml

Writes train.bin, heldout.bin, where their documents end, the tokenizer and manifest.json into
prepared/{source}-{hash}/, whole or not at all; of a mixture each source into a folder of its own.
A document is held out when its hash falls into the last 1 %, whatever else the corpus holds.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import config
from config import ConfigError
from data.dataset import check_identity, common_tokenizer, data_folders, identity, parts, source_configs, weights
from data.encode import encode_all
from data.progress import Bar, Console
from data.sources import Source, file_stamps
from data.tokenizer import Tokenizer, train_tokenizer
from data.tokens import MANIFEST, read_manifest

SYNC_SECONDS = 5.0  # between two points that a killed preparation goes on from
BEGUN, PROGRESS = "begun.json", "progress.json"  # of an unfinished one: what it prepares, and how far it is


def prepare(cfg: config.Config, say: Callable[..., None] = lambda text, passing=False: passing or print(text)) -> list[pathlib.Path]:
    """Makes the folders of token files unless they are there and match. Raises ConfigError, with nothing published.

    say(text): a line for a person; say(text, passing=True): one that the next may overwrite.
    """
    if cfg.data.sources and not cfg.data.tokenizer:
        _make_common_tokenizer(cfg, say)
    folders = data_folders(cfg)
    for part, folder in zip(parts(cfg), folders):
        if not _matches(folder, part, say):
            with _told(folder), _one_at_a_time(folder, say):
                if not _matches(folder, part, say):  # another process may have made it meanwhile
                    _make(folder, part, say)
    return folders


def _make_common_tokenizer(cfg: config.Config, say: Callable[..., None]) -> None:
    """And beside it the stamps of the files that it was trained on. Raises ConfigError where those have changed."""
    path = common_tokenizer(cfg)
    stamps = path.with_suffix(".json")
    now = {part.data.source: file_stamps(part.data.source) for part in source_configs(cfg)}
    if not path.exists():
        with _told(path), _one_at_a_time(path, say):
            if not path.exists():
                content = _train_tokenizer(cfg, say)
                _replace(stamps, json.dumps(now).encode())
                _replace(path, content)
    before = _read_json(stamps) or {}
    changed = [source for source, files in now.items() if files and files != before.get(source)]
    if changed:
        raise ConfigError(f"{path}: {', '.join(changed)} changed since this tokenizer was trained on it; delete it and "
                          "the folders beside it, or prepare into another with data.path")


@contextlib.contextmanager
def _told(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: data could not be prepared: {error.strerror}") from None


def _matches(folder: pathlib.Path, cfg: config.Config, say: Callable[..., None]) -> bool:
    """Is the folder there, for this configuration? Raises ConfigError where it is there for another one."""
    manifest = read_manifest(folder)
    if manifest is None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder}: is there but holds no prepared data ({MANIFEST} is missing); move it away")
        return False
    check_identity(folder, manifest, cfg)
    files = file_stamps(cfg.data.source)
    if files and files != manifest["files"]:  # the text may be gone, but not be another
        raise ConfigError(f"[data] source = {cfg.data.source}: changed since {folder} was prepared; delete that "
                          "folder, or prepare into another with data.path")
    _check_content(folder, manifest, say)
    return True


def _check_content(folder: pathlib.Path, manifest: dict, say: Callable[..., None]) -> None:
    """Raises ConfigError where a file is not what was prepared. Hashed are those that are younger than the manifest,
    which was written last: terabytes of hashing before each start would keep a cluster waiting."""
    for name, digest in manifest["sha256"].items():
        path = folder / name
        if not path.exists():
            raise ConfigError(f"{path}: is missing; delete {folder} to prepare it again")
        if path.stat().st_mtime_ns > (folder / MANIFEST).stat().st_mtime_ns:
            say(f"{path}: was copied or changed since it was prepared; comparing its hash")
            if _sha256(path) != digest:
                raise ConfigError(f"{path}: was changed since it was prepared; delete {folder} to prepare it again")
            say(f"{path}: is unchanged; `touch {folder / MANIFEST}` spares this the next time")


@contextlib.contextmanager
def _one_at_a_time(path: pathlib.Path, say: Callable[..., None]) -> Iterator[None]:
    """Makes the folder above `path`, and holds a lock beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting for another process that prepares {path}")
                fcntl.flock(file, fcntl.LOCK_EX)
            if lock.exists() and lock.samefile(f"/dev/fd/{file.fileno()}"):  # else its last holder removed it
                try:
                    yield
                finally:
                    lock.unlink()
                return


def _make(folder: pathlib.Path, cfg: config.Config, say: Callable[..., None]) -> None:
    """In a folder beside, which a preparation that was killed leaves to the next one, and one that found its input
    wrong does not."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    files = file_stamps(cfg.data.source)
    begun = json.loads(json.dumps({"identity": identity(cfg), "files": files}))
    done = _read_json(temporary / MANIFEST) or {}
    if _read_json(temporary / BEGUN) != begun and any(done.get(key) != value for key, value in begun.items()):
        shutil.rmtree(temporary, ignore_errors=True)
        done = {}
    try:
        if not done:
            done = _fill(temporary, cfg, begun, say)
        if file_stamps(cfg.data.source) != files:
            raise ConfigError(f"[data] source = {cfg.data.source}: changed while it was prepared; start again")
        for path in set(temporary.iterdir()) - set(_kept(temporary)) - {temporary / MANIFEST}:
            path.unlink()  # what is killed from here on finds the manifest, and goes on here
        os.sync()  # what the new name promises must survive a power cut
        if folder.exists():
            folder.rmdir()  # an empty one, by _matches
        temporary.rename(folder)
    except ConfigError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    tokens = done["tokens"]
    say(f"prepared {folder}: {tokens['train']:,} tokens to train on, {tokens['heldout']:,} held out")


def _fill(temporary: pathlib.Path, cfg: config.Config, begun: dict, say: Callable[..., None]) -> dict:
    """Writes the files and, last, the manifest, which it returns."""
    if not (temporary / BEGUN).exists():
        temporary.mkdir(exist_ok=True)
        trained = {} if cfg.data.tokenizer else {"tokenizer.model": _train_tokenizer(cfg, say)}
        for name, content in (trained or Tokenizer(cfg.data.tokenizer).files).items():
            _replace(temporary / name, content)
        _replace(temporary / BEGUN, json.dumps(begun).encode())
    tokenizer = Tokenizer(temporary)
    if not tokenizer.eos:
        say(f"{cfg.data.tokenizer}: has no end mark that is known, so nothing stands between documents")
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(f"[model] vocab_size = {cfg.model.vocab_size}: smaller than the tokenizer "
                          f"{cfg.data.tokenizer}, which has {tokenizer.vocab_size} pieces")
    counts = _write_tokens(temporary, cfg.data, tokenizer.vocab_size, say)
    manifest = {**begun, "vocab_size": tokenizer.vocab_size, **counts,
                "sha256": {path.name: _sha256(path) for path in _kept(temporary)}}
    _replace(temporary / MANIFEST, json.dumps(manifest, indent=2).encode())
    return manifest


def _kept(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files whose hashes stand in the manifest."""
    passing = (BEGUN, PROGRESS, MANIFEST)
    return sorted(path for path in folder.iterdir() if path.name not in passing and path.suffix != ".new")


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


def _train_tokenizer(cfg: config.Config, say: Callable[..., None]) -> bytes:
    """On the first part of the source, or of each of a mixture by its weight: 2,000 characters per piece, 4 million at
    least, is where more text stops to change a byte-pair vocabulary much."""
    alone = source_configs(cfg) or [cfg]
    for part in alone:
        next(iter(Source(part.data)))  # what is wrong with a source is said first
    wanted = max(4_000_000, 2_000 * cfg.model.vocab_size)
    say(f"training a tokenizer of {cfg.model.vocab_size:,} pieces on up to {wanted / 1e6:,.0f} MB of "
        + ", ".join(part.data.source for part in alone))

    def sample() -> Iterator[str]:
        for part, weight in zip(alone, weights(cfg)):
            size = 0
            for text in Source(part.data):
                yield text
                size += len(text)
                if size >= wanted * weight / sum(weights(cfg)):
                    break

    return train_tokenizer(sample(), cfg.model.vocab_size, os.cpu_count() or 1)


def _write_tokens(folder: pathlib.Path, d: config.Data, vocab_size: int, say: Callable[..., None]) -> dict:
    """Writes train.bin and heldout.bin: each document between its begin and end marks; and train.ends.bin and
    heldout.ends.bin: for each document the position after its last token, 8 bytes little-endian. Returns the counts.

    Every few seconds the files are synced and progress.json says how far they are good, and the source read: from there
    it goes on when it was killed.
    """
    small = vocab_size <= 1 << 16
    width, splits = 2 if small else 4, ("train", "heldout")
    at = _read_json(folder / PROGRESS) or {"place": None, "characters": 0, "tokens": dict.fromkeys(splits, 0),
                                           "documents": dict.fromkeys(splits, 0)}
    tokens, docs = at["tokens"], at["documents"]
    if at["characters"]:
        say(f"going on after {sum(docs.values()):,} documents of {d.source}, which were prepared before")
    source, bar = Source(d, at["place"]), Bar(d, at, say)
    synced = time.monotonic()
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

        def full() -> bool:
            return bool(d.max_tokens) and tokens["train"] >= d.max_tokens

        with contextlib.closing(encode_all(folder, small, source)) as encoded:
            for chunk, found in () if full() else encoded:
                start = 0
                for held_out, length in zip(found.held_out, found.lengths):
                    if not length:  # text of which its tokenizer makes nothing
                        continue
                    split = "heldout" if held_out else "train"
                    out[split].write(found.tokens[width * start : width * (start + length)])
                    start += length
                    tokens[split] += length
                    docs[split] += 1
                    ends[split].write(tokens[split].to_bytes(8, "little"))
                    if full():
                        break
                at["place"] = chunk.place
                at["characters"] += found.characters
                bar.show(chunk.share)
                if full() or time.monotonic() - synced > SYNC_SECONDS:
                    synced = time.monotonic()
                    sync()
                if full():
                    break
        sync()
    return {"dtype": "uint16" if small else "int32", "tokens": tokens, "documents": docs, "revision": source.revision()}


def main(argv: list[str]) -> int:
    _, cfg = config.from_command_line(argv, __doc__)
    try:
        with Console(sys.stderr) as say:
            prepare(cfg, say)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
