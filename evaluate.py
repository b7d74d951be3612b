"""Validation loss, the same for any number of ranks, in training and for a run's newest checkpoint.

./run_train.sh configs/tiny.toml --eval-only        prints the evaluation row as JSON; writes nothing
"""

import functools
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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
    """The mean loss over the validation tokens, None if no token has one, and the sum of their
    losses in bits per byte of the text that they encode, NaN for data without a tokenizer. For a
    mixture also by source: {"loss": ..., "bits_per_byte": ..., "loss_by_source": {...}, ...}.
    Returns None if the run was asked to stop meanwhile."""
    sums = torch.zeros(len(dataset.validation), dtype=torch.float64, device=world.device)
    counts = torch.zeros(len(dataset.validation), dtype=torch.int64, device=world.device)
    model.eval()
    phase = "first evaluation batch"  # the first may compile
    for source, tensors in batches_of_sources(cfg, world, dataset):
        with run.phase(phase):
            run.stop.start_sync()
            on_device = [tensor.to(world.device, non_blocking=True) for tensor in tensors]
            terms, valid_tokens = model(*on_device)
            sums[source] += terms["loss"]
            counts[source] += valid_tokens
            run.stop.finish_sync()
            if run.stop.agreed:
                break
        phase = "evaluation batch"
    reshard(model)
    model.train()
    if run.stop.agreed:
        return None
    text_bytes = bytes_of_targets(cfg, dataset, world.rank, world.size)
    by_rank = all_gather_objects((sums.tolist(), counts.tolist(), text_bytes))
    data_ranks = by_rank[:: world.tp]  # the ranks of a tp group have the same sums
    losses = sum_over_ranks([losses for losses, _, _ in data_ranks])
    targets = sum_over_ranks([targets for _, targets, _ in data_ranks])
    sizes = sum_over_ranks([sizes for _, _, sizes in by_rank])
    return results(dataset.names, losses, targets, sizes)


def batches_of_sources(
    cfg: config.Config, world: World, dataset: Dataset
) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """(index of the source, a batch of its validation text) of all sources."""
    for source, stream in enumerate(dataset.validation):
        for batch in validation_batches(stream, cfg, world):
            yield source, batch


def sum_over_ranks(by_rank: list[list[float]]) -> list[float]:
    """[[value of each source] of each rank] -> [sum of each source]."""
    return [sum(of_source) for of_source in zip(*by_rank)]


def results(
    names: list[str], losses: list[float], targets: list[float], sizes: list[float]
) -> dict[str, Any]:
    """The evaluation's part of a row, from each source's summed loss in nats, its number of targets
    and the bytes of text that these encode. Sums over sums, not means of means."""
    bits = [nats / math.log(2) for nats in losses]
    row: dict[str, Any] = {
        "loss": ratio(sum(losses), sum(targets), missing=None),
        "bits_per_byte": ratio(sum(bits), sum(sizes), missing=math.nan),
    }
    if names:  # a mixture
        row["loss_by_source"] = {}
        row["bits_per_byte_by_source"] = {}
        for source, name in enumerate(names):
            loss = ratio(losses[source], targets[source], missing=None)
            row["loss_by_source"][name] = loss
            bits_per_byte = ratio(bits[source], sizes[source], missing=math.nan)
            row["bits_per_byte_by_source"][name] = bits_per_byte
    return row


def ratio(amount: float, count: float, missing: float | None) -> float | None:
    """amount / count; `missing` for a count of 0, which a mask may leave."""
    return amount / count if count else missing


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
    result = evaluate(model, cfg, world, dataset, run)
    assert result is not None  # only a training run stops between batches
    if world.rank == 0:
        for problem in checkpointer.problems:
            print_error(f"corrupt, skipped: {problem}")
        for text in metrics.missing_losses(result):
            print_error(text)
        print_line(metrics.as_json({"kind": "eval", "step": step, **result}))


def bytes_of_targets(cfg: config.Config, dataset: Dataset, rank: int, ranks: int) -> list[float]:
    """Of each source, this rank's share of the bytes that the validation targets encode. NaN if it
    cannot decode them, or they are answers in conversations."""
    unknown = [math.nan] * len(dataset.validation)
    if cfg.data.has_conversations or not dataset.tokenizer_files:
        return unknown
    folder = dataset.tokenizer_files[0].parent
    is_masked = cfg.data.document_mask
    sizes: list[float] = []
    try:
        for stream in dataset.validation:
            stop = validation_tokens(stream, cfg)
            sizes.append(target_bytes(stream, stop, is_masked, folder, rank, ranks))
    except (ImportError, ConfigError):  # no package for the tokenizer, or no documents
        return unknown
    return sizes


@functools.cache
def target_bytes(
    stream: TokenStream, stop: int, masked: bool, folder: pathlib.Path, rank: int, ranks: int
) -> int:
    """UTF-8 bytes of the text that a stream's tokens 1 ... stop-1 encode, in every ranks-th
    document. The sum over the ranks is that of the entire text. BOS and EOS have none, nor has a
    character that `stop` cuts. masked: the first token of a document is not a target. Raises
    ConfigError if documents or tokenizer cannot be read."""
    tokenizer = Tokenizer(folder)
    total = 0
    for _, begin, end in stream.documents(0, stop)[rank::ranks]:
        ids = stream.read(begin, end)[1].tolist()
        total += len(text_before(tokenizer, ids, stop - begin).encode())
        if masked or begin == 0:
            total -= len(tokenizer.decode(ids[:1]).encode())
    return total


def text_before(tokenizer: Tokenizer, ids: list[int], count: int) -> str:
    """The text of a document's first `count` tokens, without a character that the last of them only
    begins. The tokenizer decodes that to U+FFFD, but the text itself may contain U+FFFD, too."""
    text = tokenizer.decode(ids)
    if count >= len(ids):
        return text
    prefix = tokenizer.decode(ids[:count])
    length = 0
    while length < min(len(text), len(prefix)) and text[length] == prefix[length]:
        length += 1
    cuts_a_character = prefix + tokenizer.decode(ids[count:]) != text
    if length == len(prefix) and prefix.endswith("\ufffd") and cuts_a_character:
        length -= 1
    return text[:length]
