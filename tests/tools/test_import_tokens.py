"""Token files of other programs, written here by their published layouts, as a run reads them."""

import itertools
import json
import os
import pathlib
import struct
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import config
import minimal
from data.dataset import PreparedDataset
from data.tokens import TokenStream
from tests.conftest import content, make_config, refuses
from tools import import_tokens

pytestmark = pytest.mark.quick
EOS = 2
RAW = ["--dtype", "uint16", "--eos", EOS]


def documents(seed: int, count: int = 60) -> list[list[int]]:
    """Of random ids, each with EOS at its end; the second is empty."""
    draw = np.random.default_rng(seed)
    texts = [[*draw.integers(3, 320, draw.integers(1, 90)).tolist(), EOS] for _ in range(count)]
    return [texts[0], [], *texts[1:]]


def flat(texts: list[list[int]]) -> list[int]:
    return list(itertools.chain(*texts))


# As each program writes its files


def raw(path: pathlib.Path, texts: list[list[int]], dtype: str = "<u2") -> None:
    """nanoGPT's data/openwebtext/prepare.py; `dolma tokens`, in a file that is called .npy."""
    np.array(flat(texts), dtype).tofile(path)


def numpy_save(path: pathlib.Path, texts: list[list[int]], dtype: str = "<i8") -> None:
    np.save(path, np.array(flat(texts), dtype))


def llmc(path: pathlib.Path, texts: list[list[int]], magic: int = 20240520, more: int = 0) -> None:
    """dev/data/data_common.py: a header of 256 numbers, of which three are used."""
    ids = np.array(flat(texts), "<u4" if magic == 20240801 else "<u2")
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(ids) + more
    path.write_bytes(header.tobytes() + ids.tobytes())


