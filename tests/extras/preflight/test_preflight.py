"""Each fault planted, and the line that it gets. Faults that would need root, or a GPU, are injected where the machine
is asked."""

import errno
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import sys
import types

import pytest

import config
from config import ConfigError
from extras.preflight import disks, libraries, limits, network
from extras.preflight.finding import Finding
from extras.preflight.sizes import GIB, gib, sizes
from extras.preflight.survey import survey
from run.command import Ranks
from system import machine as cores
from system import processes
from tests.conftest import REPO, launch, make_config

pytestmark = pytest.mark.quick

ONE = Ranks(1, 1, 0, "")
NODE = Ranks(1, 8, 0, "")
JOB = Ranks(2, 8, 3, "4242")
LARGE = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336}


def on_gpus(**sections):
    return make_config(run={"device": "cuda"}, **sections)


def one(findings, is_error: bool) -> str:
    (finding,) = findings
    assert isinstance(finding, Finding) and finding.is_error is is_error
    return finding.text


def test_nothing_is_printed_where_nothing_is_lacking(capsys):
    survey(make_config(), ONE)
    assert capsys.readouterr() == ("", "")


def test_all_errors_are_raised_at_once_after_the_warnings(monkeypatch, capsys):
    told = [Finding("first", True), Finding("mind this", False), Finding("second", True)]
    monkeypatch.setattr("extras.preflight.survey.CHECKS", (lambda *_: iter(told),))
    monkeypatch.setattr("extras.preflight.survey.OF_TRAINING", (lambda *_: iter(told),))
    with pytest.raises(ConfigError) as refused:
        survey(make_config(), ONE)
    assert refused.value.problems == ("first", "second") * 2
    assert capsys.readouterr().err == "warning: mind this\n" * 2


# limits


def test_open_files_are_counted_against_the_hard_limit(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 1024))
    assert not list(limits.open_files(make_config(), Ranks(31, 8, 0, "1")))
    text = one(limits.open_files(make_config(), Ranks(32, 8, 0, "1")), True)
    assert "RLIMIT_NOFILE = 1024: rank 0 of 256 opens 1054 files" in text
    assert "ulimit -Hn 4096" in text
    for limit, is_enough in ((1021, False), (1022, True), (resource.RLIM_INFINITY, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda what, limit=limit: (64, limit))
        findings = list(limits.open_files(make_config(), Ranks(31, 8, 0, "1")))
        assert (not findings) is is_enough, limit
        # the least power of two that is twice what is needed
        assert is_enough or "ulimit -Hn 2048," in findings[0].text


def test_locked_memory_matters_for_infiniband_between_nodes(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (65536, 65536))
    monkeypatch.setattr(limits, "ADAPTERS", tmp_path)
    assert not list(limits.locked_memory(on_gpus(), JOB))
    (tmp_path / "mlx5_0").mkdir()
    assert "RLIMIT_MEMLOCK = 64 KiB" in one(limits.locked_memory(on_gpus(), JOB), False)
    assert not list(limits.locked_memory(on_gpus(), NODE))
    assert not list(limits.locked_memory(make_config(run={"device": "cpu"}), JOB))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    assert not list(limits.locked_memory(on_gpus(), JOB))


def disk(size: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(f_blocks=size, f_frsize=1, f_flag=0)


def test_shared_memory_of_a_container_is_small(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: disk(64 * 2**20))
    text = one(limits.shared_memory(on_gpus(), NODE), False)
    assert text.startswith("/dev/shm holds 64 MiB") and "--ipc=host" in text
    assert not list(limits.shared_memory(on_gpus(), ONE))
    assert not list(limits.shared_memory(make_config(run={"device": "cpu"}), NODE))
    monkeypatch.setattr(os, "statvfs", lambda path: disk(2**30))
    assert not list(limits.shared_memory(on_gpus(), NODE))
    monkeypatch.setattr(os, "statvfs", lambda path: disk(2**30 - 1))
    assert "/dev/shm holds 1023 MiB" in one(limits.shared_memory(on_gpus(), NODE), False)
    monkeypatch.setattr(os, "statvfs", full)  # as where there is none
    assert "/dev/shm holds 0 MiB" in one(limits.shared_memory(on_gpus(), NODE), False)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of 64 GiB without swap, and its control groups, a file by its path and text."""
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    memory = tmp_path / "meminfo"
    memory.write_text(f"MemTotal: {64 * 2**20} kB\nSwapTotal: 0 kB\n")
    monkeypatch.setattr(limits, "MEMORY_OF_MACHINE", memory)
    monkeypatch.setattr(cores, "MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "GROUPS", tmp_path / "groups")

    def write(membership: str, **texts: str) -> None:
        (tmp_path / "cgroup").write_text(membership)
        for name, text in texts.items():
            file = tmp_path / "groups" / name.replace("__", "/").replace("_max", ".max")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


def memory_limit() -> tuple[float, str]:
    size, source = limits.memory_limit(os.environ)
    return size / GIB, source


def test_the_least_of_nested_control_groups_counts(machine):
    assert memory_limit() == (64, "this machine")
    machine("0::/job/step\n", job__memory_max=f"{8 * GIB}", job__step__memory_max="max")
    size, source = memory_limit()
    assert size == 8 and source.endswith("/groups/job")
    machine("0::/job/step\n", job__step__memory_max=f"{2 * GIB}", memory_max=f"{1 * GIB}")
    size, source = memory_limit()
    assert size == 1 and source.endswith("/groups")  # as a container sees its own


def test_control_groups_of_version_1(machine, tmp_path):
    machine("4:cpu,cpuacct:/a\n3:memory:/docker/a\n")
    folder = tmp_path / "groups/memory/docker/a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{3 * GIB}")
    (folder.parent / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert memory_limit()[0] == 3
    (folder / "memory.memsw.limit_in_bytes").write_text(f"{5 * GIB}")
    assert memory_limit()[0] == 5


def test_swap_counts_as_far_as_it_may_be_used(machine, tmp_path):
    """By the machine's; in a control group of version 2 by its own limit, in one of version 1 by the sum of both."""
    memory = tmp_path / "meminfo"
    memory.write_text(f"MemTotal: {64 * 2**20} kB\nSwapTotal: {5 * 2**20} kB\n")
    assert memory_limit() == (69, "this machine")
    machine("0::/job\n", job__memory_max=f"{8 * GIB}")
    assert memory_limit()[0] == 8 + 5
    folder = tmp_path / "groups/job"
    (folder / "memory.swap.max").write_text(f"{3 * GIB}")
    assert memory_limit()[0] == 8 + 3
    (folder / "memory.swap.max").write_text("0")
    assert memory_limit()[0] == 8
    machine("3:memory:/docker\n")
    folder = tmp_path / "groups/memory/docker"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{3 * GIB}")
    assert memory_limit()[0] == 3 + 5
    (folder / "memory.memsw.limit_in_bytes").write_text(f"{4 * GIB}")
    assert memory_limit()[0] == 4


def test_a_job_s_memory_is_slurm_s(machine, monkeypatch):
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "2048")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "16")
    assert memory_limit() == (32, "SLURM_MEM_PER_CPU = 2048, SLURM_CPUS_ON_NODE = 16")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")  # all
    assert memory_limit()[0] == 32
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "16384")
    assert memory_limit() == (16, "SLURM_MEM_PER_NODE = 16384")


