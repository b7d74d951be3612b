"""GPUs that this machine does not have: what a run would make of those that others have."""

import contextlib
import os
import pathlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from config import ConfigError
from launch import checks
from lifecycle import gpus
from lifecycle.device import pick_device, runs_on
from tests.conftest import make_config, needs_extra

pytestmark = pytest.mark.quick

BFLOAT16 = {"parallel": {"param_dtype": "bfloat16"}}
WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # torch 2.13.0+cu130


@contextlib.contextmanager
def gpus_of(capability: tuple[int, int], count: int = 1, shared_memory: int = 65_536):
    answers = {
        "is_available": True,
        "device_count": count,
        "get_device_capability": capability,
        "get_device_name": "NVIDIA GPU",
        "get_arch_list": WHEEL,
        "get_device_properties": SimpleNamespace(shared_memory_per_block_optin=shared_memory),
    }
    with mock.patch.multiple(
        torch.cuda, **{name: lambda *_, a=a: a for name, a in answers.items()}
    ):
        yield


@pytest.mark.parametrize(
    "capability, sections, refused",
    [
        ((9, 0), BFLOAT16, None),
        ((8, 9), BFLOAT16, None),
        ((8, 0), BFLOAT16, None),
        ((10, 3), BFLOAT16, None),
        ((12, 1), BFLOAT16, None),
        (
            (7, 5),
            BFLOAT16,
            r"param_dtype = .*needs .* 8\.0 .*NVIDIA GPU .* 7\.5; --parallel\.param_dtype=f",
        ),
        ((7, 5), {"parallel": {"param_dtype": "float32"}}, None),
        ((7, 5), {"parallel": {"param_dtype": "auto"}}, None),
        (
            (7, 0),
            {"parallel": {"param_dtype": "float32"}},
            r"7\.0: torch .* has kernels for sm_75, ",
        ),
    ],
    ids=str,
)
def test_a_gpu_without_kernels_or_bfloat16_is_refused(capability, sections, refused):
    cfg = make_config(run={"device": "cuda"}, **sections)
    with gpus_of(capability):
        if refused is None:
            assert pick_device(cfg, 0).type == "cuda"
        else:
            with pytest.raises(ConfigError, match=refused):
                pick_device(cfg, 0)


@needs_extra("float8")
def test_all_that_a_gpu_lacks_is_said_at_once():
    parallel = {"float8": "rowwise", "compile": True, "cp": 2, "param_dtype": "bfloat16"}
    cfg = make_config(run={"device": "cuda"}, model={"head_dim": 8}, parallel=parallel)
    with gpus_of((6, 1)), pytest.raises(ConfigError) as refused:
        pick_device(cfg, 0)
    named = [problem.split(":")[0] for problem in refused.value.problems]
    assert named[0].startswith("NVIDIA GPU of") and len(named) == 4


@pytest.mark.parametrize("head_dim, refused", [(64, False), (96, True), (128, True)])
def test_shared_memory_for_masks_in_float32_is_counted(head_dim, refused):
    """Triton asks for 81,920 bytes at 128, a Turing GPU has 65,536."""
    sections = {"model": {"head_dim": head_dim}, "parallel": {"param_dtype": "float32"}}
    cfg = make_config(run={"device": "cuda"}, data={"document_mask": True}, **sections)
    with gpus_of((7, 5)):
        if refused:
            with pytest.raises(ConfigError, match=r"need 81,920 bytes .* has 65,536"):
                pick_device(cfg, 0)
        else:
            pick_device(cfg, 0)
        pick_device(make_config(run={"device": "cuda"}, **sections), 0)  # SDPA needs none of it
    with gpus_of((7, 5), shared_memory=81_920):
        pick_device(cfg, 0)
    with gpus_of((8, 0)):  # from there on tiles are made to fit
        pick_device(cfg, 0)


def test_a_build_for_amd_has_kernels_of_other_names(monkeypatch):
    cfg = make_config(run={"device": "cuda"})
    with gpus_of((9, 4)):
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx942"])
        with pytest.raises(ConfigError, match="has kernels for gfx942 alone"):
            pick_device(cfg, 0)
        monkeypatch.setattr(torch.version, "hip", "7.0")
        assert pick_device(cfg, 0) == torch.device("cuda", 0)


@pytest.mark.parametrize("head_dim, refused", [(14, True), (16, False)])
def test_masks_on_a_gpu_need_heads_that_are_sixteen_wide(head_dim, refused):
    mask = {"data": {"document_mask": True}}
    for sections in (mask, {"parallel": {"cp": 2}}, {}):
        cfg = make_config(run={"device": "cuda"}, model={"head_dim": head_dim}, **sections)
        with gpus_of((8, 0)), contextlib.ExitStack() as stack:
            if refused and sections:
                told = f"heads are {head_dim} wide; .* need 16 or more"
                stack.enter_context(pytest.raises(ConfigError, match=told))
            pick_device(cfg, 0)


