"""The page of a run: its curves against the rows, what it says of the run's folder, and that it needs nothing else."""

import html.parser
import itertools
import json
import math
import pathlib
import random
import re
import statistics
import sys
import time
from types import SimpleNamespace

import pytest

from extras.reports import report
from tests.conftest import launch, make_config, needs_extra, rows, run_tool

NAMES = {
    "Loss": "loss",
    "Learning rate": "lr",
    "Gradient norm": "grad_norm",
    "Throughput": "tokens_per_second_per_device",
    "Peak memory": "peak_memory_gib",
}


def train_row(step: int, **more) -> dict:
    return {
        "kind": "train",
        "step": step,
        "loss": 9 / step,
        "grad_norm": 1 + 0.1 * (step % 3),
        "lr": 1e-3 / step,
        "tokens": 512 * step,
        "tokens_per_second_per_device": 4000.0 + step,
        "mfu": None,
        "step_seconds": 0.1,
        "peak_memory_gib": 2.5,
        **more,
    }


def write_run(folder: pathlib.Path, found: list[dict], log: str = "", **files: str) -> pathlib.Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (folder / "logs" / "rank-0.log").write_text(log)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


class Page(html.parser.HTMLParser):
    """Every figure's ticks and curves, the tables' rows, the text; asserts that elements are closed in their order."""

    def __init__(self, text: str):
        super().__init__()
        self.open = []
        self.attributes = []
        self.figures = {}
        self.rows = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list) -> None:
        found = dict(attributes)
        self.attributes.append((tag, found))
        if tag not in ("meta",):
            self.open.append(tag)
        if tag == "figure":
            self.figure = SimpleNamespace(x=[], y=[], curves={}, marks=[])
        elif tag == "figcaption":
            self.title = None
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "text":
            self.place = found
        elif tag == "line" and "x1" in found:
            self.figure.marks.append((found["class"], float(found["x1"].rstrip("%"))))
        elif tag == "path":
            self.figure.curves[found["class"]] = found["d"]

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        within = self.open[-1] if self.open else ""
        if within != "style":
            self.text += data
        if within == "figcaption" and self.title is None:
            self.title = data
            self.figures[data] = self.figure
        elif within in ("td", "th"):
            self.rows[-1][-1] += data
        elif within == "text" and data != "step":
            value = float(data.rstrip("kMG")) * {"k": 1e3, "M": 1e6, "G": 1e9}.get(data[-1], 1)
            axis, at = (self.figure.y, "y") if self.place["x"] == "-8" else (self.figure.x, "x")
            axis.append((float(self.place[at].rstrip("%")), value))

    def curve(
        self, title: str, kind: str = "c0", log: bool = False
    ) -> list[list[tuple[float, float]]]:
        """The parts of a curve, as (step, value), read by the ticks as an eye would."""
        figure = self.figures[title]
        (x0, step0), (x1, step1) = figure.x[0], figure.x[-1]
        (y0, low), (y1, high) = figure.y[0], figure.y[-1]
        low, high = (math.log10(low), math.log10(high)) if log else (low, high)
        parts = []
        for pen, x, y in re.findall(r"([ML])([-\d.]+),([-\d.]+)", figure.curves[kind]):
            step = step0 + (float(x) / 10 - x0) / (x1 - x0) * (step1 - step0)
            value = low + (float(y) / 10 - y0) / (y1 - y0) * (high - low)
            if pen == "M":
                parts.append([])
            parts[-1] = [*parts[-1], (step, 10**value if log else value)]
        return parts


def page_of(*folders: pathlib.Path) -> Page:
    return Page(report.write_report([*folders]).read_text())


def test_the_curves_are_the_rows(tmp_path):
    found = [train_row(step) for step in (1, 10, 20, 30, 40)]
    run = write_run(
        tmp_path / "r",
        [
            *found,
            {"kind": "eval", "step": 20, "loss": 3.5},
            {"kind": "eval", "step": 40, "loss": 2.5},
        ],
    )
    page = page_of(run)
    assert page.figures.keys() == NAMES.keys()
    for title, name in NAMES.items():
        (curve,) = page.curve(title)
        size = max(row[name] for row in found)
        assert [step for step, _ in curve] == pytest.approx([1, 10, 20, 30, 40], abs=0.1)
        assert [value for _, value in curve] == pytest.approx(
            [row[name] for row in found], abs=2e-3 * size
        )
    dots = [part[0] for part in page.curve("Loss", "c0 dots")]
    assert dots == [pytest.approx((20, 3.5), abs=0.05), pytest.approx((40, 2.5), abs=0.05)]
    assert ["validation loss", "2.5"] in page.rows and ["loss", "0.225"] in page.rows


