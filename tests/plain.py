"""A second implementation of a run: from its configuration and its raw text to losses, gradient norms, digests,
evaluations and weights, in one process, in float64, the whole batch at once. It knows nothing of ranks, units, dtypes
and chunks, and uses nothing of the trainer but its options and its fresh weights, which tests/test_minimal.py holds
against minimal.py's.

The order of the data is tests/data/order_model.py's.
"""

import fnmatch
import functools
import glob
import hashlib
import itertools
import json
import math
import pathlib
from fractions import Fraction
from typing import NamedTuple

import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import config
from model.build import meta_model
from parallel.materialize import materialize
from tests.data.order_model import epoch_order

IGNORED = -1  # a target without a loss


class Text(NamedTuple):
    """Documents one behind the other."""

    ids: list[int]
    document: list[int]  # the number of each token's document


class Source(NamedTuple):
    name: str
    train: Text
    validation: Text


# The text


def texts_of(pattern: str, field: str) -> list[str]:
    """The texts of a source, in the order in which its files are read: that of their names' hashes."""
    paths = [pathlib.Path(path) for path in glob.glob(pattern)]
    texts = []
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        texts += [json.loads(line)[field] for line in path.read_text().splitlines()]
    return texts


def is_held_out(text: str) -> bool:
    """Of a text of less than 2^22 tokens: one document in 25, by its hash."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 25 == 0


@functools.cache
def tokenizer_of(path: str) -> sentencepiece.SentencePieceProcessor:
    """Of a file, or of the folder that it is in."""
    file = pathlib.Path(path)
    if file.is_dir():
        file = file / "tokenizer.model"
    return sentencepiece.SentencePieceProcessor(model_file=str(file))


def joined(documents: list[list[int]]) -> Text:
    ids = []
    numbers = []
    for number, document in enumerate(documents):
        ids += document
        numbers += [number] * len(document)
    return Text(ids, numbers)


@functools.cache
def read_source(
    pattern: str, field: str, max_tokens: int | None, validation: str | None, tokenizer: str
) -> Source:
    """Training text up to the document with which max_tokens are reached. Held out are the documents whose hash
    says so, or another source's, or else the last hundredth of the text."""
    model = tokenizer_of(tokenizer)

    def encoded(text: str) -> list[int]:
        return [model.bos_id(), *model.encode(text), model.eos_id()]

    train = []
    held = []
    if validation:
        held = [encoded(text) for text in texts_of(validation, field)]
    for text in texts_of(pattern, field):
        if max_tokens and sum(map(len, train)) >= max_tokens:
            break
        to_held = not validation and is_held_out(text)
        (held if to_held else train).append(encoded(text))
    if held:
        return Source(pattern, joined(train), joined(held))
    whole = joined(train)
    end = len(whole.ids)
    first = end - max(2, end // 100)
    validation_text = Text(whole.ids[first:end], whole.document[first:end])
    return Source(pattern, Text(whole.ids[:first], whole.document[:first]), validation_text)


def sources_of(cfg: config.Config) -> list[Source]:
    d = cfg.data
    if not d.sources:
        return [read_source(d.source, d.text_field, d.max_tokens, d.validation, d.tokenizer)]
    found = []
    for s in d.sources:
        field = s.text_field or d.text_field
        most = s.max_tokens or d.max_tokens
        found.append(read_source(s.source, field, most, s.validation, d.tokenizer))
    return found


# Which window is sample k


@functools.cache
def mixed(weights: tuple[str, ...], count: int) -> list[tuple[int, int]]:
    """(source, number within it) of the first `count` samples. Of share w, sample j of a source comes at
    floor((j-1) / w) or later and is due by ceil(j / w); of those that may come the one that is due first is next."""
    shares = [Fraction(weight) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    taken = [0] * len(shares)
    order = []
    for number in range(count):
        due = []
        for source, share in enumerate(shares):
            if math.floor(taken[source] / share) <= number:
                due.append((math.ceil((taken[source] + 1) / share), source))
        source = min(due)[1]
        order.append((source, taken[source]))
        taken[source] += 1
    return order


def samples(cfg: config.Config, sources: list[Source], count: int) -> list[tuple[int, int]]:
    """(source, window) of the first `count` samples."""
    weights = tuple(repr(s.weight) for s in cfg.data.sources) or ("1",)
    windows = []
    for number, (_, train, _) in enumerate(sources):
        text = len(train.ids), cfg.train.seq_len
        of_source: list[int] = []
        for epoch in itertools.count():
            if len(of_source) >= count:
                break
            of_source += epoch_order(*text, cfg.run.seed, epoch, number)
        windows.append(of_source)
    return [(source, windows[source][index]) for source, index in mixed(weights, count)]


def window(text: Text, start: int, length: int, masked: bool) -> tuple[list[int], list[int], list]:
    """(inputs, targets, documents) of `length` positions from `start`, filled up behind the text's end."""
    ids = text.ids[start : start + length + 1]
    documents = text.document[start : start + length + 1]
    if not masked:
        documents = [0] * len(documents)
    targets = []
    for after, before, document in zip(ids[1:], documents, documents[1:]):
        targets.append(after if before == document else IGNORED)
    lacking = length - len(targets)
    inputs = (ids + [0] * length)[:length]
    documents = (documents + [-1] * length)[:length]
    return inputs, targets + [IGNORED] * lacking, documents


def digest(number: int, text: Text, start: int, length: int) -> int:
    raw = b"".join(token.to_bytes(8, "little") for token in text.ids[start : start + length + 1])
    salt = number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=5, salt=salt).digest(), "big")