def test_what_a_driver_supports_is_in_the_line_on_a_torch_that_cannot_use_it(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\ncase $1 in\n--list-gpus) printf 'GPU 0: A\\nGPU 1: A\\n';;\n"
        "--query-gpu=driver_version) printf '535.1\\n535.1\\n';;\n"
        "*) echo '| Driver Version: 535.1  CUDA Version: 12.2 |';;\nesac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = "nvidia-smi lists 2 GPUs (driver 535.1, for CUDA up to 12.2)"
    assert gpus.describe_driver(gpus.listed_gpus()) == told


def test_kernels_run_on_newer_gpus_of_their_generation():
    assert runs_on("sm_80", (8, 9)) and runs_on("sm_86", (8, 6)) and runs_on("sm_90a", (9, 0))
    assert not runs_on("sm_86", (8, 0)) and not runs_on("sm_75", (8, 0))
    assert runs_on("compute_75", (12, 0)) and not runs_on("compute_90", (8, 9))


def without_nvidia_smi(monkeypatch, folder: pathlib.Path) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_counted_without_nvidia_smi(monkeypatch, tmp_path):
    """By the device files that this process may open."""
    without_nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus.visible_gpus() == 3
    assert gpus.describe_driver(3) == "this machine has 3 GPUs (without nvidia-smi)"
    assert gpus.trains_on_gpus(make_config(run={"device": "auto"}))
    assert not gpus.trains_on_gpus(make_config(run={"device": "cpu"}))
    (tmp_path / "nvidia10").unlink()
    (tmp_path / "nvidia10").mkdir()  # cannot be opened
    assert gpus.visible_gpus() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus.visible_gpus() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not gpus.trains_on_gpus(make_config(run={"device": "auto"}))


@pytest.mark.parametrize(
    "script, quoted",
    [
        (
            "echo Failed to initialize NVML: version mismatch; exit 18",
            "Failed to initialize NVML: version mismatch",
        ),
        ("exec sleep 60", "no answer in 0.2 s"),
    ],
)
def test_a_driver_that_fails_is_quoted(monkeypatch, tmp_path, script, quoted):
    """As after its update, or where it hangs: instead of training on the CPU."""
    without_nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(gpus, "SMI_SECONDS", 0.2)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setattr(gpus, "DEVICE_FILES", tmp_path)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = rf'has 1 GPUs \(nvidia-smi says "{quoted}"\), but torch'
    with pytest.raises(ConfigError, match=told):
        pick_device(make_config(run={"device": "auto"}), 0)


def test_amd_gpus_are_counted_for_a_build_for_rocm(monkeypatch, tmp_path):
    without_nvidia_smi(monkeypatch, tmp_path)
    monkeypatch.setattr(gpus, "AMD_NODES", tmp_path)
    for node, number in enumerate(("0", "51966", "51967")):  # the first is the CPU
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "gpu_id").write_text(f"{number}\n")
    monkeypatch.setattr(gpus.importlib.metadata, "version", lambda name: "2.13.0+rocm7.0")
    assert gpus.visible_gpus() == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert gpus.visible_gpus() == 1


@pytest.mark.parametrize("variable", [None, "NPROC", "SLURM_GPUS_ON_NODE"])
def test_gpus_that_no_rank_would_use_are_refused(monkeypatch, tmp_path, variable):
    """Where torch sees more than were counted, as without nvidia-smi, unless a number was asked for."""
    without_nvidia_smi(monkeypatch, tmp_path)
    for name in ("NPROC", "SLURM_GPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    cfg = make_config(run={"device": "cuda"})
    with gpus_of((9, 0), count=8):
        if variable is None:
            told = "torch finds 8 GPUs here, and nvidia-smi lists 0: NPROC=8 trains on all, NPROC=1"
            with pytest.raises(ConfigError, match=told):
                checks.check_device(cfg, 1)
        else:
            monkeypatch.setenv(variable, "1")
            checks.check_device(cfg, 1)
        checks.check_device(cfg, 8)


def test_slices_are_named_where_there_are_fewer_than_names(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU 0: H100\\n  MIG 1g.10gb\\n  MIG 1g.10gb\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert gpus.visible_gpus() == 2
    told = r"local rank 1 .* has 1, with CUDA_VISIBLE_DEVICES=MIG-1,MIG-2 .*MIG.*one slice\); start"
    with gpus_of((9, 0)), pytest.raises(ConfigError, match=told):
        pick_device(make_config(run={"device": "cuda"}), 1)


def test_a_torch_that_cannot_be_loaded_is_one_line(monkeypatch):
    """As with a module's older NCCL before torch's own."""
    monkeypatch.setenv("LD_PRELOAD", "/opt/nccl/libnccl.so.2")

    def load(name: str, *rest: object) -> object:
        if name == "torch":
            raise ImportError("libtorch_cuda.so: undefined symbol: ncclCommWindowRegister")
        return real(name, *rest)

    real = __import__
    monkeypatch.setattr("builtins.__import__", load)
    with pytest.raises(
        ConfigError, match=r"torch cannot be loaded: .*WindowReg.*LD_PRELOAD=/opt/nc"
    ):
        checks.check_device(make_config(run={"device": "cuda"}), 1)