def test_what_has_a_natural_zero_is_drawn_from_there_and_ticks_are_round(tmp_path):
    """Five spaces between them or so, each 1, 2 or 5 times a power of ten."""
    found = [
        train_row(step, loss=2.93 + 1 / step, peak_memory_gib=2.5 + step / 7) for step in (1, 9)
    ]
    page = page_of(write_run(tmp_path / "r", found))
    for title in NAMES:
        positions, values = zip(*page.figures[title].y)
        has_zero = title in ("Learning rate", "Throughput", "Peak memory")
        assert ((positions[0], values[0]) == (100, 0)) is has_zero, title
        spaces = [high - low for low, high in itertools.pairwise(values)]
        assert spaces == pytest.approx([spaces[0]] * len(spaces)) and 3 <= len(values) <= 7, title
        assert f"{spaces[0]:e}"[:8] in ("1.000000", "2.000000", "5.000000"), title


def test_the_mean_loss_is_drawn_where_rows_have_it(tmp_path):
    found = [train_row(1), *(train_row(step, loss_mean=5.0 + step) for step in (2, 3))]
    (curve,) = page_of(write_run(tmp_path / "r", found)).curve("Loss")
    assert [value for _, value in curve] == pytest.approx([9, 7, 8], abs=0.02)


def test_null_leaves_a_gap_and_a_lone_point_is_seen(tmp_path):
    found = [train_row(step, loss=None if step in (3, 5) else 2.0 + step) for step in range(1, 9)]
    page = page_of(write_run(tmp_path / "r", found))
    assert [[round(step) for step, _ in part] for part in page.curve("Loss")] == [
        [1, 2],
        [4],
        [6, 7, 8],
    ]
    assert page.figures["Loss"].curves["c0"].count("h0") == 3
    (whole,) = page.curve("Learning rate")
    assert len(whole) == 8


def test_a_quantity_that_no_row_has_is_left_out(tmp_path):
    found = [
        {key: value for key, value in train_row(step, loss="?").items() if key != "peak_memory_gib"}
        for step in (1, 2)
    ]
    assert page_of(write_run(tmp_path / "r", found)).figures.keys() == NAMES.keys() - {
        "Loss",
        "Peak memory",
    }


@pytest.mark.parametrize(
    "found",
    [
        [train_row(1)],
        [{"kind": "eval", "step": 7, "loss": 2.0}],
        [train_row(step, loss=0.0, lr=0.0) for step in (1, 2)],
    ],
)
def test_a_single_row_and_a_constant_can_be_drawn(tmp_path, found):
    assert page_of(write_run(tmp_path / "r", found)).figures["Loss"].curves


@pytest.mark.parametrize("first", [-2, 16])
def test_a_wide_range_of_gradient_norms_is_logarithmic(tmp_path, first):
    """Also beyond 64-bit integers, as of a run that diverges."""
    found = [train_row(step, grad_norm=10.0 ** (first + step - 1)) for step in range(1, 9)]
    (curve,) = page_of(write_run(tmp_path / "r", found)).curve("Gradient norm", log=True)
    assert [value for _, value in curve] == pytest.approx(
        [row["grad_norm"] for row in found], rel=0.03
    )


