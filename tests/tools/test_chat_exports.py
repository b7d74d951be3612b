"""Exports of chats answer in transformers and PEFT, and stop where their template ends a turn."""

import json
import pathlib
import shutil
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from tests.conftest import TINY, has_extra, make_config, train_run, words
from tests.distributed import run_on_ranks
from tools import huggingface as convert

if not has_extra("chat") or not has_extra("lora"):
    pytest.skip("needs extras/chat and extras/lora", allow_module_level=True)

from tests.extras.lora.conftest import make_base
from tests.tools.prepare.chat.conftest import (
    LLAMA3,
    QWEN3,
    SPECIAL,
    prepare_here,
    sections_of,
    talk,
)

pytestmark = [pytest.mark.early, pytest.mark.slow]

ANSWER = "the red cat"
# the run's template and its end of turn; the base's EOS token of a document and generation_config.json
RUNS: dict[str, tuple[str, str, str, dict | None]] = {
    "llama3": (LLAMA3, "<|eot_id|>", "<|im_end|>", {"eos_token_id": [2, 4], "top_k": 3}),
    "qwen3": (QWEN3, "<|im_end|>", "<|eot_id|>", None),
}


@pytest.fixture(scope="module")
def trained(tokenizer, tmp_path_factory) -> pathlib.Path:
    """The folder of runs that learned the answer, of each template one that trains all weights and one with adapters;
    and of their bases."""
    root = tmp_path_factory.mktemp("chat")
    cfgs = []
    for name, (template, _, eos, generation) in RUNS.items():
        base = root / f"base {name}"
        # a frozen head must be able to say something clearly
        settings = {"head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2}
        make_base(base, LlamaConfig, **settings, bos_token_id=0, eos_token_id=SPECIAL.index(eos))
        shutil.copy(tokenizer / "tokenizer.json", base)
        settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
        settings |= {"eos_token": eos, "chat_template": "{{ messages[0].content }}"}
        (base / "tokenizer_config.json").write_text(json.dumps(settings))
        (base / "generation_config.json").write_text(json.dumps(generation))
        if generation is None:
            (base / "generation_config.json").unlink()
        (base / "template.jinja").write_text(template)
        rows = [talk(words(i, 3), ANSWER) for i in range(60)]
        sections = sections_of(base, base, rows, data={"chat_template": f"{base}/template.jinja"})
        sections["train"] |= {"steps": 40, "global_batch_size": 1}
        sections["optim"] = {"lr": 2e-2, "warmup_steps": 2}
        model = {**dict.fromkeys(TINY["model"]), "vocab_size": 320, "init_from": str(base)}
        for way, lora in {"full": None, "lora": {"rank": 16, "base_dtype": "float32"}}.items():
            run = {"name": f"{name}-{way}", "output_dir": str(root)}
            cfgs.append(make_config(**sections, model=model, run=run, lora=lora, checkpoint={}))
        prepare_here(cfgs[-1])
    [rows_of_runs] = run_on_ranks(1, lambda world: [train_run(cfg, world) for cfg in cfgs])
    assert all(rows[-1]["loss"] < 0.1 for rows in rows_of_runs)
    return root


def export(run: pathlib.Path, out: pathlib.Path, *options: str) -> None:
    assert convert.main(["export", str(run), str(out), *options]) == 0


def answer(model: Any, folder: pathlib.Path, settings: GenerationConfig | None = None) -> str:
    """What the model says to a question in transformers, up to the token that stopped it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template(
        talk("the dog sat"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**asked, max_new_tokens=30, do_sample=False, generation_config=settings)
    return tokenizer.decode(said[0, asked["input_ids"].shape[1] :])


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("way", ["full", "lora"])
def test_an_export_stops_where_its_template_ends_a_turn(trained, tmp_path, way, name):
    template, end, eos, generation = RUNS[name]
    export(trained / f"{name}-{way}", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert answer(model, tmp_path) == ANSWER + end
    # one template, the run's
    assert (tmp_path / "chat_template.jinja").read_text() == template
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings and settings["eos_token"] == eos
    # the EOS tokens are the base's, as far as its settings go along, and the run's own
    written = json.loads((tmp_path / "generation_config.json").read_text())
    others = {4} if way == "lora" and generation else set()
    assert {*written["eos_token_id"]} == {SPECIAL.index(eos), SPECIAL.index(end)} | others
    assert written.get("top_k") == (3 if others else None)


@pytest.mark.parametrize("name", RUNS)
def test_an_adapter_stops_where_its_template_ends_a_turn(trained, tmp_path, capsys, name):
    """With the settings beside it, as the export says: PEFT and transformers read those of the base alone."""
    template, end, *_ = RUNS[name]
    export(trained / f"{name}-lora", tmp_path, "--adapter")
    call = f'generate(generation_config=GenerationConfig.from_pretrained("{tmp_path}"))'
    assert call in capsys.readouterr().out
    settings = GenerationConfig.from_pretrained(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(trained / f"base {name}")
    in_peft = PeftModel.from_pretrained(base, tmp_path)
    assert answer(in_peft, tmp_path, settings) == ANSWER + end
    assert (tmp_path / "chat_template.jinja").read_text() == template
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
