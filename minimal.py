"""A Llama trainer with FSDP2 on one page, of torch and the standard library alone. train.py computes the same.

    python minimal.py configs/tiny.toml                                   one process
    torchrun --nproc-per-node 8 minimal.py configs/smollm2-135m.toml      one process per GPU
Reads train.py's TOML and prepared data, prints one JSON object a step, resumes from its own newest checkpoint.
Shapes: B batch, T tokens, D model width, H query heads, K key/value heads, E head width, F feed-forward, V vocabulary.
"""

import hashlib
import json
import math
import os
import pathlib
import platform
import sys
from functools import partial
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


class RMSNorm(
    nn.RMSNorm
):  # statistics in float32; the result in the weight's dtype, not the residual stream's
    def forward(self, x: Tensor) -> Tensor:
        return (
            F.rms_norm(x.float(), self.normalized_shape, eps=self.eps).to(self.weight.dtype)
            * self.weight
        )


def rope(x: Tensor, theta: float) -> Tensor:  # (B, heads, T, E), computed in float32
    length, width = x.shape[-2:]
    frequency = 1.0 / theta ** (torch.arange(0, width, 2, device=x.device).float() / width)  # (E/2)
    angle = torch.outer(torch.arange(length, device=x.device).float(), frequency)  # (T, E/2)
    first, second = x.float().chunk(2, dim=-1)
    turned = [
        first * angle.cos() - second * angle.sin(),
        second * angle.cos() + first * angle.sin(),
    ]
    return torch.cat(turned, dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.head_dim, self.theta = m.head_dim or m.dim // m.n_heads, m.rope_theta
        linear, q_dim, kv_dim = (
            partial(nn.Linear, bias=False),
            m.n_heads * self.head_dim,
            m.n_kv_heads * self.head_dim,
        )
        self.attention_norm = RMSNorm(m.dim, m.norm_eps)
        self.attention = nn.ModuleDict(
            {
                "q_proj": linear(m.dim, q_dim),
                "k_proj": linear(m.dim, kv_dim),
                "v_proj": linear(m.dim, kv_dim),
                "o_proj": linear(q_dim, m.dim),
            }
        )
        self.feed_forward_norm = RMSNorm(m.dim, m.norm_eps)
        self.feed_forward = nn.ModuleDict(
            {
                "gate_proj": linear(m.dim, m.ffn_dim),
                "up_proj": linear(m.dim, m.ffn_dim),
                "down_proj": linear(m.ffn_dim, m.dim),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        normed, a = self.attention_norm(x), self.attention
        q, k, v = (
            project(normed)
            .unflatten(-1, (-1, self.head_dim))
            .transpose(1, 2)  # (B, T, D) -> (B, H or K, T, E)
            for project in (a.q_proj, a.k_proj, a.v_proj)
        )
        q, k = rope(q, self.theta), rope(k, self.theta)
        # (B, H, T, E)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + a.o_proj(out.transpose(1, 2).flatten(2))  # (B, H, T, E) -> (B, T, H*E) -> (B, T, D)
        normed, f = self.feed_forward_norm(x), self.feed_forward
        # (B, T, D) -> (B, T, F) -> (B, T, D)
        return x + f.down_proj(F.silu(f.gate_proj(normed)) * f.up_proj(normed))


class Head(nn.Module):  # final norm, output matrix and loss, summed over the tokens: one FSDP unit
    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.norm = RMSNorm(m.dim, m.norm_eps)
        self.weight: Tensor = nn.Parameter(torch.empty(m.vocab_size, m.dim))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(self.norm(x), self.weight)  # (B, T, D) -> (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


class Llama(nn.Module):
    def __init__(self, m: SimpleNamespace):
        super().__init__()
        self.embedding = nn.Embedding(m.vocab_size, m.dim)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.n_layers))
        self.head = Head(m)
        if m.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (B, T) -> (B, T, D)
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)