def test_rows_with_other_keys_or_in_scientific_notation_are_read_alike(tmp_path):
    """The regular expression reads what json.loads() does."""
    draw = random.Random(0)
    found = [
        train_row(step)
        | {
            "loss": draw.uniform(-1, 1) * 10.0 ** draw.randint(-30, 30),
            "lr": draw.choice([0, 1e-12, 3]),
        }
        | draw.choice(
            [
                {},
                {"loss_mean": draw.random()},
                {"by_source": {"a": 1.0, "loss": 5.0}},
                {"loss": None},
                {"slowest_rank": {"peak_memory_gib": 9.0}},
            ]
        )
        for step in range(1, 500)
    ]
    for row in found[::7]:  # in another order of keys, with a table first
        table = {"kind": row.pop("kind"), "inner": {"lr": 7.0, "step": 9}, **row}
        row.clear()
        row.update(table)
    run = write_run(tmp_path / "r", found)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            '[1]\n{"kind": "train"}\nnull\n{"kind": "train", "step": 500, "loss": 1.0, "grad_norm": 1.0, "lr"'
        )
    read = report.Run(run).train
    for name in report.FIELDS:
        want = [row.get("loss_mean", row["loss"]) if name == "loss" else row[name] for row in found]
        assert [*read[name]] == pytest.approx(
            [math.nan if value is None else value for value in want], rel=0, abs=0, nan_ok=True
        ), name


def test_a_million_rows_take_seconds_and_keep_their_extremes(tmp_path):
    draw = random.Random(0)
    template = json.dumps(train_row(1, loss=-1.5, grad_norm=-2.5) | {"step": -3})
    parts = re.split(r"-1\.5|-2\.5|-3", template)
    spikes = {50_000 * i + draw.randrange(1, 40_000): 50.0 + i for i in range(20)}
    dips = {50_000 * i + draw.randrange(1, 40_000): -5.0 - i for i in range(20)}
    run = write_run(tmp_path / "r", [])
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 10**6 + 1):
            loss = spikes.get(step) or dips.get(step) or 2 + draw.random()
            file.write(f"{parts[0]}{step}{parts[1]}{loss}{parts[2]}{1.5}{parts[3]}\n")
    began = time.process_time()
    path = report.write_report([run])
    seconds, size = time.process_time() - began, path.stat().st_size
    assert seconds < 5 and size < 3e6, (seconds, size)
    (curve,) = Page(path.read_text()).curve("Loss")
    for step, loss in {**spikes, **dips}.items():
        assert any(abs(at - step) < 1500 and abs(value - loss) < 0.1 for at, value in curve), (
            step,
            loss,
        )


def test_thinning_keeps_gaps(tmp_path):
    found = [train_row(step, loss=None if step == 7000 else 2.0) for step in range(1, 10001)]
    first, second = page_of(write_run(tmp_path / "r", found)).curve("Loss")
    assert first[-1][0] == pytest.approx(7000, abs=20) and second[0][0] == pytest.approx(
        7000, abs=20
    )


LOG = """2026-11-25 07:44:19,869 outputs/r: 5,048,576 parameters on 2 x cpu (1 replicas x 2 shards), bfloat16
2026-11-25 07:44:19,869 2,048 tokens per step = 1 micro-batches x 1 x 8 sequences of 256; from fresh weights
2026-11-25 07:44:20,172 step   1/300  loss  8.8482  grad   0.93
2026-11-25 07:44:41,887 saved outputs/r/checkpoints/step-00000010
2026-11-25 07:44:45,958 a sample:
the former
2026-11-25 07:45:19,869 outputs/r: 5,048,576 parameters on 2 x cpu (1 replicas x 2 shards), bfloat16
2026-11-25 07:45:19,869 2,048 tokens per step = 1 micro-batches x 1 x 8 sequences of 256; resuming after step 10
2026-11-25 07:45:41,887 saved outputs/r/checkpoints/step-00000020
2026-11-25 07:45:45,958 a sample:
def f(a<b):

    return "&amp;"
2026-11-25 07:46:45,958 stopped after step 20 by SIGTERM
"""