def test_memory_that_states_and_copies_need(machine):
    """8.03e9 parameters: 16 bytes each in training, 12 in a checkpoint."""
    sections = {"model": {**LARGE, "vocab_size": 128256}}
    text = one(limits.host_memory(on_gpus(**sections, parallel={"cpu_offload": True}), NODE), True)
    assert text.startswith("this machine: 64 GiB of memory") and "need 122 GiB or more" in text
    saving = {"checkpoint": {"async_save": True}}
    assert "need 92 GiB" in one(limits.host_memory(on_gpus(**sections, **saving), NODE), True)
    half = Ranks(2, 8, 0, "1")
    assert not list(limits.host_memory(on_gpus(**sections, **saving), half))  # 45 + 2 a node
    assert not list(limits.host_memory(on_gpus(**sections), NODE))
    for size, is_enough in ((GIB, False), (2 * GIB - 1, False), (2 * GIB, True)):  # 1/4 a rank
        machine("0::/job\n", job__memory_max=f"{size}")
        findings = list(limits.host_memory(on_gpus(), NODE))
        assert (not findings) is is_enough
        assert is_enough or "the ranks of a node need 2.0 GiB" in one(findings, True)
    machine("0::/job\n", job__memory_max=f"{8 * GIB}")
    on_cpu = make_config(**sections, run={"device": "cpu"})
    text = one(limits.host_memory(on_cpu, Ranks(4, 8, 0, "1")), True)
    assert "with parameters, gradients and optimizer state, need 32 GiB" in text  # 120 / 4 + 2


# disks


