"""Launchers, ours and others': who starts the ranks, who they are told to be, whom they wait for."""

import contextlib
import dataclasses
import datetime
import errno
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from data.encode import encode_in_order
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

import config
from config import ConfigError
from data.cores import usable_cores
from launch import checks
from launch import launch as launcher
from launch.command import Ranks, commits, needed_packages, variables_of_a_launcher
from launch.slurm import attempts_without_step, first_host, on_nodes
from lifecycle import process_group
from lifecycle.folder import read_status, write_status
from lifecycle.process_group import all_gather_reports, check_launcher, raise_file_limit
from lifecycle.watchdog import Watchdog
from metrics import Board, peak_memory_gib
from parallel.ranks import printed_if_long
from parallel.torch_patches import report_wait_for_nodes
from tests.conftest import REPO, launch, make_config, rows


def without_launcher() -> dict[str, str]:
    others = variables_of_a_launcher()
    return {name: value for name, value in os.environ.items() if name not in others}


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


def operator_environment(pod: int, port: str) -> dict[str, str]:
    """What Kubeflow's training operator sets in a PyTorchJob's pod, one process in each of two."""
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "RANK": str(pod),
        "PET_NPROC_PER_NODE": "1",
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(pod),
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": port,
    }


def trainer_environment(pod: int, port: str) -> dict[str, str]:
    """What Kubeflow's Trainer sets in a TrainJob's pod, and docs/cluster.md in a JobSet's."""
    every = operator_environment(pod, port)
    return {name: value for name, value in every.items() if name.startswith("PET_")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "environment"),
    [
        (["-m", "torch.distributed.run"], operator_environment),
        (["-m", "torch.distributed.run"], trainer_environment),
        ([], operator_environment),  # plain Python: the operator's own variables suffice
    ],
    ids=["PyTorchJob", "TrainJob", "PyTorchJob without torchrun"],
)
def test_two_pods_train_as_one_process_does(program, environment, write_config):
    path = write_config("pods", checkpoint={"save_every_steps": 4})
    port = free_port()
    pods = []
    for pod in (0, 1):
        command = [sys.executable, *program, "train.py", path]
        variables = {**without_launcher(), **environment(pod, port), "OMP_NUM_THREADS": "1"}
        pods.append(
            subprocess.Popen(
                command, cwd=REPO, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    outputs = [pod.communicate(timeout=120)[0].decode() for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(outputs)
    folder = config.run_folder(config.load(str(path)))
    assert read_status(folder)["state"] == "finished"
    plain = launch(path, "--run.name=plain", OMP_NUM_THREADS="1")
    assert plain.returncode == 0, plain.stderr
    expected = [row["loss"] for row in rows(folder.parent / "plain")]
    assert [row["loss"] for row in rows(folder)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_rank_that_waits_for_others(write_config, number):
    variables = {**without_launcher(), "RANK": "0", "WORLD_SIZE": "2"}
    port = free_port()
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [sys.executable, "train.py", write_config("alone")]
    rank = subprocess.Popen(command, cwd=REPO, env=variables)

    def is_served() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("localhost", int(port))) == 0

    try:
        wait_until(is_served)
        rank.send_signal(number)
        assert rank.wait(timeout=10) == -number
    finally:
        rank.kill()


@pytest.mark.slow
def test_pods_that_are_stopped_are_no_success(write_config):
    path = write_config("pods", train={"steps": 100_000}, checkpoint={"save_every_steps": 100_000})
    folder = config.run_folder(config.load(str(path)))
    port = free_port()
    pods = []
    for pod in (0, 1):
        variables = {
            **without_launcher(),
            **operator_environment(pod, port),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "train.py", path]
        pods.append(subprocess.Popen(command, cwd=REPO, env=variables, stdout=subprocess.DEVNULL))
    try:
        wait_until(lambda: steps_of(folder) > 1)
        pods[1].terminate()
        assert [pod.wait(timeout=60) for pod in pods] == [75, 75]
    finally:
        for pod in pods:
            pod.kill()
    assert read_status(folder)["state"] == "preempted"


@pytest.mark.slow
def test_a_host_name_that_does_not_resolve_stops_no_ranks_of_this_machine(write_config, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\n"
        "socket.gethostname = lambda: 'no-such-host.invalid'\n"
        "socket.getfqdn = lambda name='': name or socket.gethostname()\n"
    )
    began = time.monotonic()
    done = launch(write_config("host"), nproc=2, PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, None),
        ({"MASTER_ADDR": "host"}, None),  # many a shell has this one
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4: a launcher sets all of"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "a launcher sets all of"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK below"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK below"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT=x"),
        ({"RANK": "", "WORLD_SIZE": ""}, "RANK=, WORLD_SIZE=: a launcher sets all of"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "65535"}, None),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "65536"},
            "MASTER_PORT=65536",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "", "MASTER_PORT": "1"},
            "MASTER_ADDR=, MASTER_PORT=1: a launcher sets all of",
        ),
        ({"LOCAL_RANK": "0"}, None),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK=: a launcher sets"),
    ],
)
def test_a_rank_believes_complete_variables_alone(variables, problem, monkeypatch):
    monkeypatch.setattr(os, "environ", variables)
    if problem is None:
        check_launcher()
        return
    with pytest.raises(ConfigError, match=problem):
        check_launcher()


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "2"}, {"PET_NNODES": "1:4"}])
def test_run_train_sh_is_no_part_of_another_launch_but_of_a_slurm_job(variables, monkeypatch):
    monkeypatch.setattr(os, "environ", {"NPROC": "1", "PATH": os.environ["PATH"], **variables})
    with pytest.raises(ConfigError, match=r"another launcher .* env -u .* ./run_train.sh"):
        Ranks.from_environment()
    os.environ["SLURM_JOB_ID"] = "7"  # which says itself how many nodes there are
    assert Ranks.from_environment().total == 1