@pytest.mark.quick
def test_what_the_folder_says_of_the_run(tmp_path):
    """Each number of it by hand from the rows, none of which is like the others."""
    train = []
    for step in range(1, 21):
        rate = 4000.0 + (7 * step) ** 2 % 101
        memory = 2.5 + (step == 13) / 3
        last = {"mfu": 0.125, "epochs": 1.375} if step == 20 else {}
        row = train_row(step, tokens_per_second_per_device=rate, peak_memory_gib=memory, **last)
        train.append(row)
    median = round(statistics.median(row["tokens_per_second_per_device"] for row in train))
    run = write_run(
        tmp_path / "r",
        [
            *train,
            {
                "kind": "eval",
                "step": 20,
                "loss": 3.25,
                "bits_per_byte": 1.0625,
                "loss_by_source": {"web": 3.5},
            },
        ],
        LOG,
        plan_json=json.dumps({"peak memory, GiB": "planned 40, measured 41 (+2.5%)"}),
        status_json=json.dumps({"state": "preempted", "step": 20, "time": "2026-11-25T07:46:46"}),
        environment_json=json.dumps(
            {"commit": "abc", "uncommitted": "a\nb\n", "hosts": ["n1", "n2"], "gpu": None}
        ),
        config_toml='[train]\nsteps = 300\n[data]\nsource = "web"\n',
    )
    (run / "checkpoints" / "step-00000015").mkdir(parents=True)
    page = page_of(run)
    for row in (
        ["state", "stopped at step 20 of 300"],
        ["time", "2026-11-25T07:46:46"],
        ["launches", "2"],
        ["resumed after steps", "10"],
        ["saves", "3"],
        ["tokens", "10,240"],
        ["loss", "0.45"],
        ["validation loss", "3.25"],
        ["bits per byte", "1.0625"],
        ["mfu", "0.125"],
        ["epochs", "1.375"],
        ["tokens per second and device, median", f"{median:,}"],
        ["training, without saves and evaluations", "0:00:02"],
        ["loss_by_source.web", "3.5"],
        ["model", "5,048,576 parameters on 2 x cpu (1 replicas x 2 shards)"],
        ["hosts", "n1 n2"],
        ["commit", "abc"],
        ["peak memory, GiB", "2.83"],
        ["data.source", '"web"'],
        ["uncommitted", "a diff of 2 lines, in environment.json"],
        ["peak memory, GiB", "planned 40, measured 41 (+2.5%)"],
    ):
        assert row in page.rows, row
    assert 'def f(a<b):\n\n    return "&amp;"\n' in page.text and "the former" not in page.text
    assert sorted(page.figures["Loss"].marks) == [
        ("c0 resumed", 50),
        ("c0 saved", 50),
        ("c0 saved", 75),
        ("c0 saved", 100),
    ]


def test_several_runs_show_first_the_options_that_differ(tmp_path):
    runs = [
        write_run(
            tmp_path / name,
            [train_row(step, loss=loss) for step in (1, 2)],
            config_toml=f"[optim]\nlr = {lr}\n[train]\nsteps = 2\n{more}",
        )
        for name, loss, lr, more in (("a", 3.0, 0.1, ""), ("b", 4.0, 0.2, "[lora]\nrank = 4\n"))
    ]
    page = page_of(*runs)
    assert [value for _, value in page.curve("Loss", "c0")[0]] == pytest.approx([3, 3], abs=0.01)
    assert [value for _, value in page.curve("Loss", "c1")[0]] == pytest.approx([4, 4], abs=0.01)
    place = [
        page.rows.index(row)
        for row in (["optim.lr", "0.1", "0.2"], ["lora.rank", "-", "4"], ["train.steps", "2"])
    ]
    assert place == sorted(place) and ["", "a", "b"] in page.rows
    assert (runs[0] / "report.html").exists() and not (runs[1] / "report.html").exists()


def test_runs_of_one_name_are_told_apart_and_many_have_a_color(tmp_path):
    runs = [write_run(tmp_path / str(i) / "r", [train_row(1), train_row(2)]) for i in range(8)]
    page = page_of(*runs)
    assert ["", *map(str, runs)] in page.rows
    classes = [f"c{i}" for i in range(4)] + [f"c{i} dashed" for i in range(4)]
    assert [*page.figures["Loss"].curves] == classes
    keys = [found["class"] for tag, found in page.attributes if tag == "i"]
    assert keys == [f"key {name}" for name in classes]
    for i in range(4):
        assert report.STYLE.count(f".c{i} {{ color: ") == 2  # on light pages and on dark ones