def shard(model: Llama, tied: bool, p: SimpleNamespace, mesh: dist.DeviceMesh) -> None:
    """Makes each parameter of a meta model a DTensor, of which every rank stores some rows, with FSDP2's hooks."""
    # Activation checkpointing first: around a sharded block, backward would repeat FSDP2's hooks, too.
    for block in model.blocks if p.recompute == "full" else ():
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    # A unit is all-gathered at once. Tied, embedding and head share a parameter, and so a unit.
    blocks = [[block] for block in model.blocks]
    units = (
        [[model.embedding, model.head], *blocks]
        if tied
        else [[model.embedding], *blocks, [model.head]]
    )
    param, reduce, out = (
        getattr(torch, d) for d in (p.param_dtype, p.reduce_dtype, p.output_dtype or p.param_dtype)
    )
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, cast_forward_inputs=False)
    for unit in units:
        # backward begins with the head
        reshard = p.reshard_after_forward and model.head not in unit
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for module in (model.embedding, *model.blocks):
        # the policy's output_dtype would round the head's loss, too
        module.register_forward_hook(lambda module, inputs, output: output.to(out))
    # last: the root's hooks
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    # Explicit prefetch: a unit's all-gather also issues those of the next n units; 0: as FSDP2 does by itself.
    forward = [unit[0] for unit in units]
    # begins with the head's unit
    backward = [forward[0], *reversed(forward[1:])] if tied else forward[::-1]
    for i in range(len(units)):
        forward[i].set_modules_to_forward_prefetch(forward[i + 1 : i + 1 + p.prefetch_forward])
        backward[i].set_modules_to_backward_prefetch(backward[i + 1 : i + 1 + p.prefetch_backward])
    model.embedding.set_unshard_in_backward(tied)  # the backward of a lookup alone reads no weight


