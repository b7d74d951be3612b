"""Tools on a run with adapters: what they take from its base, and which base they refuse."""

import json
import pathlib
import shutil

from safetensors.torch import load_file, save_file

from tests.conftest import run_tool
from tools import generate
from tools import huggingface as hf


def export(run: pathlib.Path, folder: pathlib.Path, base: pathlib.Path) -> int:
    return hf.main(["export", str(run), str(folder), "--base", str(base)])


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
    to_export = ["export", run, tmp_path / "out"]
    for main, words in ((generate.main, asked), (hf.main, to_export)):
        assert run_tool(main, *words, "--base", moved) == 2
        assert "was trained on a base with" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_options_of_adapters_are_refused_without_adapters(base, tmp_path, capsys):
    assert run_tool(hf.main, "import", base, tmp_path / "imported") == 0
    for options in (["--base", base], ["--adapter"]):
        assert run_tool(hf.main, "export", tmp_path / "imported", tmp_path / "out", *options) == 2
        assert "has no [lora]" in capsys.readouterr().err


def test_a_merged_export_takes_from_its_base_what_users_need_besides_weights(
    run, base, prepared, tmp_path
):
    cfg, folder = run
    origin = shutil.copytree(base, tmp_path / "origin")
    theirs = json.loads((origin / "config.json").read_text())
    (origin / "config.json").write_text(json.dumps({**theirs, "max_position_embeddings": 4096}))
    (origin / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    (origin / "chat_template.jinja").write_text("{{ messages }}")
    (origin / "tokenizer_config.json").write_text(
        '{"chat_template": "{{ older }}", "tokenizer_class": "Its"}'
    )
    ours = (prepared / "tokenizer.model").read_bytes()
    for out, tokenizer, has_file in (
        ("other", b"another", True),
        ("same", ours, True),
        ("inline", ours, False),
    ):
        kept = tokenizer == ours
        (origin / "tokenizer.model").write_bytes(tokenizer)
        if not has_file:
            (origin / "chat_template.jinja").unlink()
        assert export(folder, tmp_path / out, origin) == 0
        written = json.loads((tmp_path / out / "config.json").read_text())
        assert written["max_position_embeddings"] == 4096
        for name in ("config.json", "generation_config.json"):
            settings = json.loads((tmp_path / out / name).read_text())
            assert settings["eos_token_id"] == ([2, 7] if kept else 2)
        # one template, and that which transformers prefers
        assert (tmp_path / out / "chat_template.jinja").exists() == (kept and has_file)
        settings = json.loads((tmp_path / out / "tokenizer_config.json").read_text())
        assert settings.get("chat_template") == (None if has_file else "{{ older }}")
        assert settings["tokenizer_class"] == "LlamaTokenizer"
        assert (tmp_path / out / "tokenizer.model").read_bytes() == ours
    # transformers takes them from config.json where there are no generation settings
    (origin / "generation_config.json").unlink()
    # trained on longer sequences than the base's
    length = cfg.train.seq_len
    older = {**theirs, "eos_token_id": [9, 2], "max_position_embeddings": length - 1}
    (origin / "config.json").write_text(json.dumps(older))
    assert export(folder, tmp_path / "older", origin) == 0
    written = json.loads((tmp_path / "older/config.json").read_text())
    assert written["max_position_embeddings"] == length
    settings = json.loads((tmp_path / "older/generation_config.json").read_text())
    assert settings["eos_token_id"] == [9, 2]