@pytest.mark.quick
def test_the_page_is_escaped_and_refers_to_nothing_outside(tmp_path):
    evil = '<script src="https://x.example/a.js">&"\'\udc80'
    run = write_run(
        tmp_path / "a<b>&\"'",
        [train_row(1), {"kind": "eval", "step": 1, "loss": 2.0, evil: evil}],
        f"2026-11-25 07:45:45,958 a sample:\n{evil[:-1]}\n",
        environment_json=json.dumps({"command": [evil], evil: evil, "uncommitted": evil}),
        status_json=json.dumps({"state": evil, "time": evil}),
        config_toml=f"[data]\nsource = {json.dumps(evil[:-1])}\n",
    )
    page = page_of(run, run)
    assert page.text.count("<script src=") > 8
    assert {tag for tag, _ in page.attributes}.isdisjoint(
        {"script", "link", "img", "iframe", "image", "use", "a"}
    )
    for _, found in page.attributes:
        assert found.keys().isdisjoint({"href", "src", "xlink:href", "onload"})
        assert not any("url(" in (value or "") for value in found.values())
    assert "url(" not in report.STYLE and "@import" not in report.STYLE


def test_invalid_input_is_exit_2_with_all_problems(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    none = write_run(tmp_path / "none", [])
    assert run_tool(report.main, tmp_path / "gone", empty, none) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path}/gone: is not a folder; name a run's, such as outputs/tiny",
        f"{empty}: is not a run's folder: metrics.jsonl: No such file or directory",
        f"{none}: metrics.jsonl has no rows yet",
    ]
    good = write_run(tmp_path / "good", [train_row(1)])
    assert run_tool(report.main, good, "--out", tmp_path / "gone" / "x.html") == 2
    assert (
        capsys.readouterr().err
        == f"{tmp_path}/gone/x.html: cannot be written: No such file or directory\n"
    )
    assert run_tool(report.main) == 2
    assert run_tool(report.main, good, "--out", tmp_path / "x.html") == 0
    assert capsys.readouterr().out == f"{tmp_path}/x.html\n" and not (good / "report.html").exists()


def test_a_mean_stands_in_the_middle_of_its_steps(tmp_path):
    """A loss that falls by 1 a step, and the validation loss after steps 10 and 20, lie on one line."""
    found = []
    for steps in (range(1, 2), range(2, 11), range(11, 21)):
        mean = sum(101 - step for step in steps) / len(steps)
        found.append(train_row(steps[-1], loss=101.0 - steps[-1], loss_mean=mean))
    for step in (10, 20):
        found.append({"kind": "eval", "step": step, "loss": 101.0 - step, "bits_per_byte": None})
    page = page_of(write_run(tmp_path / "r", found))
    points = []
    for kind in ("c0", "c0 dots"):
        for part in page.curve("Loss", kind):
            points += part
    assert len(points) == 5
    for step, loss in points:
        assert loss == pytest.approx(101 - step, abs=0.2)
    text = {label: values for label, *values in page.rows}
    assert text["loss, mean of the last 10 steps"] == ["85.5"]


def test_time_and_command_are_those_of_the_user(tmp_path):
    command = ["/repo/train.py", "my configs/a.toml", "--train.steps=20"]
    launched = json.dumps({"command": command, "ranks": 4, "hosts": ["a", "b"]})
    found = [train_row(1, step_seconds=60.0), train_row(11, step_seconds=6.5)]
    page = page_of(write_run(tmp_path / "r", found, environment_json=launched))
    text = {label: values for label, *values in page.rows}
    assert text["command"] == ["NPROC=2 ./run_train.sh 'my configs/a.toml' --train.steps=20"]
    assert text["training, without saves and evaluations"] == ["0:02:05"]
    assert report.typed_command({}) == ""
    one_a_node = {"command": command, "ranks": 2, "hosts": ["a", "b"]}
    assert report.typed_command(one_a_node).startswith("./run_train.sh 'my configs/a.toml'")


def test_a_first_row_that_is_not_step_1_counts_one_step(tmp_path):
    """How many steps it stands for is not known: rows before it were lost."""
    found = [train_row(step, step_seconds=seconds) for step, seconds in ((11, 7.0), (21, 2.0))]
    page = page_of(write_run(tmp_path / "r", found))
    assert ["training, without saves and evaluations", "0:00:27"] in page.rows