def initialize(model: Llama, m: SimpleNamespace, seed: int, device: torch.device) -> None:
    """Gives the shards storage and values. Each block of about 65,536 elements has a generator: equal on any mesh."""
    model.to_empty(device=device)
    if m.tie_embeddings:
        # to_empty() unties them; FSDP2 holds the embedding's
        model.head.weight = model.embedding.weight
    for name, parameter in model.named_parameters():
        local, rows, row_shape = parameter.detach().to_local(), len(parameter), parameter.shape[1:]
        first = math.ceil(rows / dist.get_world_size()) * dist.get_rank()  # of this rank
        size = max(1, 65536 // math.prod(row_shape))  # rows of a block
        for begin in range(first // size * size, first + len(local), size) if len(local) else ():
            values = torch.empty(min(size, rows - begin), *row_shape, device=device)
            key = hashlib.blake2b(f"{seed}/{name}/{begin // size}".encode(), digest_size=8).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(key, "big") >> 1)
            kind, std = name.split(".")[-2], m.dim**-0.5
            if "norm" in kind:
                values.fill_(1.0)
            elif kind == "head" or (kind == "embedding" and m.tie_embeddings):
                nn.init.trunc_normal_(values, 0.0, std, -3 * std, 3 * std, generator=generator)
            elif kind in ("o_proj", "up_proj", "down_proj"):
                # smaller with depth: the residual stream should not grow
                values.normal_(
                    0.0, 0.02 / math.sqrt(2 * (int(name.split(".")[1]) + 1)), generator=generator
                )
            else:
                values.normal_(0.0, 1.0 if kind == "embedding" else 0.02, generator=generator)
            low, high = max(begin, first), min(begin + size, first + len(local))
            local[low - first : high - first] = values[low - begin : high - begin]


def train(cfg: SimpleNamespace, tokens: Tensor, validation: range, device: torch.device) -> None:
    t, rank, ranks = cfg.train, dist.get_rank(), dist.get_world_size()
    micro, tokens_per_step = (
        t.micro_batch_size or t.global_batch_size // ranks,
        t.global_batch_size * t.seq_len,
    )
    if not micro or t.global_batch_size % (micro * ranks):
        raise SystemExit(
            f"train.global_batch_size = {t.global_batch_size}: no multiple of {micro} x {ranks} ranks"
        )
    with torch.device("meta"):  # no rank ever holds the full model
        model = Llama(cfg.model)
    shard(
        model, cfg.model.tie_embeddings, cfg.parallel, dist.init_device_mesh(device.type, (ranks,))
    )
    initialize(model, cfg.model, cfg.run.seed, device)
    # after both, which replace parameters: AdamW must hold the last ones
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [p for p in named.values() if p.ndim >= 2],
            "weight_decay": cfg.optim.weight_decay,
        },
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=cfg.optim.betas, eps=cfg.optim.eps, fused=True)
    for p in named.values():  # the state exists from the start: a checkpoint can be read into it
        count = torch.zeros((), device=device)
        optimizer.state[p] = {
            "step": count,
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    tensors = {"model": named, "optim": {name: optimizer.state[p] for name, p in named.items()}}
    folder = pathlib.Path(cfg.run.output_dir, f"{cfg.run.name}-minimal", "checkpoints")
    newest = max(folder.glob("step-*"), default=None)
    if newest:
        dcp.load(tensors, checkpoint_id=newest)  # of any number of ranks
    for step in range(int(newest.name[5:]) + 1 if newest else 1, t.steps + 1):
        total = torch.zeros((), device=device)
        for first in range(
            (step - 1) * t.global_batch_size + rank * micro,
            step * t.global_batch_size,
            micro * ranks,
        ):
            batch = torch.stack(
                [window(cfg, tokens, validation, first + i) for i in range(micro)]
            ).to(device)
            # (B, T+1): inputs (B, T), and each one's next token as target
            loss = model(batch[:, :-1], batch[:, 1:])
            # FSDP2 averages gradients over ranks: times ranks it is their sum, over tokens_per_step the mean.
            (loss * ranks / tokens_per_step).backward()
            total += loss.detach()
        dist.all_reduce(total)
        norm = nn.utils.clip_grad_norm_(
            model.parameters(), math.inf if t.max_grad_norm == "off" else t.max_grad_norm
        )
        row = {
            "step": step,
            "loss": total.item() / tokens_per_step,
            "grad_norm": norm.full_tensor().item(),
        }
        if not math.isfinite(row["loss"] + row["grad_norm"]):
            raise FloatingPointError(f"the gradient is not finite: {row}")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(cfg.optim, cfg.optim.schedule_steps or t.steps, step)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(json.dumps(row), flush=True)
        if cfg.saves and (
            step == t.steps or step % (cfg.checkpoint.save_every_steps or t.steps) == 0
        ):
            # each rank's shards: model.NAME, optim.NAME.exp_avg
            dcp.save(tensors, checkpoint_id=folder / "saving")
            if rank == 0:
                # has this name only when it is complete
                (folder / "saving").rename(folder / f"step-{step:08d}")


def learning_rate(o: SimpleNamespace, end: int, step: int) -> float:
    if step < o.warmup_steps:
        return o.lr * step / o.warmup_steps
    start = end - o.decay_steps if o.schedule == "wsd" else o.warmup_steps
    done = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
    left = {
        "constant": 1,
        "cosine": 0.5 + math.cos(math.pi * done) / 2,
        "linear": 1 - done,
        "wsd": 1 - done,
    }
    return o.lr * (o.min_lr_ratio + (1 - o.min_lr_ratio) * left[o.schedule])


def permute(index: int, count: int, key: str) -> int:
    """The number at an index of a permutation of 0 ... count-1: a Feistel network of eight rounds, not a table."""
    keys = hashlib.blake2b(key.encode(), digest_size=64).digest()
    half = max(1, ((count - 1).bit_length() + 1) // 2)  # bits
    while True:
        left, right = index >> half, index & (1 << half) - 1
        for i in range(0, 64, 8):
            x = right ^ int.from_bytes(keys[i : i + 8], "big")
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (x ^ x >> 31) & (1 << half) - 1
        index = left << half | right
        if index < count:  # else it is permuted once more
            return index


# Where segments of growing text end, in tokens: the first border, doubling up to BORDER_STEP more, then that far apart.
FIRST_BORDER = 1 << 20
BORDER_STEP = 1 << 28


def window(cfg: SimpleNamespace, tokens: Tensor, validation: range, sample: int) -> Tensor:
    """The tokens (T+1) of a sample. Window k is tokens k T ... k T + T; those with validation tokens are left out."""
    length = cfg.train.seq_len
    skip_from = max(0, (validation.start - 1) // length)
    skip_to = math.ceil(validation.stop / length)

    def windows(border: int) -> int:  # to train on, of the text before this token
        count = max(0, (min(border, len(tokens)) - 1) // length)
        return min(count, skip_from) + max(0, count - skip_to)

    epoch, index = divmod(sample, windows(len(tokens)))
    begin, end, key = 0, windows(len(tokens)), f"{cfg.run.seed}/{epoch}/0"
    if cfg.data.order == "growing" and epoch == 0:  # one segment of the text after the other
        segment, border, end = 0, FIRST_BORDER, windows(FIRST_BORDER)
        while index >= end:
            segment += 1
            border += min(border, BORDER_STEP)
            begin, end = end, windows(border)
        key += f"/{segment}"
    number = begin + permute(index - begin, end - begin, key)
    if number >= skip_from:
        number += skip_to - skip_from
    return tokens[number * length : (number + 1) * length + 1].to(torch.int64)


def identity(cfg: SimpleNamespace) -> dict:
    """What determines prepared data, as in its manifest. An absent key means None."""
    d, growing, tokenizer = cfg.data, cfg.data.order == "growing", "trained here"
    if d.tokenizer:
        path = pathlib.Path(d.tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        content, settings = path.read_bytes(), path.with_name("tokenizer_config.json")
        if content.lstrip().startswith(b"{") and settings.exists():
            content += settings.read_bytes()
        tokenizer = hashlib.sha256(content).hexdigest()
    options = ("source", "subset", "split", "text_field", "max_tokens", "validation")
    return {key: getattr(d, key) for key in options} | {
        "tokenizer": tokenizer,
        "vocab_size": None if d.tokenizer else cfg.model.vocab_size,
        "format": 4 if growing else 3,
        "order": "growing" if growing else None,
        "python": platform.python_version() if d.source == "python-stdlib" else None,
    }


def open_data(cfg: SimpleNamespace) -> tuple[Tensor, range]:
    """The tokens of train.bin, mapped, and which of them are for validation. Raises ValueError."""
    path, wanted, complete = cfg.data.path, identity(cfg), {}
    pattern = "manifest.json" if path else "*/manifest.json"
    for file in sorted(pathlib.Path(path or "prepared").glob(pattern)):
        manifest = json.loads(file.read_text())
        found = manifest["identity"]
        differ = [key for key in wanted | found if wanted.get(key) != found.get(key)]
        if path and differ:
            values = [f"{key} = {found.get(key)!r}, not {wanted.get(key)!r}" for key in differ]
            raise ValueError(f"{path}: was prepared with {'; '.join(values)}")
        if not differ and "sha256" in manifest:  # written last
            complete[file.parent] = manifest
    if len(complete) > 1:
        folders = ", ".join(map(str, complete))
        raise ValueError(f"several folders match; data.path must name one: {folders}")
    if not complete:
        place = path or "prepared"
        raise ValueError(f"{place}: no complete data; `python -m data.prepare CONFIG` prepares it")
    [(folder, manifest)] = complete.items()
    size, dtype = manifest["tokens"]["train"], getattr(torch, manifest["dtype"])
    tokens = torch.from_file(str(folder / "train.bin"), size=size, dtype=dtype)
    split, first, end = manifest.get("validation", ("heldout", 0, 0))
    return tokens, range(first, end) if split == "train" else range(0)


# The default, or ... if the file must give a value; a tuple: the values that are implemented, the default first.
OPTIONS: dict = {
    "run.name": None,
    "run.output_dir": "outputs",
    "run.seed": 0,
    "run.device": ("auto", "cuda", "cpu"),
    "model.dim": ...,
    "model.n_layers": ...,
    "model.n_heads": ...,
    "model.n_kv_heads": ...,
    "model.ffn_dim": ...,
    "model.vocab_size": ...,
    "model.head_dim": None,
    "model.norm_eps": 1e-5,
    "model.rope_theta": 5e5,
    "model.tie_embeddings": (False, True),
    "model.qk_norm": (False,),
    "model.freeze": ([],),
    "data.source": "python-stdlib",
    "data.subset": None,
    "data.split": "train",
    "data.text_field": "text",
    "data.path": None,
    "data.tokenizer": None,
    "data.max_tokens": None,
    "data.order": ("global", "growing"),
    "data.validation": None,
    "data.document_mask": (False,),
    "data.sources": ([],),
    "train.steps": ...,
    "train.seq_len": 2048,
    "train.global_batch_size": 8,
    "train.micro_batch_size": None,
    "train.max_grad_norm": 1.0,
    "train.skip_nonfinite": (0,),
    "optim.lr": 3e-4,
    "optim.betas": [0.9, 0.95],
    "optim.eps": 1e-8,
    "optim.weight_decay": 0.1,
    "optim.warmup_steps": 0,
    "optim.decay_steps": None,
    "optim.schedule": ("cosine", "linear", "constant", "wsd"),
    "optim.schedule_steps": None,
    "optim.min_lr_ratio": 0.1,
    "optim.name": ("adamw",),
    "optim.state_dtype": ("float32",),
    "parallel.dp_replicate": (1,),
    "parallel.dp_shard": ("auto",),
    "parallel.cp": (1,),
    "parallel.tp": (1,),
    "parallel.reshard_after_forward": (True, False),
    "parallel.prefetch_forward": 1,
    "parallel.prefetch_backward": 1,
    "parallel.param_dtype": ("bfloat16", "float32", "auto"),
    "parallel.reduce_dtype": ("float32", "bfloat16"),
    "parallel.output_dtype": (None, "float32", "bfloat16"),
    "parallel.keep_fp32": ([],),
    "parallel.replicated": ([],),
    "parallel.cpu_offload": (False,),
    "parallel.sync_every_micro_batch": (True,),
    "parallel.recompute": ("none", "full"),
    "parallel.float8": ("none",),
    "checkpoint.save_every_steps": None,
}
IGNORED = (  # prefixes of options that change no loss
    "log.",
    "eval.",
    "profile.",
    "checkpoint.",
    "run.deterministic",
    "run.start_timeout_",
    "run.step_timeout_",
    "run.save_timeout_",
    "optim.muon_",
    "data.chat_template",
    "parallel.compile",
)


def read_options(path: str) -> SimpleNamespace:
    """cfg.section.key of a TOML file. Raises ValueError if it sets what changes losses and is not implemented."""
    raw = tomllib.loads(pathlib.Path(path).read_text())
    options = {name: v[0] if isinstance(v, tuple) else v for name, v in OPTIONS.items()}
    sections = {name.split(".")[0] for name in (*OPTIONS, *IGNORED)}
    cfg = SimpleNamespace(**{section: SimpleNamespace() for section in sections})
    ignored, problems = [], []
    for section, values in raw.items():
        if section in sections:
            options |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            problems.append(f"{path}: [{section}]: not implemented")
    for name, value in options.items():
        section, key = name.split(".", 1)
        setattr(getattr(cfg, section), key, value)
        implemented = OPTIONS.get(name, ())  # of other options no value is
        if value is ...:
            problems.append(f"{path}: {name} is missing")
        elif name not in OPTIONS and name.startswith(IGNORED):
            ignored.append(name)
        elif isinstance(implemented, tuple) and value not in implemented:
            problems.append(f"{path}: {name} = {value}: not implemented")
    if ignored and os.getenv("RANK", "0") == "0":
        print(f"{path}: ignored: {', '.join(ignored)}", file=sys.stderr)
    if problems:
        raise ValueError("\n".join(problems))
    cfg.run.name = cfg.run.name or pathlib.Path(path).stem
    cfg.saves = "checkpoint" in raw
    return cfg


def main() -> None:
    try:
        cfg = read_options(" ".join(sys.argv[1:]))  # without arguments, too, this is no file
        tokens, validation = open_data(cfg)
    except (OSError, ValueError) as error:  # of the file system, of TOML, and those above
        if os.getenv("LOCAL_RANK", "0") == "0":  # once per machine
            print(f"usage: python minimal.py CONFIG\n{error}", file=sys.stderr)
        sys.exit(2)
    cuda = torch.cuda.is_available() if cfg.run.device == "auto" else cfg.run.device == "cuda"
    device = (
        torch.device("cuda", int(os.getenv("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    alone: dict = (
        {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    )
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **alone)
    if cfg.parallel.param_dtype == "auto":  # bfloat16 where every rank's device has units for it
        cpu = torch.cpu.get_capabilities()
        native = (
            torch.cuda.is_bf16_supported(False)
            if cuda
            else cpu.get("avx512_bf16") or cpu.get("amx_bf16") or False
        )
        everywhere = torch.tensor(float(native), device=device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        cfg.parallel.param_dtype = "bfloat16" if everywhere else "float32"
    train(cfg, tokens, validation, device)
    dist.barrier()  # gloo aborts if a rank leaves while another still communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