def test_a_cache_on_a_disk_without_execution_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    cfg = make_config(parallel={"compile": True})
    assert not list(disks.kernel_cache(cfg, ONE))
    real = os.statvfs

    def noexec(path: pathlib.Path) -> types.SimpleNamespace:
        flags = real(path).f_flag
        return types.SimpleNamespace(f_flag=flags | os.ST_NOEXEC * (path == tmp_path))

    monkeypatch.setattr(os, "statvfs", noexec)
    text = one(disks.kernel_cache(cfg, ONE), True)
    assert f"{tmp_path}/cache is on a disk that is mounted noexec; TORCHINDUCTOR_CACHE_DIR=" in text
    assert not list(disks.kernel_cache(make_config(), ONE))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: path != pathlib.Path("/proc"))
    not_writable, without_execution = disks.kernel_cache(cfg, ONE)
    assert "/proc/cache cannot be written to; TORCHINDUCTOR_CACHE_DIR" in not_writable.text
    assert "TRITON_CACHE_DIR=FOLDER" in without_execution.text


def usage(free: float, total: int = 2**60) -> types.SimpleNamespace:
    return types.SimpleNamespace(free=int(free), total=total)


@pytest.mark.parametrize(
    "free, there, keep_last, told",
    [
        (1.5, 0, 3, False),
        (4.2, 0, 3, None),
        (2.2, 2, 3, None),  # of four
        (0.5, 0, None, True),
        (9.0, 0, None, False),  # of ten
        (0.5, 1, 3, False),  # a resumed run removes older ones
        (1.2, 3, 3, None),
        (1.0, 4, 3, None),  # one more, whatever is there
        (0.99, 4, 3, False),
        (4.0, 0, 3, None),
        (3.99, 0, 3, False),
        (10.0, 0, None, None),
        (1.0, 0, 3, False),  # it holds one
        (0.99, 0, 3, True),
    ],
)
def test_room_for_the_checkpoints_that_are_kept(
    monkeypatch, tmp_path, free, there, keep_last, told
):
    cfg = make_config(
        model={**LARGE, "vocab_size": 128256},
        run={"output_dir": str(tmp_path), "name": "run"},
        train={"steps": 1000},
        checkpoint={"save_every_steps": 100, "keep_last": keep_last},
    )
    for step in range(there):
        (tmp_path / f"run/checkpoints/step-{step:08d}").mkdir(parents=True)
    one_checkpoint = 8_030_261_248 * 12
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(free * one_checkpoint))
    findings = list(disks.checkpoints(cfg, ONE))
    if told is None:
        assert not findings
    else:
        text = one(findings, told)
        assert f"keep_last = {keep_last or 'all'}: {10 if keep_last is None else 4} check" in text
        assert "of 89 GiB" in text or "of 90 GiB" in text


@pytest.mark.parametrize(
    "steps, every, keep_last, milestones, most",
    [
        (1000, 100, 3, None, 4),
        (1000, 100, None, None, 10),
        (1001, 100, None, None, 11),  # the last step's, too
        (1000, None, None, None, 1),
        (1000, None, 3, None, 1),
        (1000, 100, 2, 300, 6),  # 300, 600, 900
        (1000, 100, 2, 500, 5),
        (300, 100, 3, None, 3),
    ],
)
def test_how_many_checkpoints_there_are_at_most(steps, every, keep_last, milestones, most):
    settings = {"save_every_steps": every, "keep_last": keep_last, "keep_every_steps": milestones}
    cfg = make_config(train={"steps": steps}, checkpoint=settings)
    assert disks.most_checkpoints(cfg) == most


def test_a_disk_without_a_size_is_not_full(monkeypatch, tmp_path):
    """As a file system in user space may be that does not say."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, total=0))
    cfg = make_config(run={"output_dir": str(tmp_path)}, checkpoint={})
    assert not list(disks.checkpoints(cfg, ONE))


def test_a_checkpoint_is_as_large_as_is_said(prepared, write_config, tmp_path):
    """A little smaller than that of a run."""
    path = write_config(checkpoint={})
    assert launch(path).returncode == 0
    cfg = config.load(str(path))
    (folder,) = (tmp_path / "outputs").glob("*/checkpoints/step-*")
    shards = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    size = sizes(cfg, 0).checkpoint
    assert size < shards < 1.2 * size  # headers


def test_a_small_model_needs_no_torch():
    code = f"""