def test_the_last_five_resumes_and_all_launches_are_counted(tmp_path):
    resumes = [3, 20, 7, 11, 5, 13, 2]
    log = LOG.partition("07:44:45")[0].rpartition("\n")[0] + "\n"
    for step in resumes:
        log += LOG.splitlines()[6] + "\n" + LOG.splitlines()[7].replace(" 10", f" {step}") + "\n"
    page = page_of(write_run(tmp_path / "r", [train_row(1)], log))
    assert ["launches", "8"] in page.rows and ["saves", "1"] in page.rows
    assert ["resumed after steps", "5 7 11 13 20"] in page.rows


def test_more_steps_do_not_go_back_to_a_step(monkeypatch):
    def command(resume: object, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", "a.toml", *words])
        text = report.what_next(make_config(checkpoint={"resume": resume}), None)
        return next(line for line in text.splitlines() if "--train.steps=8" in line)

    assert command("auto").endswith(": ./run_train.sh a.toml --train.steps=8")
    for resume in (2, "never"):  # on the command line, or in the file
        expected = ": ./run_train.sh a.toml --checkpoint.resume=auto --train.steps=8"
        assert command(resume, f"--checkpoint.resume={resume}").endswith(expected)
        assert command(resume).endswith(expected)


STORED = {"checkpoint": {}}
STRETCHED = "more steps, a longer schedule"


@pytest.mark.parametrize(
    "sections, purposes, prompt",
    [
        ({}, [], None),
        ({"log": {"tensorboard": True}}, ["curves"], None),
        (STORED, ["text from it", STRETCHED, "export"], "--prompt 'def '"),
        (
            {**STORED, "data": {"source": "texts.jsonl"}},
            ["text from it", STRETCHED, "export"],
            "--prompt 'The '",
        ),
        (
            {**STORED, "data": {"messages_field": "messages", "tokenizer": "folder"}},
            ["text from it", STRETCHED, "export"],
            "--chat",
        ),
        (
            {**STORED, "optim": {"schedule_steps": 9}},
            ["text from it", "more steps", "export"],
            "--prompt 'def '",
        ),
        (
            {**STORED, "optim": {"schedule": "constant"}},
            ["text from it", "more steps", "export"],
            "--prompt 'def '",
        ),
    ],
    ids=str,
)
@needs_extra("huggingface", "chat")
def test_a_finished_run_names_the_commands_that_fit_it(
    tmp_path, monkeypatch, sections, purposes, prompt
):
    monkeypatch.setattr(sys, "argv", ["launch", "a.toml"])
    cfg = make_config(run={"name": "r", "output_dir": str(tmp_path)}, **sections)
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "tokenizer.model").touch()
    page = folder / "report.html"
    head, *commands = report.what_next(cfg, page).replace("; ", "\n", 1).splitlines()
    expected = {
        "curves": f"-m tensorboard.main --logdir {tmp_path}",
        "text from it": f"-m generate {folder} {prompt}",
        "more steps": "a.toml --train.steps=8",
        STRETCHED: "a.toml --train.steps=8",
        "export": f"-m huggingface export {folder} {folder}-hf",
    }
    assert head == f"finished: {page}"
    assert commands == [f"{purpose}: ./run_train.sh {expected[purpose]}" for purpose in purposes]
    assert report.what_next(cfg, None).startswith(f"finished: {folder}")
    (folder / "tokenizer.model").unlink()  # token files have none
    assert "generate" not in report.what_next(cfg, None)


@pytest.mark.slow
def test_real_launches_are_seen(write_config, tmp_path):
    path = write_config("r", checkpoint={"save_every_steps": 2}, eval={"batches": 1})
    first = launch(path)
    assert (
        first.returncode == 0 and f"finished: {tmp_path}/outputs/r/report.html; " in first.stdout
    ), first.stderr
    again = launch(path, "--train.steps=6")
    assert again.returncode == 0, again.stderr
    folder = tmp_path / "outputs" / "r"
    page = Page((folder / "report.html").read_text())
    text = {label: values for label, *values in page.rows}
    assert (
        text["launches"] == ["2"]
        and text["resumed after steps"] == ["4"]
        and text["saves"] == ["3"]
    )
    assert (
        text["state"] == ["finished at step 6 of 6"] and "parameters on 1 x cpu" in text["model"][0]
    )
    (curve,) = page.curve("Loss")
    want = [row.get("loss_mean", row["loss"]) for row in rows(folder)]
    assert [value for _, value in curve] == pytest.approx(want, abs=0.01) and len(want) == 6
