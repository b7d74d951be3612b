"""Text -> token files, once. run_train.sh calls it; where the files are there and match, it does nothing.

    python -m data.prepare configs/tiny.toml

Writes train.bin, heldout.bin (validation), where their documents end, the tokenizer and manifest.json into
prepared/{source}-{hash}/, one for each source, in full or not at all.
"""

import functools
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence

import config
import files
from config import ConfigError
from data.dataset import check_identity, identity, kind_of, open_source, prepared_parts
from data.encode import report, write_tokens
from data.sources import file_stamps
from data.tokenizer import Tokenizer, train_tokenizer
from data.tokens import MANIFEST, damaged, read_manifest


def prepare(cfg: config.Config, whole: bool = False) -> list[pathlib.Path]:
    """Creates missing folders of token files, and checks existing ones. Returns them, by source. Raises ConfigError,
    after which a folder is published in full or not at all. whole: also what data.order = "growing" would leave to the
    run."""
    if cfg.data.sources:
        from data.mixture import prepare_tokenizer

        prepare_tokenizer(cfg, identity, _train_tokenizer, _make_under_lock)
    parts = prepared_parts(cfg)
    for part in parts:
        _make_under_lock(
            part[0], functools.partial(_matches, *part), functools.partial(_prepare_folder, *part)
        )
    if cfg.data.order == "growing":
        from data.growing import prepare_ahead

        prepare_ahead(cfg, parts, whole, _check_hashes)
    return [folder for folder, _ in parts]


def _make_under_lock(
    path: pathlib.Path, made: Callable[[], bool], make: Callable[[], None]
) -> None:
    """make() unless made(), holding a lock file next to `path`, hidden and never removed. OSError -> ConfigError."""
    if not path.name:
        raise ConfigError(f"[data] path = {path}: is the current folder or /; name one in it")
    lock = path.with_name(f".{path.name}.lock")
    try:
        if made():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            held = files.lock(lock)
        except TimeoutError:
            report(f"waiting for another process that prepares {path}")
            held = files.lock(lock, timeout=-1)
        try:
            if not made():  # else another process made it meanwhile
                make()
        finally:
            held.release()
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path}: data could not be prepared: {error.strerror}"
        ) from None


def _matches(folder: pathlib.Path, cfg: config.Config) -> bool:
    """Whether the folder is prepared. Raises ConfigError if it is for another configuration, or was changed."""
    manifest = read_manifest(folder)
    if manifest is None:
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder}: is there but holds no prepared data ({MANIFEST} is missing); move it away"
            )
        return False
    check_identity(folder, manifest, cfg)
    if file_stamps(cfg.data.source) not in (
        [],
        manifest["files"],
    ):  # the text may be gone, but not changed
        raise ConfigError(
            f"[data] source = {cfg.data.source}: changed since {folder} was prepared; delete the folder"
        )
    _check_hashes(folder, manifest)
    return True


def _check_hashes(folder: pathlib.Path, manifest: dict) -> None:
    """Raises ConfigError if a file is missing, or newer than the manifest and not what this says."""
    written_last = folder / MANIFEST
    for name, digest in manifest["sha256"].items():
        path = folder / name
        if not path.exists():
            raise damaged(path, "is missing")
        # Hashes only files newer than the manifest: hashing terabytes before each start would stall a cluster.
        if path.stat().st_mtime_ns > written_last.stat().st_mtime_ns:
            report(f"{path}: was copied or changed since it was prepared; comparing its hash")
            if _sha256(path) != digest:
                raise damaged(path, "was changed since it was prepared")
            report(f"{path}: is unchanged; `touch {written_last}` spares this the next time")