def test_a_launch_minds_neither_variables_nor_files_around_it(write_config, tmp_path):
    """Of a notebook that has set all variables for its one process; called as our modules and Python's."""
    variables = {
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "10.255.255.1",
        "MASTER_PORT": "29500",
        "PET_NPROC_PER_NODE": "7",
        "PET_MASTER_ADDR": "10.255.255.1",
        "TORCHELASTIC_RUN_ID": "other",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    }
    folder = tmp_path / "caller"
    for name in ("config.py", "data.py", "random.py", "launch/__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"raise SystemExit('the caller has a file {name}')")
    done = launch(write_config(), nproc=2, cwd=folder, **variables)
    assert done.returncode == 0 and "finished" in done.stdout, done.stdout + done.stderr


def test_torchrun_variables_are_known_by_name(monkeypatch):
    others = ["RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT", "PET_NNODES"]
    others += ["TORCHELASTIC_RUN_ID", "ROLE_NAME"]
    ours = ["NPROC", "MAX_RESTARTS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "RANKS", "MY_RANK", "PETS"]
    monkeypatch.setattr(os, "environ", dict.fromkeys([*others, *ours], "1"))
    assert variables_of_a_launcher() == others


def only(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """The environment of a launch: these variables, and the PATH."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **variables})


@pytest.mark.parametrize(
    ("gpus", "variables", "expected"),
    [
        (0, {}, (1, 1)),
        (3, {}, (1, 3)),
        (3, {"NPROC": ""}, (1, 3)),
        (3, {"NPROC": "2"}, (1, 2)),
        (3, {"SLURM_GPUS_ON_NODE": "5"}, (1, 5)),
        (3, {"SLURM_GPUS_ON_NODE": "gpu:h100:4"}, (1, 4)),
        (3, {"SLURM_GPUS_ON_NODE": "0"}, (1, 1)),
        (3, {"SLURM_GPUS_ON_NODE": "5", "NPROC": "2"}, (1, 2)),
        (3, {"SLURM_JOB_ID": "7", "SLURM_NNODES": "5"}, (5, 3)),
        (3, {"WORLD_SIZE": "1", "PET_NNODES": "1:1"}, (1, 3)),  # of a launcher of one process
        (3, {"WORLD_SIZE": "", "PET_NNODES": "1"}, (1, 3)),
    ],
)
def test_a_process_is_started_for_each_gpu_unless_a_number_is_given(
    monkeypatch, gpus, variables, expected
):
    monkeypatch.setattr("launch.command.visible_gpus", lambda: gpus)
    only(monkeypatch, **variables)
    ranks = Ranks.from_environment()
    assert (ranks.nodes, ranks.local) == expected
    assert ranks.total == expected[0] * expected[1]


def test_the_command_of_several_ranks_has_their_number_and_leaves_term_to_a_jobs_ranks(monkeypatch):
    for job, restarts in ((None, 0), ("7", 3)):
        words = Ranks(1, 5, restarts, job).command()
        assert "--nproc-per-node=5" in words and f"--max-restarts={restarts}" in words
        (signals,) = [word for word in words if word.startswith("--signals-to-handle=")]
        assert {"SIGINT", "SIGHUP", "SIGUSR1"} <= {*signals.partition("=")[2].split(",")}
        assert ("SIGTERM" in signals) == (job is None)
        assert ('trap "" TERM; exec "$@"' in words) == (job is not None)
        assert words[-1] == str(REPO / "train.py") and "--log-dir=/dev/null" in words


@pytest.mark.quick
def test_a_job_of_several_nodes_starts_torchrun_on_each(monkeypatch):
    only(monkeypatch, SLURM_JOB_NODELIST="gpu[007-009]", SLURM_RESTART_COUNT="2")
    monkeypatch.setattr("launch.slurm.shutil.which", lambda name: name)
    words = Ranks(3, 5, 1, "7").command()
    srun = words[: words.index("bash")]
    assert srun[0] == "srun" and {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1"} < {*srun}
    torchrun = words[words.index("bash") :]
    assert {"--nnodes=3", "--nproc-per-node=5", "--rdzv-id=7-2"} < {*torchrun}
    (endpoint,) = [word for word in torchrun if word.startswith("--rdzv-endpoint=")]
    assert endpoint.startswith("--rdzv-endpoint=gpu007:")
    assert "--standalone" not in torchrun and torchrun[-1] == str(REPO / "train.py")


def test_each_rank_has_a_share_of_the_cores_and_at_least_one(monkeypatch):
    for cores, local, threads in ((96, 8, 12), (7, 3, 2), (7, 8, 1), (8, 8, 1)):
        only(monkeypatch, SLURM_CPUS_ON_NODE=str(cores))
        assert Ranks(2, local, 0, "7").environment()["OMP_NUM_THREADS"] == str(threads)
        only(monkeypatch)
        monkeypatch.setattr("launch.command.usable_cores", lambda cores=cores: cores)
        assert Ranks(2, local, 0, None).environment()["OMP_NUM_THREADS"] == str(threads)


def test_ranks_get_what_restarts_and_srun_need(monkeypatch):
    only(monkeypatch)
    environment = Ranks(1, 2, 0, None).environment()
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "SRUN_CPUS_PER_TASK" not in environment
    only(monkeypatch, SLURM_CPUS_PER_TASK="12")
    assert Ranks(1, 2, 0, "7").environment()["SRUN_CPUS_PER_TASK"] == "12"


def test_ranks_load_the_commits_that_the_launcher_resolved():
    commit = "0123456789abcdef0123456789abcdef01234567"
    cfg = make_config(data={"tokenizer": f"some/tokenizer@{commit}"})
    assert commits(cfg) == [f"--data.tokenizer=some/tokenizer@{commit}"]
    model = dataclasses.replace(cfg.model, init_from=f"some/base@{commit}")
    data = dataclasses.replace(cfg.data, tokenizer=f"a/folder@{commit[:-1]}")  # or a tag
    assert commits(dataclasses.replace(cfg, model=model, data=data)) == [
        f"--model.init_from=some/base@{commit}"
    ]
    assert commits(make_config()) == []


@pytest.mark.parametrize(
    ("is_prepared", "init_from", "expected"),
    [
        (True, None, ["numpy"]),
        (True, "a/base", ["numpy", "safetensors"]),
        (False, None, ["numpy", "sentencepiece", "tokenizers", "datasets"]),
    ],
)
def test_a_run_needs_the_packages_of_what_it_does(monkeypatch, is_prepared, init_from, expected):
    cfg = make_config()
    model = dataclasses.replace(cfg.model, init_from=init_from)
    cfg = dataclasses.replace(cfg, model=model)
    monkeypatch.setattr("launch.command.config.load", lambda *_: cfg)
    monkeypatch.setattr("data.folder.is_prepared", lambda _: is_prepared)
    assert needed_packages(["x.toml"]) == expected
    assert needed_packages(["x.toml", "--dry-run"]) == []


@pytest.mark.quick
def test_the_ranks_get_what_was_typed_what_was_found_and_no_variables_of_another_launcher(
    write_config, monkeypatch, tmp_path
):
    path = str(write_config("r", checkpoint={"resume": 3}))
    commit = "0123456789abcdef0123456789abcdef01234567"
    started = {}

    def complete(args: object, cfg: config.Config) -> tuple[config.Config, list[str]]:
        data = dataclasses.replace(cfg.data, tokenizer=f"a/b@{commit}")
        return dataclasses.replace(cfg, data=data), ["--data.format=text"]

    def run_ranks(command: list[str], folder: pathlib.Path, launch_id: str, _: object) -> int:
        started.update(command=command, folder=folder, id=launch_id, environment={**os.environ})
        return 7

    def exit_code(folder: pathlib.Path, launch_id: str, ranks: int, returned: int) -> int:
        started["ended"] = (folder, launch_id, ranks, returned)
        return 9

    def check_launch(cfg: config.Config, *_: object) -> bool:
        started["resume"] = cfg.checkpoint.resume
        return True

    monkeypatch.setattr("launch.launch.formats.complete", complete)
    monkeypatch.setattr("launch.launch.check_launch", check_launch)
    monkeypatch.setattr("launch.launch.run_ranks", run_ranks)
    monkeypatch.setattr("launch.launch.exit_code", exit_code)
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_CPUS_ON_NODE": "6"}
    only(monkeypatch, NPROC="3", MASTER_ADDR="other", RANK="1", TORCHELASTIC_RUN_ID="o", **job)
    argv = [path, "--run.seed=5"]
    (tmp_path / "outputs/r").mkdir(parents=True)
    write_status(tmp_path / "outputs/r", "preempted", 5, "7.1.before")  # which went back to step 3
    assert launcher.launch(argv, launcher.Interruption()) == 9
    assert started["resume"] == "auto"
    launch_id = started["id"]
    assert re.fullmatch(r"7\.2\.[0-9a-f]{32}", launch_id)
    assert started["command"][-6:] == [
        str(REPO / "train.py"),
        *argv,
        f"--launch={launch_id}",
        "--data.format=text",
        f"--data.tokenizer=a/b@{commit}",
    ]
    assert started["folder"] == tmp_path / "outputs/r"
    assert started["ended"] == (tmp_path / "outputs/r", launch_id, 3, 7)
    environment = started["environment"]
    assert environment["OMP_NUM_THREADS"] == "2" and environment["SLURM_JOB_ID"] == "7"
    assert not environment.keys() & {"MASTER_ADDR", "RANK", "TORCHELASTIC_RUN_ID"}


@pytest.mark.parametrize(
    ("before", "options", "trained", "attempts"),
    [
        ({"step": 4}, {}, {"launch": "x", "step": 4}, 1),
        ({"step": 4}, {}, {"launch": "x", "step": 5}, 0),
        ({"step": 4}, {}, {"launch": "another", "step": 5}, 1),
        ({}, {}, {"launch": "x", "step": 1}, 0),
        ({"step": 4, "attempts_without_step": 2}, {}, {"launch": "x", "step": 4}, 3),
        ({"step": 4, "attempts_without_step": 2}, {}, {"launch": "x", "step": 5}, 0),
        ({"step": 9}, {"resume": 2}, {"launch": "x", "step": 3}, 0),  # it went back
        ({"step": 9}, {"resume": 2}, {"launch": "x", "step": 2}, 1),
    ],
)
def test_attempts_of_a_job_without_a_step_are_counted(before, options, trained, attempts):
    cfg = make_config(checkpoint=options)
    assert attempts_without_step(cfg, "x", before, trained) == attempts


@pytest.mark.parametrize(
    ("rank", "told"),
    [
        ("0", "waiting for the other ranks to connect at a:77: this is rank 0 of 4"),
        ("3", "waiting for rank 0 to listen at a:77: this is rank 3 of 4"),
    ],
)
def test_a_rank_that_waits_long_says_who_it_is_and_where_it_waits(monkeypatch, rank, told):
    """Longer than any of a run's own timeouts."""
    waits = []

    class Waiting(Exception):
        pass

    def rendezvous(url: str, timeout: datetime.timedelta) -> None:
        waits.append(timeout.total_seconds())
        raise Waiting

    def printed(text: str) -> contextlib.AbstractContextManager:
        waits.append(text)
        return contextlib.nullcontext()

    only(monkeypatch, RANK=rank, WORLD_SIZE="4", MASTER_ADDR="a", MASTER_PORT="77")
    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    monkeypatch.setattr(process_group, "printed_if_long", printed)
    monkeypatch.setattr(process_group, "raise_file_limit", lambda: None)
    cfg = make_config(run={"save_timeout_seconds": 7e4})
    with pytest.raises(Waiting):
        process_group.connect(cfg)
    assert waits[0] == told and waits[1] > 7e4


def test_a_job_says_where_to_prepare_its_data(monkeypatch, tmp_path, prepared):
    """Unless that is growing, or there: its GPUs would wait."""
    source = {"source": str(tmp_path / "it is.txt"), "path": str(tmp_path / "none")}
    args = config.parse_arguments(["x y.toml", "--run.seed=3", "--run.output_dir=a b"])
    told = (
        "x y.toml: its data is not prepared, and none is inside a job; run ./run_train.sh -m data.prepare "
        "'x y.toml' --run.seed=3 '--run.output_dir=a b' on the login node"
    )
    with pytest.raises(ConfigError) as refused:
        checks.check_prepared(make_config(data=source), args)
    assert str(refused.value) == told
    checks.check_prepared(make_config(data={**source, "order": "growing"}), args)
    checks.check_prepared(make_config(data={**source, "path": str(prepared)}), args)
    ranks = SimpleNamespace(job=None, total=1, local=1)
    for job in (None, "7"):
        ranks.job = job
        with (
            mock.patch.multiple(
                checks,
                check_machine=mock.DEFAULT,
                check_folder=mock.DEFAULT,
                prepare_training=mock.DEFAULT,
            ),
            contextlib.ExitStack() as stack,
        ):
            if job:
                stack.enter_context(pytest.raises(ConfigError, match="none is inside a job"))
            cfg = make_config(data=source, run={"output_dir": str(tmp_path), "name": "r"})
            assert checks.check_launch(cfg, ranks, args)


@pytest.mark.parametrize(("lengths", "refused"), [([1, 0], True), ([1, 2], False)])
def test_validation_text_is_an_input_and_a_target_at_least(lengths, refused):
    streams = [
        SimpleNamespace(length=length, path=pathlib.Path(f"p{number}/heldout.bin"))
        for number, length in enumerate(lengths)
    ]
    dataset = SimpleNamespace(has_validation=lambda: True, validation=streams)
    checks.check_validation(make_config(), dataset)  # no [eval]
    if not refused:
        checks.check_validation(make_config(eval={}), dataset)
        return
    named = ", ".join(f"p{number}" for number in range(len(lengths)))
    with pytest.raises(ConfigError, match=f"^{named}: holds no validation text; delete"):
        checks.check_validation(make_config(eval={}), dataset)
    dataset.has_validation = lambda: False  # it grows: not known yet
    checks.check_validation(make_config(eval={}), dataset)


@pytest.mark.parametrize("section", ["model.freeze", "parallel.replicated"])
def test_a_pattern_that_matches_nothing_is_refused_before_the_launch(section):
    table, key = section.split(".")
    with pytest.raises(ConfigError, match="nothing.like.it"):
        checks.check_patterns(make_config(**{table: {key: ["nothing.like.it*"]}}))


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[007-009,012],cpu1", "gpu007"),
        ("gpu[3,5]", "gpu3"),
        ("rack[0-3]-node[01-16]", "rack0-node01"),
        ("a[1-2].site.org", "a1.site.org"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "gpu[", "[]"])
def test_a_list_of_slurms_that_names_no_host_is_refused(nodes):
    with pytest.raises(ConfigError, match="must name the job's nodes"):
        first_host(nodes)


def test_a_job_of_several_nodes_without_srun_is_refused(monkeypatch):
    monkeypatch.setattr("launch.slurm.shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="needs srun, which is not installed here"):
        Ranks(nodes=2, local=1, restarts=0, job="7").command()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EACCES, 2),
        (errno.ENOTDIR, 2),
        (errno.EROFS, 2),
        (errno.ENOENT, 2),
        (errno.EISDIR, 2),
        (errno.EEXIST, 2),
        (errno.EPERM, 2),
        (errno.ELOOP, 2),
        (errno.ENAMETOOLONG, 2),
        (errno.ENOSPC, 1),
        (errno.EDQUOT, 1),
        (errno.EIO, 1),
        (errno.ESTALE, 1),
        (errno.EMFILE, 1),
        (errno.ENOMEM, 1),
    ],
)
def test_trouble_of_the_machine_before_the_ranks_is_no_invalid_input(
    write_config, tmp_path, monkeypatch, capsys, number, code
):
    def fail(*_: object) -> bool:
        raise OSError(number, os.strerror(number), "/data/x")

    monkeypatch.setattr("launch.launch.check_launch", fail)
    assert launcher.launch([str(write_config("trouble"))], launcher.Interruption()) == code
    assert capsys.readouterr().err == f"/data/x: {os.strerror(number)}\n"
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(("node", "address"), [("gpu007", "gpu007"), (None, "")])
def test_torchrun_announces_a_node_by_its_name_in_slurm(monkeypatch, node, address):
    """Not by its own name as it resolves there, perhaps to localhost. Without SLURM's name torchrun looks it up."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[007-008]")
    monkeypatch.setattr("launch.slurm.shutil.which", lambda name: name)
    torchrun = (
        "from torch.distributed.run import get_args_parser as p; print(p().parse_args().local_addr)"
    )
    command = on_nodes([sys.executable, "-c", torchrun], 2, "7", ["7", "0"])
    environment = {name: value for name, value in os.environ.items() if name != "SLURMD_NODENAME"}
    if node:
        environment["SLURMD_NODENAME"] = node
    on_a_node = [*command[command.index("bash") :], "train.py"]
    assert subprocess.check_output(on_a_node, env=environment, text=True) == f"{address}\n"


def test_a_long_wait_says_for_whom_and_a_short_one_nothing(monkeypatch, capfd):
    monkeypatch.setattr("parallel.ranks.NOTICE_SECONDS", 0.1)
    with printed_if_long("waiting for rank 3"):
        time.sleep(0.4)
    with printed_if_long("waiting for rank 4"):
        pass
    time.sleep(0.2)
    assert capfd.readouterr().err == "waiting for rank 3\n"


def test_torchrun_says_that_it_waits_for_other_nodes(monkeypatch, capfd):
    monkeypatch.setattr("parallel.ranks.NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(DynamicRendezvousHandler, "next_rendezvous", lambda self: time.sleep(0.4))
    report_wait_for_nodes()
    handler = DynamicRendezvousHandler.__new__(DynamicRendezvousHandler)
    handler._settings = SimpleNamespace(min_nodes=2)
    handler.next_rendezvous()
    assert re.search(
        "^waiting for torchrun on the other nodes: .*, one of 2$", capfd.readouterr().err
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("size", "told"),
    [(4, "2 (1 in all)"), (5, "2, 4 (2 in all)"), (13, "2, 4, 5, 6, 7, 8, 9, 10 (10 in all)")],
)
def test_rank_zero_names_the_ranks_that_are_missing(monkeypatch, capfd, size, told):
    monkeypatch.setattr("lifecycle.process_group.NOTICE_SECONDS", 0.1)
    store = dist.HashStore()
    for rank in (1, 3):
        store.set(f"device of rank {rank}", "{}")
    store.set_timeout(datetime.timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError):
        all_gather_reports(store, 0, size, {})
    assert f"waiting for the device of rank {told}\n" in capfd.readouterr().err


def test_time_in_which_a_process_was_stopped_is_no_lack_of_progress():
    told = []
    now = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: time.sleep(0.01))
    with (
        mock.patch("lifecycle.watchdog.time", clock),
        mock.patch("faulthandler.dump_traceback_later"),
    ):
        watch = Watchdog(told.append)
        watch.phase("step", 30)
        time.sleep(0.1)
        now[0] += 300  # SIGSTOP, SIGCONT
        time.sleep(0.1)
        assert not told and watch.fires > now[0]
        for _ in range(35):  # seconds that it runs in
            now[0] += 1
            time.sleep(0.02)
        watch.stop()
    # since the phase began, which the watchdog's thread looks at now and then
    assert 331 <= int(re.search(r"no progress for (\d+) s: ", told[0])[1]) <= 335


def test_text_is_encoded_without_semaphores_too(monkeypatch, capfd):
    """As where /dev/shm is read-only."""

    def refuse(self: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("multiprocessing.context.BaseContext.Lock", refuse)
    chunk = SimpleNamespace(documents=["a"], encode=lambda documents: len(documents))
    assert list(encode_in_order(iter([chunk]), 2)) == [(chunk, 1)]
    assert "only one process tokenizes" in capfd.readouterr().err


def test_a_run_continues_without_a_tensorboard_that_cannot_be_written(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("metrics.log.propagate", True)
    (tmp_path / "file").touch()
    board = Board(tmp_path / "file" / "tensorboard", 0)
    board.write({"kind": "train", "step": 1, "loss": 1.0})
    board.close()
    assert "training continues without it" in caplog.text


@pytest.mark.parametrize(
    ("setting", "seen"), [("PIP_USER=1", "0"), ("PIP_TARGET=/elsewhere", ""), ("PIP_PREFIX=/x", "")]
)
def test_settings_of_pip_do_not_send_packages_elsewhere(setting, seen, tmp_path):
    name, value = setting.split("=")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "<${{{name}:-}}>"\n')
    python.chmod(0o755)
    environment = {**os.environ, name: value, "PYTHON": str(python)}
    done = subprocess.run(
        [REPO / "run_train.sh", "-m", "report"], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == f"<{seen}>"


def test_a_python_without_torch_is_refused(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -IS "$@"\n')  # no site-packages
    python.chmod(0o755)
    done = launch("--setup", PYTHON=str(python))
    assert done.returncode == 2 and done.stdout == ""
    assert "lacks torch, numpy, filelock, tomli; without PYTHON=" in done.stderr


def test_a_python_that_lacks_one_package_is_told_which(tmp_path):
    python = tmp_path / "python"
    # its packages, without filelock
    program = "import sys; sys.modules['filelock'] = None; exec(sys.argv.pop(1))"
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c "{program}" "$@" 2>&1\n')
    python.chmod(0o755)
    done = launch("--setup", PYTHON=str(python))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("python: lacks filelock; without PYTHON=, .venv is made\n")


def test_another_shell_hands_over_to_bash(tmp_path):
    done = subprocess.run(
        ["sh", REPO / "run_train.sh", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 0 and "sbatch" in done.stdout, done.stderr


def test_a_reader_of_the_help_may_leave():
    command = "set -o pipefail; ./run_train.sh --help | head -n 1"
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", "-c", command], cwd=REPO, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


SUSPEND = """
import os, signal, sys
from launch.launch import suspend_launcher
signal.signal(signal.SIGTSTP, suspend_launcher)
os.kill(os.getpid(), signal.SIGTSTP)
assert signal.getsignal(signal.SIGTSTP) is suspend_launcher
"""


def test_ctrl_z_stops_no_launcher_that_no_shell_could_resume():
    """As of ssh -t HOST COMMAND, or docker exec -it."""
    done = subprocess.run(
        [sys.executable, "-c", SUSPEND],
        cwd=REPO,
        capture_output=True,
        start_new_session=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_ctrl_z_suspends_the_launcher_and_says_that_training_continues(write_config):
    path = write_config("long", train={"steps": 100_000}, checkpoint={"save_every_steps": 100_000})
    folder = config.run_folder(config.load(str(path)))
    run = subprocess.Popen(
        [REPO / "run_train.sh", path],
        env={**os.environ, "PYTHON": sys.executable, "NPROC": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=os.setpgrp,  # as a shell does
    )
    try:
        wait_until(lambda: steps_of(folder) > 1)
        run.send_signal(signal.SIGTSTP)
        _, status = os.waitpid(run.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        steps = steps_of(folder)
        wait_until(lambda: steps_of(folder) > steps + 5)
        run.send_signal(signal.SIGCONT)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 75, errors
    assert "only the launcher is suspended, training continues" in errors


def steps_of(folder: pathlib.Path) -> int:
    """How many steps the run has trained so far."""
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_argument_in_another_encoding_is_named(write_config):
    with pytest.raises(ConfigError, match=r"not characters in this shell's .* PYTHONUTF8=1"):
        config.load(str(write_config()), ["--run.output_dir=\udcc3\udca9"])
    with pytest.raises(ConfigError) as raised:  # Latin-1 is no UTF-8 either
        config.load(str(write_config()), ["--run.output_dir=\udce9"])
    assert str(raised.value).endswith("not characters in this shell's encoding")


@pytest.mark.parametrize("refused", [False, True])
def test_more_open_files_are_allowed_where_the_system_allows_them(monkeypatch, refused):
    """macOS has no hard limit, and refuses a soft one above 10,240."""
    infinity = process_group.resource.RLIM_INFINITY
    asked = []

    def set_limit(which: int, limits: tuple[int, int]) -> None:
        asked.append(limits)
        if refused:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(process_group.resource, "getrlimit", lambda which: (256, infinity))
    monkeypatch.setattr(process_group.resource, "setrlimit", set_limit)
    raise_file_limit()
    monkeypatch.setattr(process_group.resource, "getrlimit", lambda which: (1024, 4096))
    raise_file_limit()
    monkeypatch.setattr(process_group.resource, "getrlimit", lambda which: (20_000, infinity))
    raise_file_limit()
    monkeypatch.setattr(process_group.resource, "getrlimit", lambda which: (infinity, infinity))
    raise_file_limit()
    assert asked == [(10_240, infinity), (4096, 4096), (20_000, infinity)]


def test_the_peak_of_memory_is_in_gib_on_macos_too(monkeypatch):
    usage = SimpleNamespace(ru_maxrss=3 * 2**20)  # KiB
    monkeypatch.setattr("metrics.resource.getrusage", lambda who: usage)
    assert peak_memory_gib(torch.device("cpu")) == 3
    monkeypatch.setattr("metrics.sys.platform", "darwin")
    usage.ru_maxrss *= 1024  # bytes
    assert peak_memory_gib(torch.device("cpu")) == 3


def test_cores_are_counted_where_there_is_no_affinity(monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    monkeypatch.setattr("data.cores.control_groups", lambda *_: [])
    assert usable_cores() == 5