def megatron(
    path: pathlib.Path,
    texts: list[list[int]],
    code: int = 8,
    order: Callable[[list], list] = list,
    sentences: int = 1,
) -> None:
    """core/datasets/indexed_dataset.py. order: of the sequences in the index. sentences: a document
    consists of so many sequences."""
    dtype = np.dtype({4: "<i4", 8: "<u2"}[code])
    raw(path, texts, dtype.str)
    lengths = [len(part) for text in texts for part in np.array_split(text, sentences)]
    begins = np.cumsum([0, *lengths[:-1]]) * dtype.itemsize
    named = order([*zip(lengths, begins)])
    index = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code)
    index += struct.pack("<QQ", len(named), len(named) // sentences + 1)
    index += np.array([length for length, _ in named], "<i4").tobytes()
    index += np.array([begin for _, begin in named], "<i8").tobytes()
    index += np.arange(0, len(named) + 1, sentences, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)


def datatrove(path: pathlib.Path, texts: list[list[int]], dtype: str = "<u2") -> None:
    """pipeline/tokens/tokenizer.py: the ends of documents, in ids, are in a file of their own."""
    raw(path, texts, dtype)
    np.cumsum([len(text) for text in texts]).astype("<u8").tofile(f"{path}.index")
    pathlib.Path(f"{path}.metadata").write_text("gpt2|2\n9\n9 T")


FORMATS: list[tuple[str, Callable, list]] = [
    ("nanogpt.bin", raw, RAW),
    ("olmo.npy", partial(raw, dtype="<u4"), ["--dtype", "uint32", "--eos", EOS]),
    ("int32.bin", partial(raw, dtype="<i4"), ["--dtype", "int32", "--eos", EOS]),
    ("int64.npy", numpy_save, ["--eos", EOS]),
    ("uint32.npy", partial(numpy_save, dtype="<u4"), ["--eos", EOS]),
    ("llmc.bin", llmc, ["--eos", EOS]),
    ("llama3.bin", partial(llmc, magic=20240801), ["--eos", EOS]),
    ("megatron_text_document.bin", megatron, []),
    ("megatron-int32.bin", partial(megatron, code=4), []),
    ("sentences.bin", partial(megatron, sentences=2), []),
    ("datatrove.ds", datatrove, []),
    ("datatrove-4.ds", partial(datatrove, dtype="<u4"), []),
]


def run(*words: object) -> int:
    return import_tokens.main(list(map(str, words)))


def streams(folder: pathlib.Path) -> tuple[TokenStream, TokenStream]:
    """The training and the validation text of a folder, as a run opens it."""
    source = PreparedDataset(config_of(folder)).sources[0]
    assert isinstance(source.stream, TokenStream) and isinstance(source.validation, TokenStream)
    return source.stream, source.validation


def config_of(source: object, **data: object) -> config.Config:
    return make_config(
        data={"source": str(source), "document_mask": True, **data}, train={"seq_len": 1}
    )


@pytest.mark.parametrize("name, write, options", FORMATS, ids=[name for name, *_ in FORMATS])
def test_each_format_has_its_ids_and_documents(tmp_path, name, write, options):
    texts = documents(0)
    write(tmp_path / name, texts)
    llmc(tmp_path / "validation.bin", texts)
    out = tmp_path / "out"
    run(tmp_path / name, out, *options, "--validation", tmp_path / "validation.bin")
    stream, _ = streams(out)
    assert stream.read(0, stream.length).tolist() == flat(texts)
    begins = sorted({0, *itertools.accumulate(map(len, texts))})
    assert stream.documents(0, stream.length) == [*itertools.pairwise(begins)]
    first, border = begins[3] + 1, begins[4]
    assert stream.documents(first, border + 1) == [(first, border), (border, border + 1)]
    cfg = config_of(out)
    (tokens,) = minimal.open_data(SimpleNamespace(data=cfg.data, model=cfg.model))
    assert tokens.tolist() == flat(texts)


@pytest.mark.parametrize("write", [llmc, megatron])
def test_last_hundredth_of_the_first_file_is_held_out(tmp_path, write):
    texts = documents(0, 300)
    write(tmp_path / "a.bin", texts)
    run(tmp_path / "a.bin", tmp_path / "out", "--eos", EOS)
    stream, validation = streams(tmp_path / "out")
    border = len(flat(texts)) - len(flat(texts)) // 100
    assert stream.read(0, stream.length).tolist() == flat(texts)[:border]
    assert validation.read(0, validation.length).tolist() == flat(texts)[border:]
    begins = [n for n in itertools.accumulate(map(len, texts)) if border < n < len(flat(texts))]
    held_out = [0, *(n - border for n in begins), validation.length]
    assert validation.documents(0, validation.length) == [*itertools.pairwise(held_out)]


def test_files_are_read_in_the_order_of_their_names_hashes(tmp_path):
    texts = {}
    for seed, name in enumerate(["a/part.bin", "b/part.bin", "c.bin", "d.bin"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        texts[name] = [*documents(seed)[:-1], [7, 8, 9]]  # the last document has no EOS
        raw(tmp_path / name, texts[name])
    raw(tmp_path / "validation.npy", documents(9))
    out = tmp_path / "out"
    run(tmp_path / "**/*.bin", out, *RAW, "--validation", tmp_path / "validation.npy")
    stream, _ = streams(out)
    # sorted by the SHA-256 of these names, as sha256sum prints it
    expected = [flat(texts[name]) for name in ("c.bin", "b/part.bin", "d.bin", "a/part.bin")]
    assert stream.read(0, stream.length).tolist() == flat(expected)
    border = len(expected[0])
    assert stream.documents(border - 3, border + 2) == [(border - 3, border), (border, border + 2)]


def test_a_mixture_of_two_imports(tmp_path):
    sources = []
    for seed in range(2):
        raw(tmp_path / f"{seed}.bin", documents(seed))
        run(tmp_path / f"{seed}.bin", tmp_path / f"out-{seed}", *RAW)
        sources.append({"source": str(tmp_path / f"out-{seed}"), "weight": 3.0 - 2 * seed})
    dataset = PreparedDataset(make_config(data={"source": None, "sources": sources}))
    drawn = [dataset.position(number).source for number in range(80)]
    assert drawn.count(1) == 20 and dataset.tokenizer_files == []


def test_a_tokenizer_goes_with_the_folder(prepared, tmp_path):
    raw(tmp_path / "a.bin", documents(0))
    run(tmp_path / "a.bin", tmp_path / "out", *RAW, "--tokenizer", prepared)
    names = [path.name for path in PreparedDataset(config_of(tmp_path / "out")).tokenizer_files]
    assert names == ["tokenizer.model"]
    kept = json.loads((prepared / "manifest.json").read_text())
    assert (
        json.loads((tmp_path / "out/manifest.json").read_text())["tokenizer"] == kept["tokenizer"]
    )


# A file that changes under a run


@pytest.mark.parametrize("name", ["a.bin", "validation.bin"])
def test_a_file_written_anew_is_refused_and_one_touched_is_not(tmp_path, name):
    for file in ("a.bin", "validation.bin"):
        raw(tmp_path / file, documents(0))
    out = tmp_path / "out"
    run(tmp_path / "a.bin", out, *RAW, "--validation", tmp_path / "validation.bin")
    path = tmp_path / name
    os.utime(path, (1, 1))
    PreparedDataset(config_of(out))
    ids = np.fromfile(path, "<u2")
    ids[::-1].tofile(path)
    with refuses(name, "written anew", "import"):
        PreparedDataset(config_of(out))
    path.unlink()
    with refuses(name, "missing"):
        PreparedDataset(config_of(out))


def test_identity_is_that_of_the_ids_and_documents_not_of_their_paths(tmp_path):
    """What a checkpoint keeps, to compare it at a resume."""

    def identity(name: str, seed: int = 0, eos: int = EOS, joined: bool = False) -> list[dict]:
        folder = tmp_path / name
        folder.mkdir()
        raw(folder / "a.bin", documents(seed))
        megatron(folder / "b.bin", [flat(documents(1))] if joined else documents(1))
        run(folder / "a.bin", folder / "b.bin", folder / "out", "--dtype", "uint16", "--eos", eos)
        return PreparedDataset(config_of(folder / "out")).identities()

    first = identity("first")
    assert identity("moved") == first
    others = [identity("ids", seed=5), identity("eos", eos=7), identity("documents", joined=True)]
    assert first not in others


@pytest.mark.parametrize("option, value", [("max_tokens", 9), ("validation", "x.bin")])
def test_options_of_text_are_refused(tmp_path, option, value):
    raw(tmp_path / "a.bin", documents(0))
    run(tmp_path / "a.bin", tmp_path / "out", *RAW)
    with refuses(option, "out", "prepared already"):
        PreparedDataset(config_of(tmp_path / "out", **{option: value}))


@pytest.mark.parametrize("wrong", [320, config.IGNORE])
def test_an_id_outside_the_vocabulary_is_named_when_it_is_read(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(import_tokens, "LOOKED_AT", 3)
    raw(tmp_path / "a.npy", [[1, 2, 3, wrong, 4] + [5] * 500], "<i4")
    run(tmp_path / "a.npy", tmp_path / "out", "--dtype", "int32")
    stream, _ = streams(tmp_path / "out")
    assert stream.read(0, 3).tolist() == [1, 2, 3]
    with refuses(rf"a\.npy: token 3 has id {wrong}", "vocab_size = 320"):
        stream.read(2, 5)


# What is refused


def cut(path: pathlib.Path, write: Callable, of: str | None = None, left: int = 500) -> None:
    """Writes a file and cuts it, or the one with another suffix."""
    write(path, documents(0))
    os.truncate(path.with_suffix(of or path.suffix), left)


def text_file(path: pathlib.Path, text: str = "") -> None:
    path.write_text(text)


TEXTS = documents(0)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
REFUSED: list[tuple[str, Callable, list, tuple[str, ...]]] = [
    ("a.bin", lambda path: None, RAW, ("a.bin", "no token file")),
    ("a.txt", text_file, RAW, ("a.txt", "no token file", r"\.bin, \.npy, \.ds")),
    ("a.bin", text_file, RAW, ("a.bin", "no ids")),
    ("a.npy", partial(numpy_save, texts=[]), RAW, ("a.npy", "no ids|cannot be read")),
    ("a.bin", partial(text_file, text="abc"), RAW, ("a.bin", "multiple", "uint16")),
    ("a.bin", partial(text_file, text=POINTER), RAW, ("a.bin", "git-lfs")),
    ("a.bin", partial(raw, texts=TEXTS), [], ("a.bin", "--dtype")),
    ("a.bin", partial(raw, texts=TEXTS, dtype="<i4"), RAW, ("a.bin", "second", "--dtype uint32")),
    ("a.npy", partial(raw, texts=TEXTS), [*RAW[:2], "--eos", 1], ("a.npy", "is 1", "--eos")),
    ("a.npy", partial(numpy_save, texts=[[1, -100]]), [], ("a.npy", "id 1 is -100", "negative")),
    ("a.npy", partial(numpy_save, texts=TEXTS, dtype=">u2"), [], ("a.npy", "holds >u2", "little")),
    ("a.npy", partial(cut, write=numpy_save), [], ("a.npy", "cannot be read")),
    ("a.bin", partial(llmc, texts=TEXTS, more=1), [], ("a.bin", "holds", "header says")),
    ("a.bin", partial(llmc, texts=TEXTS, more=-1), [], ("a.bin", "holds", "header says")),
    ("a.bin", partial(cut, write=megatron), [], ("a.bin", "holds 250 ids", r"a\.idx names")),
    ("a.bin", partial(cut, write=megatron, of=".idx"), [], (r"a\.idx", "cut")),
    ("a.bin", partial(cut, write=megatron, of=".idx", left=0), [], (r"a\.idx", "no index")),
    ("a.bin", partial(megatron, texts=TEXTS, order=lambda n: n[::-1]), [], ("idx", "reorders")),
    ("a.bin", partial(megatron, texts=TEXTS, order=lambda n: n[::2]), [], ("idx", "selects")),
    ("a.bin", partial(megatron, texts=TEXTS, order=lambda n: n[:9]), [], ("a.bin", r"\.idx names")),
    ("a.bin", partial(megatron, texts=[]), [], ("a.bin", "no ids")),
    ("a.ds", partial(cut, write=datatrove), [], ("a.ds", "500 bytes", "cut")),
    ("a.ds", partial(cut, write=datatrove, of=".ds.index", left=80), [], ("a.ds", "cut")),
    ("a.ds", partial(raw, texts=TEXTS), [], ("a.ds", "index", "--dtype")),
]


@pytest.mark.parametrize("name, write, options, words", REFUSED)
def test_wrong_files_are_refused_and_nothing_is_left(tmp_path, name, write, options, words):
    write(tmp_path / name)
    before = content(tmp_path)
    with refuses(*words):
        run(tmp_path / name, tmp_path / "out", *options)
    assert content(tmp_path) == before


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    raw(tmp_path / "a.bin", documents(0))
    (tmp_path / "b.bin").symlink_to("a.bin")
    for words in (["b.bin", "out"], ["out", "--validation", tmp_path / "b.bin"]):
        words = [tmp_path / word if word in ("b.bin", "out") else word for word in words]
        with refuses("a.bin", "named 2 times"):
            run(tmp_path / "a.bin", *words, *RAW)


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    raw(tmp_path / "a.bin", documents(0))
    (tmp_path / "out").mkdir()
    run(tmp_path / "a.bin", tmp_path / "out", *RAW)
    with refuses("out", "not empty"):
        run(tmp_path / "a.bin", tmp_path / "out", *RAW)
