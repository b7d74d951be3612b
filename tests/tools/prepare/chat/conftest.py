"""A tokenizer with chat templates, transformers' own over it, and runs on conversations."""

import json
import pathlib
import random
import re
from typing import Any

import pytest

import config
from tests.conftest import REPO, words
from tools.prepare.prepare import prepare

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message.role + '\n' -}}
{% if message.role == 'assistant' %}
{% generation %}
{{- message.content + '<|im_end|>' -}}
{% endgeneration %}
{% else %}
{{- message.content + '<|im_end|>' -}}
{% endif %}
{{ '\n' -}}
{% endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt -}}
"""
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
QWEN3 = (REPO / "configs/qwen3.jinja").read_text()
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3}
SPECIAL = ["<|begin_of_text|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def without_blocks(template: str) -> str:
    tag = "(end)?generation %}"
    template = re.sub(rf"{{%- {tag}|{{% {tag}\n", "", template)
    assert "generation %" not in template.replace("add_generation_prompt %", "")
    return template


def user(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def talk(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """The user's and the assistant's texts in turn."""
    turns = [(user, assistant)[i % 2](text) for i, text in enumerate(texts)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def conversations(count: int) -> list[list[dict[str, Any]]]:
    """One to three turns of one to twenty words, every third with a system prompt."""
    draw = random.Random(7)
    talks = []
    for i in range(count):
        turns = 2 * draw.randint(1, 3)
        texts = [words(draw.randrange(10**6), draw.randint(1, 20)) for _ in range(turns)]
        talks.append(talk(*texts, system="be kind" if i % 3 == 0 else None))
    return talks


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> pathlib.Path:
    """A byte-level BPE tokenizer with 320 entries, as Llama 3's and Qwen's, and next to it files of
    the templates, with blocks and without."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=318,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator([words(i, 50) for i in range(20)], trainer)
    made.add_tokens(["<tool_call>", "</tool_call>"])  # not special, as Qwen's
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[0], "eos_token": "<|im_end|>", "chat_template": CHATML}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, template in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(template)
        (folder / f"{name}-bare.jinja").write_text(without_blocks(template))
    return folder


@pytest.fixture(scope="session")
def theirs(tokenizer) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(tokenizer)


def prepare_here(cfg: config.Config) -> pathlib.Path:
    """prepare() in this process. Returns the first source's folder."""
    return prepare(cfg.data, cfg.model.vocab_size, cores=1)[0]


def sections_of(tokenizer: pathlib.Path, folder: pathlib.Path, rows: list, **more: Any) -> dict:
    """The sections of a run on these rows. One more conversation is the validation text, so that none of them is held
    out."""
    for name, content in {"chat": rows, "valid": [talk("the cat", "sat")]}.items():
        entries = [row if isinstance(row, dict) else {"messages": row} for row in content]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in entries))
    data = {"source": str(folder / "chat.jsonl"), "validation": str(folder / "valid.jsonl")}
    data |= {"tokenizer": str(tokenizer), "path": str(folder / "out"), "messages_field": "messages"}
    data |= more.pop("data", {})
    train = {"steps": 4, "seq_len": 128, "global_batch_size": 4, "micro_batch_size": 1}
    return {"data": data, "train": train, **more}
