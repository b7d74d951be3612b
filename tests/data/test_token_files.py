"""data.format = "tokens": files as other programs write them, read as they are."""

import functools
import itertools
import pathlib
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

import config
from data.dataset import Dataset, open_dataset
from data.loader import Loader
from data.tokens import TokenStream
from tests.conftest import data_rank, make_config, refuses
from tools.prepare.prepare import prepare

EOS = 2


def documents(seed: int, count: int = 60) -> list[list[int]]:
    """Documents of random ids, each with EOS at its end."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 90, count)
    return [[*draw.integers(3, 320, size).tolist(), EOS] for size in sizes]


def flat(texts: Iterable[list[int]]) -> list[int]:
    return [token for text in texts for token in text]


# As each program writes its files


def nanogpt(path: pathlib.Path, texts: list[list[int]]) -> None:
    """data/openwebtext/prepare.py: ids alone, in uint16."""
    array = np.memmap(path, np.uint16, "w+", shape=(len(flat(texts)),))
    array[:] = flat(texts)
    array.flush()


def olmo(path: pathlib.Path, texts: list[list[int]], dtype: Any = np.uint32) -> None:
    """dolma tokens: ids alone, in a file that is called .npy."""
    np.array(flat(texts), dtype).tofile(path)


def numpy_save(path: pathlib.Path, texts: list[list[int]], dtype: Any = np.int64) -> None:
    np.save(path, np.array(flat(texts), dtype))


def llmc(
    path: pathlib.Path, texts: list[list[int]], magic: int = 20240520, dtype: Any = np.uint16
) -> None:
    """dev/data/data_common.py: a header of 256 numbers, of which three are used."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(flat(texts))
    path.write_bytes(header.tobytes() + np.array(flat(texts), dtype).tobytes())


