"""Tokenizes a configuration's text, once. run_train.sh starts it when token files are missing.

    ./run_train.sh -m prepare configs/tiny.toml                   on all cores of this machine
    ./run_train.sh -m prepare configs/tiny.toml --task 3/8        every eighth part, from the fourth

Writes the token ids in parts (parts.py), the tokenizer and manifest.json into
prepared/{source}-{hash}/, one folder for each source. One process prepares one part; with fewer
parts than cores, each process tokenizes with several threads. The same command resumes.

With --task, several machines that share a folder prepare different parts. In a SLURM array, the
default is the array's task. A command without --task, or the launcher, then completes the folder.
The command verifies the hashes of complete folders.
"""

import contextlib
import hashlib
import multiprocessing
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait

import numpy as np

import config
from config import ConfigError
from data.folder import manifest_of
from data.tokens import damaged
from system import FINISHED, die_with_parent, print_error, read_json, usable_cores
from tools.prepare.folders import check_files, create_folders, local_splits, locked, write_manifest
from tools.prepare.formats import row_format
from tools.prepare.parts import (
    InThisThread,
    Part,
    encoder,
    file_now,
    parts_of,
    prepare_part,
    sha256,
)
from tools.prepare.source import SourceFile

LOG_SECONDS = 10.0  # between lines of progress
MOST_UNKNOWN = 0.01  # share of <unk> tokens above which to warn