# The model


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, m: config.Model, positions: Tensor) -> Tensor:
    """x (B, heads, T, E) as complex numbers of both halves, turned by their position (B, T)."""
    half = m.width_per_head // 2
    frequency = m.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    if m.rope_scaling:
        s = m.rope_scaling
        wave = 2 * math.pi / frequency
        low_wave = s.original_max_position_embeddings / s.low_freq_factor
        high_wave = s.original_max_position_embeddings / s.high_freq_factor
        smooth = s.original_max_position_embeddings / wave - s.low_freq_factor
        smooth = smooth / (s.high_freq_factor - s.low_freq_factor)
        between = (1 - smooth) * frequency / s.factor + smooth * frequency
        longer = torch.where(wave > low_wave, frequency / s.factor, between)
        frequency = torch.where(wave < high_wave, frequency, longer)
    angle = positions[:, None, :, None] * frequency  # (B, 1, T, E/2)
    unit = torch.polar(torch.ones_like(angle), angle)
    turned = torch.complex(x[..., :half], x[..., half:]) * unit
    return torch.cat([turned.real, turned.imag], -1)


def logits_of(
    m: config.Model, weights: dict[str, Tensor], inputs: Tensor, documents: Tensor
) -> Tensor:
    """(B, T) -> (B, T, V). A token sees those of its own document that are not behind it."""
    length = inputs.shape[1]
    index = torch.arange(length)
    same = documents[:, :, None] == documents[:, None, :]  # (B, T, T)
    sees = same & (index[:, None] >= index)
    positions = index - same.int().argmax(-1)  # from the first token of the document
    embedding = weights["embedding.weight"]
    head = weights.get("head.weight", embedding)
    x = embedding[inputs]
    groups = m.n_heads // m.n_kv_heads
    for i in range(m.n_layers):

        def linear(h: Tensor, name: str, block: str = f"blocks.{i}") -> Tensor:
            return h @ weights[f"{block}.{name}.weight"].T

        def heads(h: Tensor, name: str, block: str = f"blocks.{i}") -> Tensor:
            h = linear(h, f"attention.{name}_proj", block).unflatten(-1, (-1, m.width_per_head))
            if m.qk_norm and name != "v":
                h = rms_norm(h, weights[f"{block}.attention.{name}_norm.weight"], m.norm_eps)
            return h.transpose(1, 2)  # (B, heads, T, E)

        h = rms_norm(x, weights[f"blocks.{i}.attention_norm.weight"], m.norm_eps)
        q = rotated(heads(h, "q"), m, positions)
        k = rotated(heads(h, "k"), m, positions).repeat_interleave(groups, 1)
        v = heads(h, "v").repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(m.width_per_head)
        scores = scores.masked_fill(~sees[:, None], -math.inf)
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), "attention.o_proj")
        h = rms_norm(x, weights[f"blocks.{i}.feed_forward_norm.weight"], m.norm_eps)
        gate = linear(h, "feed_forward.gate_proj")
        hidden = gate * gate.sigmoid() * linear(h, "feed_forward.up_proj")
        x = x + linear(hidden, "feed_forward.down_proj")
    return rms_norm(x, weights["head.norm.weight"], m.norm_eps) @ head.T


# The weights before the first step


NAMES = {  # here, and in Hugging Face's folders
    "embedding.": "model.embed_tokens.",
    "head.norm.": "model.norm.",
    "head.": "lm_head.",
    "blocks.": "model.layers.",
    ".attention_norm": ".input_layernorm",
    ".feed_forward_norm": ".post_attention_layernorm",
    ".attention.": ".self_attn.",
    ".feed_forward.": ".mlp.",
}