def megatron(
    path: pathlib.Path, texts: list[list[int]], code: int = 8, dtype: Any = np.uint16
) -> None:
    """core/datasets/indexed_dataset.py."""
    np.array(flat(texts), dtype).tofile(path)
    lengths = np.array([len(text) for text in texts], np.int32)
    pointers = np.zeros(len(texts), np.int64)
    np.cumsum(lengths[:-1] * np.dtype(dtype).itemsize, out=pointers[1:])
    with path.with_suffix(".idx").open("wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code))
        index.write(struct.pack("<QQ", len(texts), len(texts) + 1))
        index.write(lengths.tobytes() + pointers.tobytes())
        index.write(np.arange(len(texts) + 1, dtype=np.int64).tobytes())


RAW = {"token_dtype": "uint16", "eos_id": EOS}
PROGRAMS: list[tuple[str, Callable, dict]] = [
    ("nanogpt.bin", nanogpt, RAW),
    ("olmo.npy", olmo, {"token_dtype": "uint32", "eos_id": EOS}),
    ("olmo-16.npy", functools.partial(olmo, dtype=np.uint16), RAW),
    ("raw-int32.bin", functools.partial(olmo, dtype=np.int32), RAW | {"token_dtype": "int32"}),
    ("numpy.npy", numpy_save, {"eos_id": EOS}),
    ("big-endian.npy", functools.partial(numpy_save, dtype=np.dtype(">u2")), {"eos_id": EOS}),
    ("llmc.bin", llmc, {"eos_id": EOS}),
    ("llama3.bin", functools.partial(llmc, magic=20240801, dtype=np.uint32), {"eos_id": EOS}),
    ("megatron_text_document.bin", megatron, {}),
    ("megatron-int32.bin", functools.partial(megatron, code=4, dtype=np.int32), {}),
]


def tokens_config(source: object, train: dict | None = None, **data: object) -> config.Config:
    section = {"source": str(source), "format": "tokens", **data}
    return make_config(data=section, train=train or {}, eval={})


def training_stream(cfg: config.Config) -> TokenStream:
    stream = open_dataset(cfg).sources[0].stream
    assert isinstance(stream, TokenStream)
    return stream


def digests(dataset: Dataset, steps: range, rank: int = 0, ranks: int = 1) -> list[int]:
    loader = Loader(dataset, data_rank(rank, ranks), steps.start)
    batches = [loader.batch(step) for step in steps]
    loader.close()
    return [batch.digest for batch in batches]


@pytest.mark.quick
@pytest.mark.parametrize("name, write, options", PROGRAMS, ids=[name for name, *_ in PROGRAMS])
def test_each_programs_files_have_its_tokens_and_documents(tmp_path, name, write, options):
    texts = documents(0)
    write(tmp_path / name, texts)
    stream = training_stream(tokens_config(tmp_path / name, document_mask=True, **options))
    assert stream.read(0, stream.length).tolist() == flat(texts)
    begins = np.cumsum([0, *map(len, texts)]).tolist()
    assert stream.documents(0, stream.length) == [*itertools.pairwise(begins)]
    for start, stop in [(0, 1), (5, 40), (begins[3], begins[5]), (begins[3] + 1, begins[5] + 1)]:
        inside = [begin for begin in begins if start < begin < stop]
        assert stream.documents(start, stop) == [*zip([start, *inside], [*inside, stop])]
        assert stream.targets_without_loss(start, stop) == len(inside)


@pytest.mark.parametrize("order", ["global", "growing"])
@pytest.mark.parametrize("document_mask", [False, True])
def test_digests_and_targets_are_those_of_the_text(corpus, tmp_path, document_mask, order):
    validation = tmp_path / "validation.jsonl"
    validation.write_text('{"text": "the cat sat on the mat"}\n')
    data = {"document_mask": document_mask, "order": order}
    folder = tmp_path / "prepared"
    options = {"source": str(corpus), "path": str(folder), "validation": str(validation), **data}
    text = make_config(data=options, eval={})
    prepare(text.data, text.model.vocab_size)
    files = {"validation": str(folder / "heldout.bin"), **RAW, **data}
    tokens = tokens_config(folder / "train.bin", **files)
    batches = []
    for cfg in (text, tokens):
        dataset = open_dataset(cfg)
        loader = Loader(dataset, data_rank(), 1)
        batches.append([(batch.digest, batch.valid_tokens) for batch in map(loader.batch, (1, 99))])
        (stream,) = dataset.validation
        batches.append(stream.read(0, stream.length).tolist())
        loader.close()
    assert batches[:2] == batches[2:]


@pytest.mark.quick
def test_several_files_are_read_in_the_order_of_their_names_hashes(tmp_path):
    names = ["a/part.bin", "b/part.bin", "c.bin", "d.bin"]
    texts = {}
    for seed, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        texts[name] = documents(seed)[:-1] + [[7, 8, 9]]  # the last document has no EOS
        nanogpt(tmp_path / name, texts[name])
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no tokens")
    stream = training_stream(tokens_config(tmp_path / "**/*", **RAW, document_mask=True))
    # sorted by the SHA-256 of these names, as sha256sum prints it
    expected = [texts[name] for name in ("c.bin", "b/part.bin", "d.bin", "a/part.bin")]
    assert stream.read(0, stream.length).tolist() == flat(map(flat, expected))
    border = len(flat(expected[0]))
    assert stream.documents(border - 3, border + 2) == [(border - 3, border), (border, border + 2)]
    assert stream.read(border - 1, border + 1).tolist() == [9, flat(expected[1])[0]]


@pytest.mark.quick
def test_an_empty_sequence_of_megatrons_is_no_document(tmp_path):
    texts = [[5, 6], [], [], [7], []] * 30
    megatron(tmp_path / "a.bin", texts)
    cfg = tokens_config(tmp_path / "a.bin", document_mask=True, train={"seq_len": 1})
    stream = training_stream(cfg)
    assert stream.documents(0, 3) == [(0, 2), (2, 3)]
    assert stream.targets_without_loss(0, 3) == 1


@pytest.mark.quick
def test_last_hundredth_of_the_first_tokens_is_held_out(tmp_path):
    ids = np.arange(5_000_000) % 320
    for number, part in enumerate(np.split(ids, [1_000_000, 4_190_000])):
        olmo(tmp_path / f"{number}.bin", [part.tolist()], np.uint16)
    cfg = tokens_config(tmp_path / "*.bin", token_dtype="uint16")
    (validation,) = open_dataset(cfg).validation
    training = training_stream(cfg)
    first = 2**22 - 2**22 // 100
    assert training.validation == (first, 2**22)
    assert validation.length == 2**22 // 100
    assert (validation.read(0, 9) == training.read(first, first + 9)).all()
    limited = tokens_config(tmp_path / "*.bin", token_dtype="uint16", max_tokens=5000)
    assert training_stream(limited).length == 5000
    assert open_dataset(limited).validation[0].length == 50


@pytest.mark.quick
def test_identity_is_names_and_sizes(tmp_path):
    nanogpt(tmp_path / "a.bin", documents(0))
    olmo(tmp_path / "b.bin", documents(1))
    cfg = tokens_config(
        tmp_path / "a.bin", token_dtype="uint16", validation=str(tmp_path / "b.bin")
    )
    assert open_dataset(cfg).fingerprint() == [
        {
            "files": {str(tmp_path / "a.bin"): len(flat(documents(0)))},
            "validation_files": {str(tmp_path / "b.bin"): 2 * len(flat(documents(1)))},
            "hashes": [],
        }
    ]


# What is refused


def cut_megatron(path: pathlib.Path) -> None:
    megatron(path, documents(0))
    path.write_bytes(path.read_bytes()[:-2])


def other_index(path: pathlib.Path) -> None:
    megatron(path, documents(0))
    path.with_suffix(".idx").write_bytes(b"an index of something else, long enough to be one")


def pointer(path: pathlib.Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


REFUSED: list[tuple[str, Callable, dict, tuple[str, ...]]] = [
    ("a.bin", lambda path: None, RAW, ("source", "names no file", r"\.bin or \.npy")),
    ("a.bin", lambda path: path.write_bytes(b""), RAW, ("a.bin", "no tokens")),
    ("a.bin", lambda path: path.write_bytes(b"abc"), RAW, ("a.bin", "not a multiple", "uint16")),
    ("a.bin", pointer, RAW, ("a.bin", "git-lfs")),
    ("a.bin", lambda path: nanogpt(path, documents(0)), {}, ("token_dtype", "a.bin")),
    ("a.bin", cut_megatron, {}, ("a.bin", "bytes", r"a\.idx")),
    ("a.bin", other_index, {}, (r"a\.idx", "no index of Megatron")),
    ("a.bin", functools.partial(megatron, texts=documents(0), code=5), {}, (r"a\.idx", "uint16")),
    (
        "a.bin",
        lambda path: nanogpt(path, documents(0)),
        {"token_dtype": "uint16", "document_mask": True},
        ("document_mask", "eos_id", "a.bin"),
    ),
    (
        "a.bin",
        lambda path: nanogpt(path, documents(0)),
        RAW | {"validation": "no.bin"},
        ("validation", "names no file"),
    ),
    (
        "a.bin",
        lambda path: nanogpt(path, documents(0)[:2]),
        RAW,
        ("source", "samples", "train.seq_len = 32", "global_batch_size"),
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize("name, write, options, words", REFUSED)
def test_wrong_files_are_refused(tmp_path, name, write, options, words):
    write(tmp_path / name)
    with refuses(*words):
        open_dataset(tokens_config(tmp_path / name, **options))


@pytest.mark.quick
@pytest.mark.parametrize(
    "data, words",
    [
        ({"token_dtype": "uint16"}, ("token_dtype", 'format = "tokens"')),
        ({"eos_id": 1}, ("eos_id", 'format = "tokens"')),
        ({"format": "tokens", "eos_id": 320}, ("eos_id = 320", "vocab_size = 320")),
        ({"format": "tokens", "token_dtype": "int8"}, ("token_dtype", "uint16")),
        (
            {"sources": [{"source": "a.bin", "format": "tokens"}, {"source": "b.jsonl"}]},
            ("data.tokenizer|tokenizer", "mix texts with token files"),
        ),
    ],
)
def test_wrong_options_are_refused(data, words):
    with refuses(*words):
        make_config(data=data)


@pytest.mark.quick
@pytest.mark.parametrize("wrong", [320, config.IGNORE])
def test_an_id_outside_the_vocabulary_is_named_when_it_is_read(tmp_path, wrong):
    ids = [1, 2, 3, wrong, 4] + [5] * 500
    olmo(tmp_path / "a.npy", [ids], np.int32)
    stream = training_stream(tokens_config(tmp_path / "a.npy", token_dtype="int32"))
    assert stream.read(0, 3).tolist() == [1, 2, 3]
    with refuses(rf"a\.npy: token 3 has id {wrong}", "vocab_size = 320"):
        stream.read(2, 5)


@pytest.mark.quick
def test_a_mixture_of_texts_and_token_files(corpus, prepared, tmp_path):
    nanogpt(tmp_path / "a.bin", documents(0))
    sources = [
        {"source": str(corpus), "weight": 3.0},
        {"source": str(tmp_path / "a.bin"), "format": "tokens"},
    ]
    data = {"source": None, "sources": sources, "tokenizer": str(prepared), **RAW}
    cfg = make_config(data={**data, "path": str(tmp_path / "prepared")})
    prepare(cfg.data, cfg.model.vocab_size)
    dataset = open_dataset(cfg)
    assert [path.name for path in dataset.tokenizer_files] == ["tokenizer.model"]
    assert dataset.names == [str(corpus), str(tmp_path / "a.bin")]
    positions = [dataset.position(number) for number in range(80)]
    assert [position.source for position in positions].count(1) == 20
    span = dataset.span([position.source for position in positions].index(1))
    assert (
        span.stream.read(span.start, span.stop).tolist()
        == flat(documents(0))[span.start : span.stop]
    )


def test_a_mixture_of_token_files_needs_no_tokenizer(prepared, tmp_path):
    sources = []
    for seed in range(2):
        nanogpt(tmp_path / f"{seed}.bin", documents(seed))
        sources.append({"source": str(tmp_path / f"{seed}.bin")})
    cfg = make_config(data={"source": None, "sources": sources, "format": "tokens", **RAW})
    prepare(cfg.data, cfg.model.vocab_size)  # does nothing
    dataset = open_dataset(cfg)
    assert dataset.tokenizer_files == []
    named = open_dataset(tokens_config(tmp_path / "0.bin", tokenizer=str(prepared), **RAW))
    assert named.tokenizer_files == [prepared / "tokenizer.model"]
    assert [stream.length for stream in dataset.validation] == [27, 27]
