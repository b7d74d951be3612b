"""A Llama trainer with FSDP2 in one file, of torch alone. train.py computes the same losses.

    python minimal.py configs/tiny.toml                                   one process
    torchrun --nproc-per-node 8 minimal.py configs/smollm2-135m.toml      one process per GPU

Reads the TOML file, the token ids that `./run_train.sh -m prepare CONFIG` has made, and the newest
checkpoint.
Shapes: B sequences of T tokens each, D model width, H query and K key/value heads of width E, F
feed-forward width, V vocabulary. m, p, o, t: the sections [model], [parallel], [optim], [train].
"""

import gc
import hashlib
import json
import math
import os
import platform
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:  # in float32; the result has the weight's dtype
        normed = F.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return normed.to(self.weight.dtype) * self.weight


def rope(x: Tensor, theta: float) -> Tensor:
    """Rotates x[i] and x[i + E/2] of each head by position / theta^(2i / E), in float32."""
    length, width = x.shape[-2:]  # x: (B, heads, T, E)
    frequency = 1.0 / theta ** (torch.arange(0, width, 2, device=x.device) / width)  # (E/2)
    angle = torch.outer(torch.arange(length, device=x.device), frequency)  # (T, E/2)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, dim=-1)  # (B, heads, T, E/2) each
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.head_dim = m.head_dim or m.dim // m.n_heads
        self.rope_theta = m.rope_theta
        self.q_proj = nn.Linear(m.dim, m.n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(m.dim, m.n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(m.dim, m.n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(m.n_heads * self.head_dim, m.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q = self.q_proj(x).view(heads).transpose(1, 2)  # (B, T, D) -> (B, H, T, E)
        k = self.k_proj(x).view(heads).transpose(1, 2)  # (B, T, D) -> (B, K, T, E)
        v = self.v_proj(x).view(heads).transpose(1, 2)  # (B, T, D) -> (B, K, T, E)
        q, k = rope(q, self.rope_theta), rope(k, self.rope_theta)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2).flatten(2)  # (B, H, T, E) -> (B, T, H*E)
        return self.o_proj(out)  # (B, T, D)


class FeedForward(nn.Module):
    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.gate_proj = nn.Linear(m.dim, m.ffn_dim, bias=False)
        self.up_proj = nn.Linear(m.dim, m.ffn_dim, bias=False)
        self.down_proj = nn.Linear(m.ffn_dim, m.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, F) -> (B, T, D)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.attention_norm = RMSNorm(m.dim, m.norm_eps)
        self.attention = Attention(m)
        self.feed_forward_norm = RMSNorm(m.dim, m.norm_eps)
        self.feed_forward = FeedForward(m)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Head(nn.Linear):
    def __init__(self, m: SimpleNamespace):
        super().__init__(m.dim, m.vocab_size, bias=False)
        self.norm = RMSNorm(m.dim, m.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))  # (B, T, D) -> (B, T, V)


class Llama(nn.Module):
    def __init__(self, m: SimpleNamespace, residual_dtype: torch.dtype):
        super().__init__()
        self.residual_dtype = residual_dtype
        self.embedding = nn.Embedding(m.vocab_size, m.dim)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.n_layers))
        self.head = Head(m)
        if m.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens).to(self.residual_dtype)  # (B, T) -> (B, T, D)
        for block in self.blocks:
            x = block(x).to(self.residual_dtype)
        logits = self.head(x).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def shard(model: Llama, p: SimpleNamespace, mesh: dist.DeviceMesh) -> None:
    """Shards each parameter by rows over all ranks. FSDP2 all-gathers and reshards whole units."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, p.param_dtype),
        reduce_dtype=getattr(torch, p.reduce_dtype),
        cast_forward_inputs=False,  # the residual stream keeps its dtype
    )
    fsdp = partial(fully_shard, mesh=mesh, mp_policy=policy)
    for block in model.blocks:
        if p.recompute != "none":  # inside the unit, so that backward does not repeat FSDP2's hooks
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fsdp(block, reshard_after_forward=p.reshard_after_forward)
    # The root unit, with which backward begins: embedding and head, two units in train.py.
    fsdp(model, reshard_after_forward=False)
    # Explicit prefetch: after a unit's all-gather, issue those of the next n units, which overlap
    # with its compute. With n = 0 FSDP2 does so by itself, in backward alone, for one unit.
    forward_order = [model, *model.blocks]
    backward_order = [model, *reversed(model.blocks)]
    for i, unit in enumerate(forward_order):
        unit.set_modules_to_forward_prefetch(forward_order[i + 1 : i + 1 + p.prefetch_forward])
    for i, unit in enumerate(backward_order):
        unit.set_modules_to_backward_prefetch(backward_order[i + 1 : i + 1 + p.prefetch_backward])


@torch.no_grad()
def initialize(model: Llama, m: SimpleNamespace, seed: int, device: torch.device) -> None:
    """Allocates the shards and fills them with values that do not depend on the number of ranks."""
    model.to_empty(device=device)
    if m.tie_embeddings:  # to_empty() untied them
        model.head.weight = model.embedding.weight
    for name, parameter in model.named_parameters():
        module = name.split(".")[-2]
        # Each rank draws all rows and keeps its shard. Each block of rows has its own seed.
        full = torch.empty(parameter.shape, device=device)
        for number, block in enumerate(full.split(max(1, 65536 // full[0].numel()))):
            key = hashlib.blake2b(f"{seed}/{name}/{number}".encode(), digest_size=8).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(key, "big") >> 1)
            if "norm" in module:
                block.fill_(1.0)
            elif module == "head" or (module == "embedding" and m.tie_embeddings):
                std = m.dim**-0.5
                nn.init.trunc_normal_(block, 0.0, std, -3 * std, 3 * std, generator=generator)
            elif module in ("o_proj", "up_proj", "down_proj"):
                layer = int(name.split(".")[1])  # the residual stream should not grow with depth
                block.normal_(0.0, 0.02 / math.sqrt(2 * (layer + 1)), generator=generator)
            else:
                block.normal_(0.0, 1.0 if module == "embedding" else 0.02, generator=generator)
        shards = full.chunk(dist.get_world_size())  # fewer shards than ranks if rows are few
        if dist.get_rank() < len(shards):
            parameter.to_local().copy_(shards[dist.get_rank()])


def read_sample(cfg: SimpleNamespace, files: list[Tensor], number: int) -> Tensor:
    """The T+1 tokens of a sample. They depend on its number alone, so a resume stores only that."""
    # Window w of the text, which may span several files, is tokens w T ... w T + T.
    length = cfg.train.seq_len
    count = (sum(map(len, files)) - 1) // length
    epoch, index = divmod(number, count)
    # The first 0 is the source's number: train.py can mix several.
    start = permute(index, count, f"{cfg.run.seed}/{epoch}/0/0") * length
    pieces = []
    for tokens in files:  # memory-mapped
        pieces.append(tokens[max(0, start) : max(0, start + length + 1)].long())
        start -= len(tokens)
    return torch.cat(pieces)


def permute(index: int, count: int, key: str) -> int:
    """Element `index` of a permutation of 0 ... count-1 that is computed on the fly."""
    # A Feistel network (https://doi.org/10.1137/0217022) permutes the numbers of 2 * half bits:
    # each round XORs one half with a keyed hash of the other, which can be undone. Numbers that
    # are not below count are permuted again.
    round_keys = hashlib.blake2b(key.encode(), digest_size=64).digest()
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    while True:
        left, right = divmod(index, 2**half)
        for i in range(0, 64, 8):
            x = right ^ int.from_bytes(round_keys[i : i + 8], "big")
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64  # the hash: splitmix64's finalizer
            x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (x ^ x >> 31) % 2**half
        index = left * 2**half + right
        if index < count:
            return index


def build_optimizer(model: Llama, o: SimpleNamespace) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(norms, betas=o.betas, eps=o.eps, weight_decay=0.0, fused=True)
    optimizer.add_param_group({"params": matrices, "weight_decay": o.weight_decay})
    for p in matrices + norms:  # created before AdamW's first step, so that a checkpoint can load
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def learning_rate(o: SimpleNamespace, end: int, step: int) -> float:
    if step < o.warmup_steps:
        return o.lr * step / o.warmup_steps
    start = end - o.decay_steps if o.schedule == "wsd" else o.warmup_steps
    progress = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
    linear = 1 - progress
    cosine = (1 + math.cos(math.pi * progress)) / 2
    remaining = {"constant": 1.0, "cosine": cosine, "linear": linear, "wsd": linear}[o.schedule]
    return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * remaining)


def train(cfg: SimpleNamespace, files: list[Tensor], device: torch.device) -> None:
    t, p = cfg.train, cfg.parallel
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):  # no rank ever holds the full model
        model = Llama(cfg.model, getattr(torch, p.output_dtype or p.param_dtype))
    shard(model, p, dist.init_device_mesh(device.type, (ranks,)))
    initialize(model, cfg.model, cfg.run.seed, device)
    optimizer = build_optimizer(model, cfg.optim)  # last: the two lines above replace parameters

    weights = dict(model.named_parameters())
    samples_read = torch.zeros((), dtype=torch.int64)
    state = {"model": weights, "optim": {name: optimizer.state[w] for name, w in weights.items()}}
    state |= {"samples": samples_read}
    folder = Path(cfg.run.output_dir, f"{cfg.run.name}-minimal", "checkpoints")
    newest = max(folder.glob("step-*"), default=None)
    if newest:
        dcp.load(state, checkpoint_id=newest)  # in place; any number of ranks may have saved it
    first_step = int(newest.name.removeprefix("step-")) + 1 if newest else 1

    micro_batch = t.micro_batch_size or math.ceil(t.global_batch_size / ranks)
    assert t.global_batch_size % (micro_batch * ranks) == 0, "micro-batches do not fill a step"
    tokens_per_step = t.global_batch_size * t.seq_len
    for step in range(first_step, t.steps + 1):
        loss_sum = torch.zeros((), device=device)
        for begin in range(0, t.global_batch_size, micro_batch * ranks):
            first = int(samples_read) + begin + rank * micro_batch
            samples = [read_sample(cfg, files, first + i) for i in range(micro_batch)]
            batch = torch.stack(samples).to(device)  # (B, T+1)
            loss = model(batch[:, :-1], batch[:, 1:])  # the target of a token is the next one
            # FSDP2 averages gradients over ranks. Scaled so, they become those of the mean loss.
            (loss * ranks / tokens_per_step).backward()
            loss_sum += loss.detach()
        samples_read += t.global_batch_size
        dist.all_reduce(loss_sum)
        limit = math.inf if t.max_grad_norm == "off" else t.max_grad_norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit, error_if_nonfinite=True)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg.optim, cfg.optim.schedule_steps or t.steps, step)
        optimizer.step()
        optimizer.zero_grad()
        loss, norm = loss_sum.item() / tokens_per_step, norm.full_tensor().item()
        if rank == 0:
            print(json.dumps({"step": step, "loss": loss, "grad_norm": norm}), flush=True)
        save_every = cfg.checkpoint.save_every_steps or t.steps
        if cfg.saves and (step == t.steps or step % save_every == 0):
            dcp.save(state, checkpoint_id=folder / "saving")
            if rank == 0:  # only a complete checkpoint gets this name
                (folder / "saving").rename(folder / f"step-{step:08d}")


# The implemented options and their defaults. All others are refused, except those in IGNORED.
OPTIONS = (
    ("run", {"name": None, "output_dir": "outputs", "seed": 0, "device": "auto"}),
    ("model", {"dim": None, "n_layers": None, "ffn_dim": None, "vocab_size": None}),
    ("model", {"n_heads": None, "n_kv_heads": None, "head_dim": None, "rope_theta": 5e5}),
    ("model", {"norm_eps": 1e-5, "tie_embeddings": False}),
    ("data", {"source": "python-stdlib", "subset": None, "split": "train", "text_field": "text"}),
    ("data", {"max_tokens": None, "validation": None, "tokenizer": None}),
    ("data", {"path": None}),
    ("train", {"steps": None, "seq_len": 2048, "max_grad_norm": 1.0}),
    ("train", {"global_batch_size": 8, "micro_batch_size": None}),
    ("optim", {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}),
    ("optim", {"schedule": "cosine", "schedule_steps": None, "warmup_steps": 0}),
    ("optim", {"decay_steps": None, "min_lr_ratio": 0.1}),
    ("parallel", {"param_dtype": "auto", "reduce_dtype": "float32", "output_dtype": None}),
    ("parallel", {"reshard_after_forward": True, "prefetch_forward": 1, "prefetch_backward": 1}),
    ("parallel", {"recompute": "none"}),
    ("checkpoint", {"save_every_steps": None}),
)
IGNORED = {  # these options change no loss
    "run": ["deterministic", "start_timeout_seconds", "step_timeout_seconds"],
    "data": ["bad_rows"],
    "parallel": ["compile", "dp_replicate", "dp_shard", "gather_once"],
    "checkpoint": ["keep_last", "keep_every_steps", "async_save", "resume", "allow_changed"],
    "eval": ["every_steps", "batches"],
    "log": ["every_steps", "tensorboard", "tracker"],
    "profile": ["at_step", "steps"],
}


def read_options(path: str) -> SimpleNamespace:
    """Reads a TOML file into cfg.section.option. Raises ValueError for options not implemented."""
    toml = tomllib.loads(Path(path).read_text())
    cfg = SimpleNamespace(saves="checkpoint" in toml)
    for section, defaults in OPTIONS:
        options = vars(cfg).setdefault(section, SimpleNamespace())
        for option, default in defaults.items():
            setattr(options, option, toml.get(section, {}).pop(option, default))
    refused = []
    for section, table in toml.items():
        unread = table if section in IGNORED or hasattr(cfg, section) else ["*"]
        names = [option for option in unread if option not in IGNORED.get(section, [])]
        refused += [f"{section}.{option}" for option in names]
    if refused:
        raise ValueError(f"{path}: not implemented: {', '.join(refused)}")
    cfg.run.name = cfg.run.name or Path(path).stem
    return cfg


def open_data(cfg: SimpleNamespace) -> list[Tensor]:
    """Maps the token files of the one complete folder that was prepared with these options."""
    names = ["source", "subset", "split", "text_field", "tokenizer", "max_tokens", "validation"]
    identity = {f"data.{name}": getattr(cfg.data, name) for name in names} | {"version": 8}
    identity["model.vocab_size"] = None if cfg.data.tokenizer else cfg.model.vocab_size
    if cfg.data.source == "python-stdlib":
        identity["python"] = platform.python_version()
    root = Path(cfg.data.path or "prepared")
    if Path(cfg.data.source, "manifest.json").exists():
        root = Path(cfg.data.source)
    matching = {}
    for file in sorted(root.rglob("manifest.json")):
        manifest = json.loads(file.read_text())
        # Imported tokens have no identity, so their folder must be named.
        known = [identity, None] if file.parent == root else [identity]
        if manifest.get("identity") in known and manifest.get("complete"):
            matching[str(file.parent)] = manifest
    if len(matching) != 1:
        names = ", ".join(matching) or "none; `./run_train.sh -m prepare CONFIG` prepares one"
        raise ValueError(f"data.path must name one complete folder of this data, of: {names}")
    [(folder, manifest)] = matching.items()
    files = []
    for name, dtype_name, length, offset, *_ in manifest["token_files"]["train"]:
        dtype = getattr(torch, dtype_name)
        first = offset // dtype.itemsize
        tokens = torch.from_file(str(Path(folder, name)), size=first + length, dtype=dtype)
        files.append(tokens[first:])
    return files


def main() -> None:
    try:
        cfg = read_options(*sys.argv[1:])
        files = open_data(cfg)
    except (OSError, TypeError, ValueError) as error:
        print(f"usage: minimal.py CONFIG\n{error}", file=sys.stderr)
        sys.exit(2)
    device = torch.device("cpu")
    if cfg.run.device == "cuda" or (cfg.run.device == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if cfg.parallel.param_dtype == "auto":
        cpu = torch.cpu.get_capabilities()
        native = cpu.get("avx512_bf16", False) or cpu.get("amx_bf16", False)
        if device.type == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        cfg.parallel.param_dtype = "bfloat16" if native else "float32"
    train(cfg, files, device)
    gc.collect()  # frees FSDP2's buffers, which gloo may wait for while it ends
    dist.barrier()  # gloo aborts if a rank leaves while another still communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