def prepare(
    data: config.Data,
    vocab_size: int,
    cores: int | None = None,
    task: tuple[int, int] | None = None,
) -> list[pathlib.Path]:
    """Creates missing folders of token files, checks existing ones, and completes them.

    Returns one folder per source. vocab_size is the model's. task=(i, n) prepares only parts i,
    i + n, ... of each source. Raises one ConfigError with all problems, and OSError.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # we start one process per core ourselves
    cores = cores or usable_cores()
    folders = create_folders(data, vocab_size)
    problems: list[str] = []
    for folder, source in folders:
        if manifest_of(folder)["complete"]:
            continue
        try:
            # two tasks never prepare the same part, so they need no lock
            with contextlib.nullcontext() if task else locked(folder):
                preparation = Preparation(folder, source)
                if not preparation.manifest["complete"]:
                    preparation.prepare_parts(cores, *(task or (0, 1)))
                    if not task:
                        preparation.finish()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return [folder for folder, _ in folders]


class Preparation:
    """Prepares the parts of one source, and completes its folder."""

    def __init__(self, folder: pathlib.Path, data: config.Data):
        self.folder = folder
        self.data = data
        self.manifest = manifest_of(folder)
        self.width = np.dtype(self.manifest["dtype"]).itemsize
        self.limit = data.max_tokens or float("inf")
        self.parts: list[Part] = []
        for split, key in (("heldout", "validation_files"), ("train", "files")):
            files = [SourceFile(*entry) for entry in self.manifest[key]]
            self.parts += parts_of(folder, split, files, row_format(data).part_bytes)
        # token count of each training part, indexed by part number; 0 until the part is complete
        self.read = np.zeros(len(self.parts), np.int64)

    def prepare_parts(self, cores: int, first: int, step: int) -> None:
        """Prepares the missing ones among parts `first`, `first + step`, ...

        A part that fails does not stop the others. Raises ConfigError with the problems of all
        parts, and OSError.
        """
        parts = [*zip(self.parts, self.manifests())][first::step]
        missing = [part for part, manifest in parts if not manifest][::-1]
        workers = max(1, min(cores, len(missing)))
        arguments = (self.data, self.manifest["dtype"], max(1, cores // workers))
        encoder.cache_clear()
        running: dict[Future, Part] = {}
        problems = []
        with printing(self.print_progress), start_pool(workers) as pool:
            while missing or running:
                while missing and len(running) < workers:
                    part = missing.pop()
                    if self.is_needed(part):
                        running[pool.submit(prepare_part, part, *arguments)] = part
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    part = running.pop(future)
                    try:
                        tokens = future.result()
                        if part.split == "train":
                            self.read[part.number] = tokens
                    except (ConfigError, OSError) as error:
                        problems.append((part, error))
                running = {f: part for f, part in running.items() if self.is_needed(part)}
        wrong = []
        for part, error in sorted(problems, key=lambda problem: problem[0].number):
            if self.is_needed(part):
                if isinstance(error, OSError):
                    raise error
                wrong += error.problems
        if wrong:
            raise ConfigError(*wrong)

    def manifests(self) -> list[dict]:
        """The manifest of each part; {} if the part is incomplete. Updates self.read from them,
        since another machine may have prepared a part."""
        manifests = [part.manifest() for part in self.parts]
        for part, manifest in zip(self.parts, manifests):
            if manifest and part.split == "train":
                self.read[part.number] = manifest["read"]
        return manifests

    def is_needed(self, part: Part) -> bool:
        """Whether the complete parts before this one hold fewer than data.max_tokens tokens."""
        return part.split == "heldout" or self.tokens_before(part) < self.limit

    def tokens_before(self, part: Part) -> int:
        return int(self.read[: part.number].sum())

    def finish(self) -> None:
        """Writes the final manifest and deletes parts beyond data.max_tokens. Raises ConfigError
        and OSError."""
        manifest = self.manifest
        check_files(self.folder, manifest, local_splits(self.folder, self.data))
        needed = []
        listed: dict[str, list] = {"train": [], "heldout": []}
        for part, of_part in zip(self.parts, self.manifests()):
            if not self.is_needed(part):
                for suffix in (".json", ".bin", ".ends.bin"):
                    part.path(suffix).unlink(missing_ok=True)
                continue
            if not of_part:  # its files changed after the part was prepared
                raise ConfigError(
                    f"{part.ranges[0].file.path}: changed meanwhile; prepare it again"
                )
            for split, (entry, *_) in of_part["token_files"].items():
                if part.split == split == "train":
                    entry[2] = self.tokens_needed(part, entry[2])
                if entry[2]:
                    listed[split].append(entry)
            needed.append(of_part)
        tokens = {split: sum(entry[2] for entry in listed[split]) for split in listed}
        counted = ("rows", "wrong", "left_out", "unknown")
        count = {key: sum(of_part[key] for of_part in needed) for key in counted}
        self.check(tokens, count["rows"], count["wrong"])
        for temporary in self.folder.glob(".*.tmp"):
            temporary.unlink()
        hashes = [digest for of_part in needed for *_, digest in of_part["token_files"].values()]
        for key in ("files", "validation_files"):
            manifest[key] = [file_now(SourceFile(*entry)) for entry in manifest[key]]
        manifest |= {
            "complete": True,
            "tokens": tokens,
            **count,
            "sha256": hashlib.sha256("".join(hashes).encode()).hexdigest(),
            "token_files": listed,
        }
        write_manifest(self.folder, manifest)
        unknown = count["unknown"] / sum(tokens.values())
        line = f"prepared {self.folder}: {tokens['train']:,} tokens to train on, "
        line += f"{tokens['heldout']:,} for validation"
        if unknown:
            line += f"; {unknown:.2%} of them are <unk>, which the tokenizer does not know"
        print_error(line)
        if unknown >= MOST_UNKNOWN:
            print_error(
                f"warning: {unknown:.0%} of the text is lost to the model: its tokenizer is of other "
                "text; name another, or leave data.tokenizer out to train one"
            )

    def tokens_needed(self, part: Part, tokens: int) -> int:
        """How many of a training part's tokens to train on: up to the end of the document that
        reaches data.max_tokens."""
        limit = self.limit - self.tokens_before(part)
        if not part.number or tokens < limit:  # the first part already stopped at the limit
            return tokens
        ends = np.fromfile(part.path(".ends.bin"), "<i8")
        return int(ends[np.searchsorted(ends, limit)])

    def check(self, tokens: dict[str, int], rows: int, wrong: int) -> None:
        """Raises ConfigError if the source has too little text or too many invalid rows."""
        source = f"[data] source = {self.data.source}"
        if not any(tokens.values()):
            raise ConfigError(f"{source}: holds no text")
        if tokens["heldout"] < 2:  # evaluation needs an input and its target
            name = f"[data] validation = {self.data.validation}" if self.data.validation else source
            raise ConfigError(f"{name}: holds nothing to evaluate on")
        if 100 * wrong > rows * (self.data.bad_rows == "skip"):
            raise ConfigError(
                f'{source}: {wrong:,} of {rows:,} rows are wrong; data.bad_rows = "skip" leaves out '
                "at most one in a hundred"
            )

    def print_progress(self, is_over: threading.Event) -> None:
        """Periodically prints how much all processes on all machines have written."""
        parts = [part for part in self.parts if part.split == "train"]
        text = sum(part.size for part in parts)
        began = time.time()
        tokens = self.tokens_written(began)
        first = None  # (share done, time) at the first line with a share
        while not is_over.wait(LOG_SECONDS):
            done = [part for part in parts if part.path(".json").exists()]
            done_tokens = size_of(part.path(".bin") for part in done) // self.width
            before = tokens
            tokens = self.tokens_written(began)
            line = f"{tokens:,} tokens, {len(done)} of {len(parts)} parts"
            if done_tokens:  # bytes per token are unknown before the first part is complete
                bytes_per_token = sum(part.size for part in done) / done_tokens
                speed = (tokens - before) * bytes_per_token / LOG_SECONDS
                line += f", {speed / 1e6:,.1f} MB/s"
                share = max(tokens / self.limit, tokens * bytes_per_token / text)
                now = time.monotonic()
                first = first or (share, now)
                if share > first[0]:
                    left = (1 - share) * (now - first[1]) / (share - first[0])
                    line += f"; {max(0, left) / 60:.0f} min left"
            print_error(f"{self.data.source}: {line}")

    def tokens_written(self, began: float) -> int:
        """How many training tokens the files hold, without those that processes which were killed
        before the time `began` left behind."""
        complete = size_of(self.folder.glob("train-?????.bin"))
        return (complete + size_of(self.folder.glob(".train-?????.bin.*"), began)) // self.width


def size_of(paths: Iterable[pathlib.Path], since: float = 0) -> int:
    """The total bytes of files that were written to since a time. Skips files that were renamed
    since they were listed."""
    size = 0
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            size += status.st_size if status.st_mtime >= since else 0
    return size


@contextlib.contextmanager
def printing(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs `work` in a background thread, and sets its event on exit."""
    is_over = threading.Event()
    threading.Thread(target=work, args=(is_over,), daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


@contextlib.contextmanager
def start_pool(workers: int) -> Iterator[Executor]:
    """A pool of processes that are killed on exit, even while they work."""
    if workers == 1:
        yield InThisThread()
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(),))
    try:
        yield pool
    finally:
        for process in [*(pool._processes or {}).values()]:
            process.kill()
        pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    die_with_parent()
    if os.getppid() != parent:  # the parent died before die_with_parent()
        os._exit(1)


