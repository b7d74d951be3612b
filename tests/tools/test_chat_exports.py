"""Exports of runs on conversations, merged adapters and adapters alone, answer in transformers and PEFT and stop where
their template ends a turn, whatever their base's own settings are."""

import json
import shutil
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    Qwen3Config,
)

from tests import cases
from tests.conftest import has_extra, make_config, seal, words
from tools import huggingface as convert
from tools.prepare.prepare import prepare

if not has_extra("chat") or not has_extra("lora"):
    pytest.skip("needs extras/chat and extras/lora", allow_module_level=True)

from tests.tools.prepare.chat.conftest import CHATML, LLAMA3, QWEN3, talk

pytestmark = [pytest.mark.early, pytest.mark.slow]

END = "<|end_of_text|>"  # of a document: what the base's tokenizer calls EOS
SPECIAL = ["<|begin_of_text|>", END, "<|im_start|>", "<|im_end|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>"]
ANSWER = "the red cat"
INLINE = "{% for m in messages %}{{ m.content }}{% endfor %}"  # the base's own, of another form

# the run's template, its end of turn, the base's kind, and its generation_config.json
RUNS = {
    "llama3": (LLAMA3, "<|eot_id|>", LlamaConfig, {"eos_token_id": 1, "temperature": 0.6}),
    "qwen3": (QWEN3, "<|im_end|>", Qwen3Config, {"eos_token_id": [1, 4]}),
    "chatml": (CHATML, "<|im_end|>", LlamaConfig, None),
}


def make_base(folder, kind: type, generation: dict | None) -> None:
    """A Hugging Face folder with random weights, a byte-level tokenizer and an inline chat template."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([words(i, 50) for i in range(20)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": END,
        "chat_template": INLINE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 320,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,  # a frozen head must be able to say something clearly
    }
    model = AutoModelForCausalLM.from_config(kind(**sizes, bos_token_id=0, eos_token_id=1))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


@pytest.fixture(scope="module")
def trained(on_ranks, tmp_path_factory):
    """The folder of the runs and of their bases: of each template one that trains all weights, and one with adapters,
    until the answer is learned."""
    folder = tmp_path_factory.mktemp("chat")
    rows = [talk(words(i, 3), ANSWER) for i in range(60)]
    source = folder / "chat.jsonl"
    source.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    runs = {}
    for name, (template, _, kind, generation) in RUNS.items():
        base = folder / f"base {name}"
        make_base(base, kind, generation)
        (folder / f"{name}.jinja").write_text(template)
        sections = {
            "model": {
                **dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim")),
                "vocab_size": 320,
                "init_from": str(base),
            },
            "data": {
                "source": str(source),
                "tokenizer": str(base),
                "messages_field": "messages",
                "chat_template": str(folder / f"{name}.jinja"),
                "path": str(folder / f"data {name}"),
            },
            "train": {"steps": 40, "seq_len": 128, "global_batch_size": 1, "micro_batch_size": 1},
            "optim": {"lr": 2e-2, "warmup_steps": 2},
            "checkpoint": {},
        }
        cfg = make_config(**sections)
        prepare(cfg.data, cfg.model.vocab_size)
        runs[f"{name} full"] = sections
        runs[f"{name} lora"] = {**sections, "lora": {"rank": 16, "base_dtype": "float32"}}
    for name, rows in on_ranks(1, cases.train_all, runs, str(folder))[0].items():
        assert rows[-1]["loss"] < 0.1, name
    return folder / "1", folder


def export(run, out, *words: str) -> None:
    assert convert.main(["export", str(run), str(out), *words]) == 0


def answer(model, folder, settings: GenerationConfig | None = None) -> list[str]:
    """What the model says to a question in transformers: its tokens, up to the one that stopped it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        talk("the dog sat"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**asked, max_new_tokens=30, do_sample=False, generation_config=settings)
    return tokenizer.convert_ids_to_tokens(said[0, asked["input_ids"].shape[1] :])


def is_the_answer(tokens: list[str], end: str) -> bool:
    return "".join(tokens).replace("Ġ", " ") == ANSWER + end


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_export_stops_where_its_template_ends_a_turn(trained, tmp_path, kind, name):
    template, end, _, generation = RUNS[name]
    export(trained[0] / f"{name} {kind}".replace(" ", "-"), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert is_the_answer(answer(model, tmp_path / "hf"), end)
    # one template, the run's
    assert (tmp_path / "hf/chat_template.jinja").read_text() == template
    settings = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert "chat_template" not in settings and settings["eos_token"] == END
    # the EOS tokens are the base's, as far as its settings go along, and the run's own
    written = json.loads((tmp_path / "hf/generation_config.json").read_text())
    ends = {SPECIAL.index(END), SPECIAL.index(end)}
    if kind == "lora" and name == "qwen3":
        ends.add(4)
    assert {*written["eos_token_id"]} == ends
    settings = json.loads((tmp_path / "hf/config.json").read_text())
    assert settings["eos_token_id"] == written["eos_token_id"]
    if kind == "lora" and generation:
        assert written == {**written, **generation, "eos_token_id": written["eos_token_id"]}


@pytest.mark.parametrize("name", RUNS)
def test_an_adapter_stops_where_its_template_ends_a_turn(trained, tmp_path, capsys, name):
    """With the settings beside it, as the export says: PEFT and transformers read those of the base alone."""
    runs, folder = trained
    template, end, _, _ = RUNS[name]
    export(runs / f"{name}-lora".replace(" ", "-"), tmp_path / "peft", "--adapter")
    call = f'generate(generation_config=GenerationConfig.from_pretrained("{tmp_path / "peft"}"))'
    assert call in capsys.readouterr().out
    settings = GenerationConfig.from_pretrained(tmp_path / "peft")
    base = AutoModelForCausalLM.from_pretrained(folder / f"base {name}")
    for model in (
        PeftModel.from_pretrained(base, tmp_path / "peft"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "peft"),
    ):
        assert is_the_answer(answer(model, tmp_path / "peft", settings), end)
    assert (tmp_path / "peft/chat_template.jinja").read_text() == template
    assert "chat_template" not in json.loads((tmp_path / "peft/tokenizer_config.json").read_text())


def test_a_template_of_which_no_end_of_turn_is_known_is_named(trained, tmp_path, capsys):
    """Its run can be exported nevertheless."""
    run = trained[0] / "chatml-full/checkpoints/step-00000040"
    checkpoint = shutil.copytree(run, tmp_path / "checkpoint")
    (checkpoint / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    seal(checkpoint)
    export(checkpoint, tmp_path / "hf")
    assert "lacks the end of turn" in capsys.readouterr().err
