"""Weights, adapters and chat models as people bring them, and what an export of theirs must hold."""

import json
from pathlib import Path

from tests.conftest import TINY, make_config, words
from tests.field.situation import DONE, Situation

END = "<|end|>"  # of a document
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 988097824\n"
CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
INLINE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TEXT = {"mine.txt": words(1, 4000)}
TALKS = [
    [{"role": "user", "content": words(i, 5)}, {"role": "assistant", "content": words(i, 3)}]
    for i in range(60)
]
LONG = [[{"role": "user", "content": words(i, 90)}, talk[1]] for i, talk in enumerate(TALKS)]


def as_rows(talks: list) -> str:
    return "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)


def make_base(folder: Path, **model: object) -> None:
    """A Hugging Face folder with base.toml's model, random weights and no tokenizer."""
    from tests.extras.huggingface.hf_cases import make_folder

    make_folder(folder, make_config(model={**TINY["model"], **model}))


def make_chat_base(folder: Path) -> None:
    """With a tokenizer that has an inline chat template, and settings that lack an end of turn."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    make_base(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[END, "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([words(i, 50) for i in range(20)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": INLINE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": [0], "temperature": 0.6}')


def change_weights(folder: Path, change, **model: object) -> None:
    """make_base(), with tensors changed by change(tensors)."""
    from safetensors.torch import load_file, save_file

    make_base(folder, **model)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rename(new_name):
    """A change of tensors: each gets the name new_name(its own)."""

    def change(tensors: dict) -> None:
        for name in [*tensors]:
            tensors[new_name(name)] = tensors.pop(name)

    return lambda folder: change_weights(folder, change)


def add_head_in_float32(folder: Path) -> None:
    """As some programs save a tied model whose weights are in bfloat16."""

    def change(tensors: dict) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.bfloat16()
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].float()

    change_weights(folder, change, tie_embeddings=True)


def make_pointer(folder: Path) -> None:
    make_base(folder)
    (folder / "model.safetensors").write_text(POINTER)


def make_adapter(folder: Path) -> None:
    """PEFT's folder, as axolotl writes it: the word instead of names."""
    import torch
    from safetensors.torch import save_file

    from extras.huggingface.weights import hf_name, is_adapter
    from model.build import meta_model

    base = folder.with_name("base")
    cfg = make_config(model={**TINY["model"], "init_from": str(base)}, lora={"rank": 4})
    tensors = {}
    for name, parameter in meta_model(cfg.model, cfg.lora).named_parameters():
        if is_adapter(name):
            tensors[hf_name(name)] = torch.randn(parameter.shape)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def exports_stop(folder: Path, *words: str) -> None:
    """The export names the end of turn among its EOS tokens, and holds the run's template alone."""
    from extras.huggingface import convert

    out = folder / "exported"
    assert convert.main(["export", str(folder / "outputs/field"), str(out), *words]) == 0
    settings = json.loads((out / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [0, 2]
    assert (out / "chat_template.jinja").read_text() == CHATML
    assert "chat_template" not in json.loads((out / "tokenizer_config.json").read_text())


CHAT = "base.toml --data.tokenizer=base --data.messages_field=messages --data.source=chat.jsonl"
TEMPLATE = "--data.chat_template=chatml.jinja --checkpoint.keep_last=1 --model.init_from=base"
CHAT_FILES = {"chat.jsonl": as_rows(TALKS), "chatml.jinja": CHATML, "base": make_chat_base}
WEIGHTS = "base.toml --data.source=mine.txt --model.init_from=base"
NEEDS_CHAT = ("chat", "huggingface")

SITUATIONS = [
    Situation(
        "adapters on conversations over a base whose settings lack the end of turn",
        f"{CHAT} {TEMPLATE} --lora.rank=4",
        (DONE,),
        CHAT_FILES,
        check=exports_stop,
        needs=(*NEEDS_CHAT, "lora"),
    ),
    Situation(
        "those adapters alone, as PEFT's folder",
        f"{CHAT} {TEMPLATE} --lora.targets=all-linear",
        (DONE,),
        CHAT_FILES,
        check=lambda folder: exports_stop(folder, "--adapter"),
        needs=(*NEEDS_CHAT, "lora"),
    ),
    Situation(
        "a chat template of one's own over a base with an inline one",
        f"{CHAT} {TEMPLATE}",
        (DONE,),
        CHAT_FILES,
        check=exports_stop,
        needs=NEEDS_CHAT,
    ),
    Situation(
        "prompts that are all longer than a window",
        f"{CHAT} {TEMPLATE} --eval.batches=1",
        (
            "step 2/2 loss none grad 0.00",
            "step 1: no token of the batch has a loss, nothing was updated",
            "cut before any answer: raise train.seq_len",
            "no validation loss: no token of the validation data has a loss",
        ),
        {**CHAT_FILES, "chat.jsonl": as_rows(LONG)},
        needs=NEEDS_CHAT,
        never=("nan",),
    ),
    Situation(
        'a PEFT adapter with target_modules = "all-linear"',
        f"{WEIGHTS} --lora.init_from=adapter",
        ("adapters of rank 4", DONE),
        {**TEXT, "base": make_base, "adapter": make_adapter},
        needs=("huggingface", "lora"),
    ),
    Situation(
        "weights whose tensors keep the names of torch.compile and DDP",
        WEIGHTS,
        (DONE,),
        {**TEXT, "base": rename(lambda name: f"module._orig_mod.{name}")},
        needs=("huggingface",),
    ),
    Situation(
        "a tied output matrix that is stored, too, in another dtype",
        f"{WEIGHTS} --model.tie_embeddings=true",
        (DONE,),
        {**TEXT, "base": add_head_in_float32},
        needs=("huggingface",),
    ),
    Situation(
        "weights of a clone without git-lfs",
        WEIGHTS,
        ("base/model.safetensors: is a git-lfs pointer, not the file itself;", "lfs pull"),
        {**TEXT, "base": make_pointer},
        exit_code=2,
        needs=("huggingface",),
    ),
    Situation(
        "text of a clone without git-lfs",
        "base.toml --data.source=mine.txt",
        ("mine.txt: is a git-lfs pointer, not the file itself;", "lfs pull"),
        {"mine.txt": POINTER},
        exit_code=2,
    ),
    Situation(
        "weights by another library's names",
        WEIGHTS,
        ("names its tensors as no Llama or Qwen3 model of transformers does, net.lm_head",),
        {**TEXT, "base": rename(lambda name: f"net.{name}")},
        exit_code=2,
        never=("has net.model.layers.0",),
        needs=("huggingface",),
    ),
]