def check_hashes(folder: pathlib.Path) -> None:
    """Raises ConfigError if a token file of a complete folder is missing or was changed."""
    for of_part in sorted(folder.glob("*-?????.json")):
        for (name, *_), _, digest in read_json(of_part)["token_files"].values():
            path = folder / name
            if not path.exists():
                raise damaged(path, "is missing")
            if sha256(path) != digest:
                raise damaged(path, "was changed since it was written")


def task_of(text: str) -> tuple[int, int]:
    """Parses "I/N" into (i, n). Raises ValueError."""
    number, count = map(int, text.split("/"))
    return number % max(1, count), max(1, count)  # SLURM array indices may start at 1


def before_training(argv: list[str]) -> int:
    """main() for the launcher. Prepares all parts, even in a SLURM array; verifies no hashes."""
    _, cfg = config.from_command_line(argv, __doc__)
    prepare(cfg.data, cfg.model.vocab_size)
    return FINISHED


def main(argv: list[str]) -> int:
    parser = config.argument_parser()
    array = [os.environ.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("ID", "COUNT")]
    default = "/".join(array) if all(array) else None
    text = "prepare parts I, I + N, ... alone"
    parser.add_argument("--task", metavar="I/N", type=task_of, default=default, help=text)
    args, cfg = config.from_command_line(argv, __doc__, parser)
    for folder, _ in create_folders(cfg.data, cfg.model.vocab_size):
        if manifest_of(folder)["complete"]:
            print_error(f"{folder} is prepared: comparing its hashes")
            check_hashes(folder)
    prepare(cfg.data, cfg.model.vocab_size, task=args.task)
    return FINISHED
