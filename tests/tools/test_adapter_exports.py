"""Tools on a run with adapters: what they take from its base, and which base they refuse."""

import json
import shutil

from safetensors.torch import load_file, save_file

from tests.conftest import run_tool
from tools import generate
from tools import huggingface as hf


def test_the_tools_use_a_run_with_adapters_on_its_base_alone(run, base, tmp_path, capsys):
    _, run = run
    asked = [run, "--prompt", "the cat", "--tokens", 3, "--temperature", 0]
    assert run_tool(generate.main, *asked) == 0
    text = capsys.readouterr().out
    moved = shutil.copytree(base, tmp_path / "moved")
    assert run_tool(generate.main, *asked, "--base", moved) == 0
    assert capsys.readouterr().out == text
    tensors = load_file(moved / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] += 1e-4
    save_file(tensors, moved / "model.safetensors", metadata={"format": "pt"})
    for main, words in ((generate.main, asked), (hf.main, ["export", run, tmp_path / "out"])):
        assert run_tool(main, *words, "--base", moved) == 2
        assert "was trained on a base with" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_merged_export_takes_from_its_base_what_users_need_besides_weights(
    run, base, prepared, tmp_path
):
    cfg, run = run
    origin = shutil.copytree(base, tmp_path / "origin")
    theirs = json.loads((origin / "config.json").read_text())
    files = {
        "config.json": {**theirs, "max_position_embeddings": 4096},
        "generation_config.json": {"eos_token_id": [2, 7]},
        "tokenizer_config.json": {"chat_template": "{{ older }}", "tokenizer_class": "Its"},
    }
    for name, content in files.items():
        (origin / name).write_text(json.dumps(content))
    (origin / "chat_template.jinja").write_text("{{ messages }}")
    ours = (prepared / "tokenizer.model").read_bytes()

    def export(name: str) -> tuple[dict, dict, dict]:
        out = tmp_path / name
        assert hf.main(["export", str(run), str(out), "--base", str(origin)]) == 0
        assert (out / "tokenizer.model").read_bytes() == ours
        config, generation, tokenizer = (json.loads((out / file).read_text()) for file in files)
        assert tokenizer["tokenizer_class"] == "LlamaTokenizer"
        assert config["eos_token_id"] == generation["eos_token_id"]
        return config, generation, tokenizer

    # one template, and that which transformers prefers; none, of another tokenizer
    for content, name in ((b"another", "other"), (ours, "same")):
        (origin / "tokenizer.model").write_bytes(content)
        config, _, tokenizer = export(name)
        assert config["max_position_embeddings"] == 4096 and "chat_template" not in tokenizer
        assert config["eos_token_id"] == ([2, 7] if name == "same" else 2)
        assert (tmp_path / name / "chat_template.jinja").exists() == (name == "same")
    (origin / "chat_template.jinja").unlink()
    assert export("inline")[2]["chat_template"] == "{{ older }}"
    # EOS tokens of config.json, where there are no generation settings; trained on longer sequences than the base
    (origin / "generation_config.json").unlink()
    older = {**theirs, "eos_token_id": [9, 2], "max_position_embeddings": cfg.train.seq_len - 1}
    (origin / "config.json").write_text(json.dumps(older))
    config, _, _ = export("older")
    assert config["max_position_embeddings"] == cfg.train.seq_len
    assert config["eos_token_id"] == [9, 2]