import sys; sys.path.insert(0, {str(REPO)!r})
import config
from extras.preflight.sizes import sizes
cfg = config.load({str(REPO / "configs/tiny.toml")!r})
assert sizes(cfg, 2**33) == (0, 0) and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def unprepared(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    processes.warn_once.cache_clear()
    return make_config(
        data={"source": "python-stdlib", "path": None}, checkpoint={}, run={"output_dir": "out"}
    )


def full(*_: object, **__: object) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_quota_that_is_used_up(monkeypatch, unprepared, tmp_path):
    """Of the disk on which the folder lies or will lie; what writes nothing needs none."""
    asked = []

    def used_up(dir: pathlib.Path) -> None:
        asked.append(dir)
        full()

    monkeypatch.setattr(disks.tempfile, "TemporaryFile", used_up)
    (tmp_path / "out").mkdir()
    texts = [one([finding], True) for finding in disks.folders(unprepared, ONE)]
    named = ("[data] path = prepared", "[run] output_dir = out")
    cure = "name another folder"
    assert texts == [f"{name}: cannot be written to: Disk quota exceeded; {cure}" for name in named]
    assert asked == [tmp_path, tmp_path / "out"]
    monkeypatch.setattr(disks, "is_prepared", lambda *_: True)
    (finding,) = disks.folders(unprepared, ONE)
    assert "output_dir" in finding.text
    assert not list(disks.folders(make_config(checkpoint=None), ONE))


# libraries


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """torch next to NVIDIA's packages, as pip installs it."""
    module = types.ModuleType("torch")
    module.__file__ = str(tmp_path / "site/torch/__init__.py")
    monkeypatch.setitem(sys.modules, "torch", module)
    for folder, name in (("nccl", "nccl.so.2"), ("cudnn", "cudnn.so.9"), ("cu13", "cublas.so.13")):
        path = tmp_path / f"site/nvidia/{folder}/lib/lib{name}"
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(libraries, "LOADED", tmp_path / "maps")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path


def library_of_version(path: pathlib.Path, version: int) -> None:
    """A libnccl that says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = f"int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_another_nccl_than_torch_s_own_is_named(wheel, monkeypatch):
    own = wheel / "site/nvidia/nccl/lib/libnccl.so.2"
    module = wheel / "opt/nccl/libnccl.so.2.18.3"  # what its link libnccl.so.2 leads to
    library_of_version(own, 22907)
    library_of_version(module, 21803)
    monkeypatch.setenv("LD_PRELOAD", str(module))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    maps = wheel / "maps"
    maps.write_text(f"7f00-7f01 r-xp 0 08:01 12   {own}\n7f01-7f02 r-xp 0 00:00 0 [stack]\n")
    assert not list(libraries.replaced_libraries(on_gpus(), NODE))
    maps.write_text(f"7f00-7f01 r-xp 0 08:01 12   {module}\n" * 2)
    text = one(libraries.replaced_libraries(on_gpus(), NODE), False)
    assert f"{module} (2.18.3) is loaded in place of torch's own {own} (2.29.7)" in text
    assert f"LD_PRELOAD={module}" in text


def test_parts_of_another_cudnn_are_named(wheel, monkeypatch):
    module = wheel / "opt/cudnn/lib"
    module.mkdir(parents=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{wheel / 'site/nvidia/cudnn/lib'}::{module}")
    assert not list(libraries.parts_of_cudnn(on_gpus(), NODE))
    (module / "libcudnn_graph.so.9").touch()
    text = one(libraries.parts_of_cudnn(on_gpus(), NODE), False)
    assert text.startswith(f"LD_LIBRARY_PATH: {module}/libcudnn_graph.so.9 comes before")


# network


@pytest.mark.parametrize(
    "name, is_error, told",
    [
        ("localhost", True, "is each node's name for itself"),
        ("node-of.invalid", True, "has no address"),
        ("192.0.2.1", False, "has the address 192.0.2.1, which is not one of this machine"),
    ],
)
def test_a_first_node_that_the_others_would_not_reach(monkeypatch, name, is_error, told):
    monkeypatch.setenv("SLURM_JOB_NODELIST", f"{name},other")
    assert told in one(network.first_node(on_gpus(), JOB), is_error)
    assert not list(network.first_node(on_gpus(), NODE))


def test_a_port_that_is_taken(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node7,node8")
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 0, "", there)]
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        there = other.getsockname()
        text = one(network.first_node(on_gpus(), JOB), True)
    assert "the first node, node7, has no port 29742 for the others" in text
    assert "submit again" in text
    assert not list(network.first_node(on_gpus(), JOB))


def test_an_evaluation_needs_less_than_training(machine, monkeypatch, tmp_path):
    """Neither the memory of gradients and optimizer state, nor room on a disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(disks.tempfile, "TemporaryFile", full)
    cfg = make_config(model={**LARGE, "vocab_size": 128256}, run={"device": "cpu"}, checkpoint={})
    with pytest.raises(ConfigError) as refused:
        survey(cfg, ONE)
    lines = "\n".join(refused.value.problems)
    for problem in ("optimizer state", "[run] output_dir"):
        assert problem in lines
    survey(cfg, ONE, evaluates=True)


def test_sizes_in_words():
    assert [gib(n * GIB) for n in (0, 0.05, 3, 96.4, 1234)] == [
        "0 GiB",
        "0.050 GiB",
        "3.0 GiB",
        "96 GiB",
        "1,234 GiB",
    ]
