"""What a rank checks before it joins the others: its device, and theirs."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import config
from config import ConfigError
from lifecycle.process_group import pick_device
from parallel.mesh import World
from tests import cases
from tests.conftest import make_config


def test_a_rank_may_open_as_many_files_as_its_hard_limit(on_ranks):
    """Four ranks with a soft limit below what their connections need."""
    for soft, hard in on_ranks(4, cases.file_limits, (24, 4096)):
        assert soft == hard == 4096


@pytest.mark.parametrize(
    "types, told",
    [
        (["cpu", "cpu"], ""),
        (
            ["cuda", "cpu"],
            "rank 1 on node1 would train on cpu, rank 0 on node0 on cuda: all need the same type of device",
        ),
        (
            ["cpu", "cuda"],
            "rank 1 on node1 would train on cuda, rank 0 on node0 on cpu: all need the same type of device",
        ),
        (["cuda", "none"], "node1: rank 1 has no GPU"),
    ],
    ids=str,
)
def test_ranks_with_other_devices_are_refused_on_all(on_ranks, types, told):
    """Over NCCL here and gloo there they would wait for each other."""
    assert [
        error[: len(told) or None] for error in on_ranks(2, cases.device_error, types, timeout=60)
    ] == [told] * 2


@pytest.mark.parametrize(
    "device, tool, chosen, built, told",
    [
        ("auto", "", None, "13.0", None),  # no nvidia-smi: as on a laptop
        ("auto", "no devices were found", None, "13.0", None),
        ("auto", "GPU 0", "", "13.0", None),  # hidden deliberately
        ("auto", "GPU 0", "-1", "13.0", None),
        ("auto", "", "0", "13.0", None),
        ("auto", "GPU 0", "NoDevFiles", "13.0", None),  # as SLURM hides them
        ("cpu", "GPU 0", None, "13.0", None),
        (
            "auto",
            "GPU 0",
            None,
            "13.0",
            r'"auto": nvidia-smi lists 1 GPUs \(driver 535\.1\), but torch .*, built for CUDA '
            r"13\.0, can use none; install a torch build for a CUDA version that this driver "
            r"supports, a newer driver, or .* \(cuda-compat\); --run\.device=cpu trains without one$",
        ),
        (
            "auto",
            "GPU 0",
            "7",
            None,
            r"lists 1 GPUs .* built for CPUs, can use none, with CUDA_VISIBLE_DEVICES=7; in",
        ),
        (
            "cuda",
            "GPU 0",
            None,
            None,
            r'"cuda": nvidia-smi lists 1 GPUs \(driver 535\.1\), but torch .*, built for CPUs,',
        ),
        (
            "cuda",
            "GPU 0",
            "-1",
            "13.0",
            "no usable GPU: torch .*, built for CUDA 13.0, finds none, with CUDA_VISIBLE",
        ),
        (
            "cuda",
            "",
            None,
            None,
            r'"cuda": this machine has no usable GPU: torch .*, built for CPUs, finds none, and nvid',
        ),
    ],
)
def test_gpus_that_torch_cannot_use_are_named(
    monkeypatch, tmp_path, device, tool, chosen, built, told
):
    """Instead of training on the CPU. A driver too old, a torch built for CPUs: torch says "not available" to both."""
    path = tmp_path / "nvidia-smi"
    path.write_text(
        f'#!/bin/sh\ncase $1 in --list-gpus) echo "{tool}";; --query-gpu=driver_version) echo 535.1;; esac'
    )
    path.chmod(0o755 if tool else 0o644)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    cfg: config.Config = make_config(run={"device": device})
    if told is None:
        assert pick_device(cfg, 0) == torch.device("cpu")
    else:
        with pytest.raises(ConfigError, match=told):
            pick_device(cfg, 0)


@pytest.mark.parametrize("shape", [(1, 3, 1, 2), (2, 1, 3, 1), (2, 3, 2, 4)])
def test_cp_and_tp_ranks_share_a_data_rank(shape):
    """Counted by hand: replicas, shards, parts of a sequence, parts of a matrix."""
    places = list(itertools.product(*map(range, shape)))
    mesh = SimpleNamespace(size=shape.__getitem__)
    of_data = list(itertools.product(*map(range, shape[:2])))
    for rank, place in enumerate(places):
        world = World(rank, len(places), torch.device("cpu"), mesh)
        assert world.dp_rank == of_data.index(place[:2])
        assert world.dp_size == len(of_data)
        assert world.fsdp_size == len(of_data) * shape[2]


def flex_attention_supports(width: int) -> bool:
    """Asks torch's lowering for a GPU. Its check comes first; without one, a block mask of no tensors stops it."""
    from torch._inductor.kernel.flex.flex_attention import flex_attention
    from torch._inductor.virtualized import V

    x = mock.MagicMock(
        **{
            "get_device.return_value": torch.device("cuda"),
            "get_size.return_value": [1, 4, 32, width],
        }
    )
    with (
        V.set_graph_handler(mock.MagicMock(**{"sizevars.evaluate_expr": bool})),
        pytest.raises((NotImplementedError, ValueError)) as stopped,
    ):
        flex_attention(x, x, x, None, (), 1.0, {}, (), ())
    return "embedding dimension" not in str(stopped.value)


@pytest.mark.parametrize("given", [True, False], ids=["head_dim", "dim / n_heads"])
@pytest.mark.parametrize(
    "sections", [{"parallel": {"cp": 2}}, {"data": {"document_mask": True}}, {}], ids=str
)
@pytest.mark.parametrize("width", [8, 14, 16, 32])
def test_heads_that_flex_attention_does_not_support_are_refused_on_a_gpu(width, sections, given):
    """Where FlexAttention runs: causal attention without cp needs none. A given head_dim counts, not dim / n_heads."""
    other = 8 if width > 15 else 32
    model = {"dim": 4 * other, "head_dim": width} if given else {"dim": 4 * width}
    found = {"is_available": True, "device_count": 1, "get_device_capability": (9, 0)}
    for device in ("cpu", "cuda", "auto"):
        cfg: config.Config = make_config(model=model, run={"device": device}, **sections)
        with mock.patch.multiple(
            torch.cuda, **{name: lambda *_, a=a: a for name, a in found.items()}
        ):
            if device == "cpu" or not sections or flex_attention_supports(width):
                assert pick_device(cfg, 0).type == device.replace("auto", "cuda")
            else:
                with pytest.raises(
                    ConfigError, match=f"head_dim: heads are {width} wide; .* need 16 or more"
                ):
                    pick_device(cfg, 0)