def name_in_folder(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def name_in_adapter(name: str) -> str:
    """PEFT's name of ...q_proj.lora_a.weight."""
    name = name_in_folder(name).replace("lora_a", "lora_A").replace("lora_b", "lora_B")
    return f"base_model.model.{name}"


def first_weights(cfg: config.Config) -> dict[str, Tensor]:
    """Of a base, of adapters, and fresh ones."""
    weights = {}
    stored = {}
    if cfg.model.init_from:
        stored = load_file(f"{cfg.model.init_from}/model.safetensors")
        for name, _ in meta_model(cfg.model).named_parameters():
            weights[name] = kept(name, stored[name_in_folder(name)], cfg.lora)
    if cfg.lora and cfg.lora.init_from:
        stored = load_file(f"{cfg.lora.init_from}/adapter_model.safetensors")
    fresh = meta_model(cfg.model, cfg.lora)
    materialize(fresh, cfg.run.seed, torch.device("cpu"))
    for name, p in fresh.named_parameters():
        if "lora_" in name:
            weights[name] = stored.get(name_in_adapter(name), p.detach())
        elif not cfg.model.init_from:
            weights[name] = p.detach()
    return {name: weight.double() for name, weight in weights.items()}


def kept(name: str, weight: Tensor, lora: config.Lora | None) -> Tensor:
    """A weight of the base as it is kept next to adapters."""
    if lora is None or lora.base_dtype == "float32":
        return weight
    if lora.base_dtype == "nf4" and "_proj" in name:
        from extras.lora import nf4  # tests/extras/lora/test_nf4.py holds it against torchao's

        return nf4.dequantize(nf4.codes_of(weight), nf4.scales_of(weight), torch.float32)
    return weight.bfloat16()


def with_adapters(weights: dict[str, Tensor], lora: config.Lora | None) -> dict[str, Tensor]:
    """The matrices that multiply: W, or W + alpha / rank B A."""
    merged = {name: weight for name, weight in weights.items() if "lora_" not in name}
    if lora:
        alpha = 2 * lora.rank if lora.alpha is None else lora.alpha
        for name in merged:
            a = weights.get(name.replace(".weight", ".lora_a.weight"))
            if a is not None:
                b = weights[name.replace(".weight", ".lora_b.weight")]
                merged[name] = merged[name] + alpha / lora.rank * b @ a
    return merged


# Training


def learning_rate(o: config.Optim, end: int, step: int) -> float:
    """Up in a line, then down to min_lr_ratio of it at `end`, then flat."""
    if step < o.warmup_steps:
        return o.lr * step / o.warmup_steps
    begin = end - (o.decay_steps or 0) if o.schedule == "wsd" else o.warmup_steps
    gone = 0.0
    if step > begin:
        gone = min(1.0, (step - begin) / (end - begin))
    if o.schedule == "cosine":
        gone = math.sin(math.pi / 2 * gone) ** 2
    if o.schedule == "constant":
        gone = 0.0
    return o.lr * (1 - gone) + o.lr * o.min_lr_ratio * gone


class Optimizer:
    """AdamW, or Muon for the matrices of the blocks. Newton-Schulz's iteration is a polynomial of each singular
    value."""

    def __init__(self, o: config.Optim, weights: dict[str, Tensor]):
        self.o = o
        self.weights = weights
        self.first = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], lr: float) -> None:
        self.steps += 1
        for name, g in gradients.items():
            w = self.weights[name]
            of_this = lr
            if self.o.name == "muon" and name.startswith("blocks") and w.ndim == 2:
                change = self.orthogonal(name, g)
                of_this = lr * (self.o.muon_lr or self.o.lr) / self.o.lr
            else:
                change = self.adam(name, g)
            if w.ndim > 1:
                change = change + self.o.weight_decay * w
            w -= of_this * change

    def adam(self, name: str, g: Tensor) -> Tensor:
        beta1, beta2 = self.o.betas
        self.first[name] = beta1 * self.first[name] + (1 - beta1) * g
        self.second[name] = beta2 * self.second[name] + (1 - beta2) * g * g
        mean = self.first[name] / (1 - beta1**self.steps)
        square = self.second[name] / (1 - beta2**self.steps)
        return mean / (square.sqrt() + self.o.eps)

    def orthogonal(self, name: str, g: Tensor) -> Tensor:
        momentum = 0.95
        self.first[name] = momentum * self.first[name] + (1 - momentum) * g
        ahead = momentum * self.first[name] + (1 - momentum) * g
        u, s, vh = torch.linalg.svd(ahead, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        return 0.2 * math.sqrt(max(g.shape)) * (u * s) @ vh


class Run:
    """A run that goes on under another configuration with each leg."""

    def __init__(self, cfg: config.Config):
        self.weights = first_weights(cfg)
        self.optimizer = Optimizer(cfg.optim, self.weights)
        self.trained = []
        for name, weight in self.weights.items():
            is_frozen = any(fnmatch.fnmatch(name, pattern) for pattern in cfg.model.freeze)
            if not is_frozen and (cfg.lora is None or "lora_" in name):
                self.trained.append(name)
                weight.requires_grad_()
        self.samples = 0  # read so far
        self.rows: dict[int, dict] = {}
        self.evaluations: dict[int, dict] = {}

    def train(self, cfg: config.Config, first: int, last: int) -> None:
        """Steps first ... last."""
        sources = sources_of(cfg)
        t = cfg.train
        count = self.samples + (last - first + 1) * t.global_batch_size
        order = samples(cfg, sources, count)
        for step in range(first, last + 1):
            numbers = range(self.samples, self.samples + t.global_batch_size)
            self.samples += t.global_batch_size
            rows = []
            digests = 0
            for number in numbers:
                source, its_window = order[number]
                text = sources[source].train
                start = its_window * t.seq_len
                rows.append(window(text, start, t.seq_len, cfg.data.document_mask))
                digests += digest(number, text, start, t.seq_len)
            losses, targets = self.losses(cfg, rows)
            loss = losses.sum() / targets
            gradients = torch.autograd.grad(loss, [self.weights[name] for name in self.trained])
            norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
            scale = 1.0
            if t.max_grad_norm != "off":
                scale = min(1.0, t.max_grad_norm / (norm + 1e-6))
            lr = learning_rate(cfg.optim, cfg.optim.schedule_steps or t.steps, step)
            self.optimizer.step({name: g * scale for name, g in zip(self.trained, gradients)}, lr)
            self.rows[step] = {
                "loss": loss.item(),
                "grad_norm": norm,
                "lr": lr,
                "batch_digest": digests % 2**53,
                "targets": targets,
                "tokens": t.global_batch_size * t.seq_len,
            }
            due = cfg.eval and cfg.eval.every_steps and step % cfg.eval.every_steps == 0
            if cfg.eval and (due or step == t.steps):
                self.evaluations[step] = self.evaluate(cfg, sources)

    def losses(self, cfg: config.Config, rows: list[tuple]) -> tuple[Tensor, int]:
        """(the loss of each position, how many have one)."""
        inputs, targets, documents = (torch.tensor(part) for part in zip(*rows))
        logits = logits_of(cfg.model, with_adapters(self.weights, cfg.lora), inputs, documents)
        losses = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return losses, int((targets != IGNORED).sum())

    @torch.no_grad()
    def evaluate(self, cfg: config.Config, sources: list[Source]) -> dict:
        """Each target that is read counts once; sums over sums."""
        assert cfg.eval
        nats = []
        targets = []
        sizes = []
        masked = cfg.data.document_mask
        for _, _, text in sources:
            count = len(text.ids)
            if cfg.eval.batches:
                tokens = cfg.eval.batches * cfg.train.global_batch_size * cfg.train.seq_len
                count = min(count, tokens + 1)
            read = Text(text.ids[:count], text.document[:count])
            starts = range(0, count - 1, cfg.train.seq_len)
            rows = [window(read, start, cfg.train.seq_len, masked) for start in starts]
            losses, its_targets = self.losses(cfg, rows)
            nats.append(losses.sum().item())
            targets.append(its_targets)
            sizes.append(text_bytes(text, count, str(cfg.data.tokenizer)))
        bits = [n / math.log(2) for n in nats]
        found: dict = {"loss": sum(nats) / sum(targets), "bits_per_byte": sum(bits) / sum(sizes)}
        if cfg.data.sources:
            found["loss_by_source"] = [n / t for n, t in zip(nats, targets)]
            found["bits_per_byte_by_source"] = [n / size for n, size in zip(bits, sizes)]
        return found


def text_bytes(text: Text, count: int, tokenizer: str) -> float:
    """Of the first tokens: of whole documents, and of one that is cut its tokens' share."""
    model = tokenizer_of(tokenizer)
    total = 0.0
    for number in dict.fromkeys(text.document[:count]):
        ids = [i for i, document in zip(text.ids, text.document) if document == number]
        share = text.document[:count].count(number) / len(ids)
        total += share * len(model.decode(ids).encode())
    return total