def _prepare_folder(folder: pathlib.Path, cfg: config.Config) -> None:
    """Works in a hidden folder next to it, from which the next call resumes. Its manifest says from the beginning what
    is prepared, and how far it is; it has hashes when all is written. Invalid input removes the hidden folder, but not
    what was read of a Hugging Face dataset: a network failure looks the same, and is temporary."""
    temporary, d = folder.with_name(f".{folder.name}.tmp"), cfg.data
    wanted: dict = {"identity": identity(cfg), "files": file_stamps(d.source)}
    manifest = files.read_json(temporary / MANIFEST)
    try:
        if any(
            manifest.get(key) != value for key, value in wanted.items()
        ):  # none, or of something else
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            content = (
                Tokenizer(d.tokenizer).files
                if d.tokenizer
                else {"tokenizer.model": _train_tokenizer([cfg])}
            )
            for name, part in content.items():
                files.write_atomic(temporary / name, part)
            counts = {key: {"train": 0, "heldout": 0} for key in ("tokens", "documents")}
            manifest = wanted | counts | {"place": None}
            files.write_atomic(temporary / MANIFEST, json.dumps(manifest))
        if "sha256" not in manifest:
            _write_folder(temporary, cfg, manifest)
        if file_stamps(d.source) != wanted["files"]:
            raise ConfigError(
                f"[data] source = {d.source}: changed while it was prepared; start again"
            )
        files.publish(temporary, folder)
    except ConfigError:
        if kind_of(d.source).remote and any(manifest.get("documents", {}).values()):
            report(f"what was read of {d.source} stays; the same command resumes here")
        else:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if d.order == "global":
        tokens = manifest["tokens"]
        report(
            f"prepared {folder}: {tokens['train']:,} tokens to train on, {tokens['heldout']:,} for validation"
        )


def _write_folder(temporary: pathlib.Path, cfg: config.Config, manifest: dict) -> None:
    """Writes the token files, resuming from where the manifest says, and completes it."""
    tokenizer, d = Tokenizer(temporary), cfg.data
    if not tokenizer.eos:
        report(f"{d.tokenizer}: has no EOS token that is known, so nothing separates documents")
    size = tokenizer.vocab_size
    if size > cfg.model.vocab_size:
        rows = cfg.model.vocab_size
        raise ConfigError(
            f"[model] vocab_size = {rows}: smaller than the tokenizer {d.tokenizer}, of {size} entries"
        )
    dtype = (
        "uint16" if size <= 1 << 16 and not d.messages_field else "int32"
    )  # a sign stands for no loss
    source = open_source(d, manifest["place"])
    (source.write_tokens or write_tokens)(temporary, source, dtype, manifest)
    content = sorted(
        path for path in temporary.iterdir() if path.suffix != ".tmp" and path.name != MANIFEST
    )
    manifest |= {
        "vocab_size": size,
        "dtype": dtype,
        "sha256": {path.name: _sha256(path) for path in content},
    }
    del manifest["place"]
    files.write_atomic(temporary / MANIFEST, json.dumps(manifest, indent=2))


def _sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _train_tokenizer(parts: list[config.Config], weights: Sequence[float] = (1.0,)) -> bytes:
    """Trains on the start of each source, in proportion to its weight: 2,000 characters per vocabulary entry, at least
    4 million; more text hardly changes a BPE vocabulary. 800 if training waits for it (docs/data.md has the seconds).
    Returns the model file's content. Raises ConfigError."""
    size = parts[0].model.vocab_size
    wanted = max(4_000_000, size * (800 if parts[0].data.order == "growing" else 2_000))
    report(
        f"training a tokenizer of {size:,} vocabulary entries on up to {wanted / 1e6:,.0f} MB of "
        + ", ".join(part.data.source for part in parts)
    )

    def sample() -> Iterator[str]:
        for part, weight in zip(parts, weights):
            read = 0
            for text in open_source(part.data):
                yield text
                read += len(text)
                if read >= wanted * (weight / sum(weights)):
                    break

    return train_tokenizer(sample(), size)


def main(argv: list[str]) -> int:
    _, cfg = config.from_command_line(argv, __doc__, tool=True)
    try:
        prepare(cfg, whole=True)
    except KeyboardInterrupt:
        report("stopped; the same command resumes here")
        return 130
    return 0


if __name__ == "__main__":
    config.run_tool(main)
