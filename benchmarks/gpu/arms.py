"""What benchmarks.gpu measures, the most informative first: the table of arms.

A line is group | arm | command | what it answers. "step CONFIG" is benchmarks.step: it times steps
of one random micro-batch and of three, and composes one of 16 sequences, as many as one of eight
GPUs takes of the configurations' 128. So arms with other micro-batches can be compared.
"""

from typing import NamedTuple

TABLE = """
environment | machine | machine llama8b | is all memory free? does attention run on cuDNN?
environment | collective | collective tiny | does NCCL start?
training | on the CPU | check cpu | losses to compare with
training | train, save | check train_and_save | does this device compute the same?
training | resume | check resume | after a restore too?
training | read | check read | evaluation, sample and hashes: is the checkpoint what was trained?
training | two GPUs | check two | does NCCL compute the same?
tests | marked gpu | check tests | do the tests pass that need a GPU?
1B | as shipped | step llama1b | speed and memory
1B | more at once | step llama1b --parallel.recompute=elementwise BFLOAT16 BATCH=8 | do they pay?
1B | bare loop | step llama1b --bare | what does the trainer cost?
8B | as shipped | step llama8b-h200 | speed and memory
8B | float8=tensorwise | step llama8b-h200 FLOAT8=tensorwise | what does float8 gain?
8B | float8=rowwise | step llama8b-h200 FLOAT8=rowwise | and its finer scales?
faster | once | step llama8b-h200 ONCE | what does FSDP2 cost on one rank?
faster | once, tensorwise | step llama8b-h200 ONCE FLOAT8=tensorwise | do both add up?
faster | 3B, as shipped | step llama3b | to compare the next with
faster | 3B, once | step llama3b ONCE | what does FSDP2 cost on one rank?
faster | 1B, as shipped | step llama1b | to compare the next with
faster | 1B, once | step llama1b ONCE | what does FSDP2 cost on one rank?
ceilings | copy | copy llama1b | what does the memory reach?
ceilings | products of 8B | products llama8b | what do matmuls reach?
3B | as shipped | step llama3b | speed and memory
3B | more at once | step llama3b BFLOAT16 BATCH=2 | do larger micro-batches pay?
3B | bare loop | step llama3b --bare | what does the trainer cost?
adapters | LoRA | step llama8b-lora | speed and memory, over a base drawn at random
adapters | QLoRA | step llama8b-qlora | with a base in 4 bits
options | as shipped | step llama1b | to compare the next with
options | state_dtype=bfloat16 | step llama1b BFLOAT16 | what does an option gain?
options | recompute=elementwise | step llama1b --parallel.recompute=elementwise | what does it cost?
options | reshard_after_forward | step llama1b --parallel.reshard_after_forward=true | and this?
options | micro_batch_size=8 | step llama1b BATCH=8 | what do larger ones gain?
options | micro_batch_size=2 | step llama1b BATCH=2 | what do smaller ones cost?
options | micro_batch_size=1 | step llama1b BATCH=1 | and the smallest?
options | recompute=selective | step llama1b --parallel.recompute=selective | what does it cost?
options | recompute=full | step llama1b --parallel.recompute=full | what does it cost?
options | compile=false | step llama1b --parallel.compile=false | what does compilation gain?
options | as shipped, again | step llama1b | how steady is this machine?
"""
SHORT = {  # for the table
    "ONCE": "--parallel.gather_once=true --parallel.sync_every_micro_batch=false",
    "BFLOAT16": "--optim.state_dtype=bfloat16",
    "BATCH": "--train.micro_batch_size",
    "FLOAT8": "--parallel.float8",
}
COMMON = """--run.device=auto --train.global_batch_size=16 --checkpoint=off --eval=off
    --optim.warmup_steps=0 --optim.schedule=constant --optim.lr=3e-5"""
# At the configurations' own rate a fresh model's loss on one batch falls so steeply that float8's
# differed by a third; at this one eight steps change the loss, and rounding does not.
TINY = """--model.dim=64 --model.n_layers=1 --model.n_heads=4 --model.n_kv_heads=2
    --model.head_dim=16 --model.ffn_dim=128 --model.vocab_size=512 --train.seq_len=32"""
ON_A_CPU = "--parallel.compile=false --parallel.param_dtype=float32"


class Arm(NamedTuple):
    group: str
    name: str
    kind: str  # step, check, or a function of parts.py
    target: str  # the configuration, or what is checked
    options: list[str]
    answers: str

    def argv(self, tiny: bool, on_gpu: bool, runs: str) -> list[str]:
        """Of python -m. runs: the folder of the checks' runs."""
        sizes = TINY.split() if tiny else []
        if self.kind == "check":
            device = "cuda" if on_gpu else "cpu"
            return ["benchmarks.gpu.checks", self.target, runs, device, *sizes]
        path = f"configs/{self.target}.toml"
        options = [*COMMON.split(), *sizes, *([] if on_gpu else ON_A_CPU.split()), *self.options]
        if self.kind == "step":
            return ["benchmarks.step", path, "--composed", "--steps=8", *options]
        return ["benchmarks.gpu.parts", path, self.kind, *options]


def read_table(text: str) -> list[Arm]:
    arms = []
    for line in text.strip().splitlines():
        group, name, command, answers = map(str.strip, line.split("|"))
        for word, option in SHORT.items():
            command = command.replace(word, option)
        kind, target, *options = command.split()
        arms.append(Arm(group, name, kind, target, options, answers))
    return arms


ARMS = read_table(TABLE)
GROUPS = list(dict.fromkeys(arm.group for arm in ARMS))
