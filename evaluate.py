"""Validation loss, the same for any number of ranks, in training and for a run's newest checkpoint.

./run_train.sh configs/tiny.toml --eval-only        prints the evaluation row as JSON; writes nothing
"""

import contextlib
import functools
import math
import pathlib

import torch

import config
import metrics
from checkpoint.checkpointer import Checkpointer
from config import ConfigError
from data.dataset import Dataset, open_dataset
from data.loader import validation_batches, validation_tokens
from data.tokenizer import Tokenizer
from data.tokens import TokenStream
from files import print_error, print_line
from lifecycle.run import Run
from model.build import meta_model
from model.llama import Llama
from parallel.fsdp import reshard
from parallel.materialize import materialize, open_pretrained
from parallel.mesh import World, storage_device
from parallel.parallelize import parallelize
from parallel.ranks import all_gather_objects


@torch.no_grad()
def evaluate(
    model: Llama, cfg: config.Config, world: World, dataset: Dataset, run: Run
) -> dict | None:
    """Mean loss over the validation tokens, and the sum of their losses in bits per byte of the text that they encode,
    for a mixture also by source: {"loss": ..., "bits_per_byte": ..., "loss_by_source": {...}, ...}. Bits per byte of
    data without a tokenizer are NaN. A loss without any target is None. The result is
    None if the run was asked to stop meanwhile."""
    streams = dataset.validation
    sums = torch.zeros(len(streams), dtype=torch.float64, device=world.device)
    counts = torch.zeros(len(streams), dtype=torch.int64, device=world.device)
    model.eval()
    phase = "first evaluation batch"  # the first may compile
    for i, tensors in (
        (i, batch)
        for i, stream in enumerate(streams)
        for batch in validation_batches(stream, cfg, world)
    ):
        with run.phase(phase):
            run.stop.start_sync()
            found, valid = model(
                *(tensor.to(world.device, non_blocking=True) for tensor in tensors)
            )
            sums[i] += found["loss"]
            counts[i] += valid
            run.stop.finish_sync()
            if run.stop.agreed:
                break
        phase = "evaluation batch"
    reshard(model)
    model.train()
    if run.stop.agreed:
        return None
    text_bytes = bytes_of_targets(cfg, dataset, world.rank, world.size)
    ranks = all_gather_objects((sums.tolist(), counts.tolist(), text_bytes))
    losses, targets = (added([rank[i] for rank in ranks[:: world.tp]]) for i in (0, 1))
    bits, text = [nats / math.log(2) for nats in losses], added([rank[2] for rank in ranks])
    # sums over sums, not means of means; a mask may leave no target
    found = {
        name: [
            part / whole if whole else missing
            for part, whole in zip([*parts, sum(parts)], [*of, sum(of)])
        ]
        for name, parts, of, missing in (
            ("loss", losses, targets, None),
            ("bits_per_byte", bits, text, math.nan),
        )
    }
    return {name: means[-1] for name, means in found.items()} | {
        f"{name}_by_source": dict(zip(dataset.names, means))
        for name, means in found.items()
        if dataset.names
    }


def added(of_ranks: list[list[float]]) -> list[float]:
    return [sum(of_source) for of_source in zip(*of_ranks)]


def evaluate_newest(cfg: config.Config, world: World, run: Run) -> None:
    """--eval-only: prints the evaluation row of the run's newest good checkpoint."""
    dataset = open_dataset(cfg, train=False)
    checkpointer = Checkpointer(
        cfg, world, dataset.identities(), dataset.tokenizer_files, evaluating=True
    )
    step = checkpointer.start
    # of an import, step 0, the checkpoint has all weights, too
    pretrained = open_pretrained(cfg, step or 1)
    model = meta_model(cfg.model, cfg.lora)
    parallelize(model, cfg, world)
    materialize(
        model,
        cfg.run.seed,
        storage_device(cfg, world),
        pretrained.read_into if pretrained else None,
    )
    checkpointer.restore(model, None, pretrained.base() if pretrained else None)
    found = evaluate(model, cfg, world, dataset, run)
    assert found is not None  # only a training run stops between batches
    if world.rank == 0:
        for problem in checkpointer.problems:
            print_error(f"corrupt, skipped: {problem}")
        if found["loss"] is None:
            print_error(metrics.NO_VALIDATION_TARGET)
        print_line(metrics.as_json({"kind": "eval", "step": step, **found}))


def bytes_of_targets(cfg: config.Config, dataset: Dataset, rank: int, ranks: int) -> list[float]:
    """Of each source, this rank's share of the bytes that the validation targets encode; NaN if it cannot decode
    them, or they are answers in conversations."""
    with contextlib.suppress(ImportError, ConfigError, IndexError):
        # IndexError: the data has no tokenizer
        folder, masked = dataset.tokenizer_files[0].parent, cfg.data.document_mask
        if not cfg.data.messages_field:
            return [
                target_bytes(stream, validation_tokens(stream, cfg), masked, folder, rank, ranks)
                for stream in dataset.validation
            ]
    return [math.nan] * len(dataset.validation)


@functools.cache
def target_bytes(
    stream: TokenStream, stop: int, masked: bool, folder: pathlib.Path, rank: int, size: int
) -> int:
    """UTF-8 bytes of the text that a stream's tokens 1 ... stop-1 encode, in every size-th document; the sum over the
    ranks is that of the whole. BOS and EOS have none, nor has a character that `stop` cuts. masked: the first token of
    a document is no target. Raises ConfigError if documents or tokenizer cannot be read."""
    tokenizer, total = Tokenizer(folder), 0
    for _, begin, end in stream.documents(0, stop)[rank::size]:
        ids = stream.read(begin, end)[1].tolist()
        first = ids[:1] if masked or begin == 0 else []
        text = text_before(tokenizer, ids, stop - begin)
        total += len(text.encode()) - len(tokenizer.decode(first).encode())
    return total


def text_before(tokenizer: Tokenizer, ids: list[int], count: int) -> str:
    """The text of a document's first `count` tokens, without a character that the last of them begins. That decodes to
    U+FFFD, as a U+FFFD of the text itself does."""
    whole = tokenizer.decode(ids)
    if count >= len(ids):
        return whole
    cut = tokenizer.decode(ids[:count])
    length = 0
    while length < min(len(whole), len(cut)) and whole[length] == cut[length]:
        length += 1
    ends_inside = cut + tokenizer.decode(ids[count:]) != whole
    if length == len(cut) and cut.endswith("\ufffd") and ends_inside:
        length -= 1
    return whole[:length]
