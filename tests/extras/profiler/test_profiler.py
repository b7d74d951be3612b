"""Where the time of traced steps went. The traces are made by hand, so that each answer is known."""

import json
import pathlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import config
from extras.profiler import profiler
from extras.profiler.profiler import Profiler, read, time_by_row

CATEGORIES = {"op": "cpu_op", "range": "user_annotation", "call": "cuda_runtime"}
CATEGORIES |= {"copy": "gpu_memcpy", "set": "gpu_memset"}
# Thread, begin and end in ms, category, name; "> n" of a call, "< n" of what it launched. 90 was launched before the
# trace began; attention runs while 7 does; 12 ends after the steps. A kernel's thread is its stream.
CUDA = """7 10 95 gpu_user_annotation traced steps; 1 0 100 range traced steps
7 -3 1 kernel void at::native::elementwise_kernel<128, 2> < 90; 1 1 3 op aten::mm
1 2 2.5 call cudaLaunchKernelExC > 1; 7 10 30 kernel nvjet_tst_192x192_64x4_1x2_h_bz_coopA_NTT < 1
1 3 4 op c10d::_allgather_base_; 1 3 4 call cudaLaunchKernelExC > 2
20 5 25 kernel ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>) < 2
1 4 4.5 call cudaLaunchKernel > 3; 1 4 5 op aten::mm; 1 4 6 op _ChunkedCrossEntropy
7 30 40 kernel sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n < 3
1 6 8 op ## Call CompiledFxGraph fv37yo ##; 1 6 7 cuda_driver cuLaunchKernel > 4
7 40 45 kernel triton_poi_fused__scaled_dot_product_flash_attention_mm_0 < 4
1 8 10 op aten::_scaled_dot_product_cudnn_attention; 1 8 9 cuda_driver cuLaunchKernelEx > 5
7 45 50 kernel cudnn_generated_fort_native_sdpa_sm90_flash_fprop < 5
1 9 10 call cudaMemsetAsync > 6; 7 50 51 set Memset (Device) < 6
2 10 12 op fsdp::chunk_cat; 2 10 11 call cudaLaunchKernel > 7
30 46 52 kernel void at::native::detail::chunk_cat_cuda_kernel<float> < 7
2 12 15 op MmBackward0; 2 13 15 op aten::mm; 2 14 15 call cudaLaunchKernel > 8
7 55 65 kernel void splitKreduce_kernel<32, 16> < 8
1 16 20 range Optimizer.step#AdamW.step; 1 16 19 op aten::_fused_adamw_; 1 17 18 call cudaLaunchKernel > 9
7 70 80 kernel void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor> < 9
20 78 90 kernel ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL < 10; 1 91 92 op aten::add
7 92 93 copy Memcpy HtoD (Pinned -> Device) < 11; 20 98 105 kernel ncclDevKernel_AllGather_RING_LL < 12"""
# ms of matmuls, attention, loss, optimizer, elementwise, communication exposed, idle; communication hidden
ON_CUDA = dict(zip([*profiler.ROWS, profiler.HIDDEN], (30, 6, 10, 10, 8, 17, 19, 17)))


def write_trace(path: pathlib.Path, text: str) -> pathlib.Path:
    """As torch.profiler exports it: microseconds, among events of other kinds."""
    entries: list[dict] = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 4e12},
        {"ph": "X", "cat": "Trace", "name": "Profiler", "tid": "Profiler", "ts": 4e12, "dur": 1e6},
    ]
    for event in text.replace("\n", "; ").split("; "):
        thread, begin, end, category, rest = event.split(maxsplit=4)
        name, _, launch = re.sub(" [<>] ", " <> ", rest).partition(" <> ")
        entry = {"ph": "X", "cat": CATEGORIES.get(category, category), "name": name, "pid": 0}
        entry |= {"tid": int(thread), "ts": 4e12 + float(begin) * 1000}
        entry |= {"dur": (float(end) - float(begin)) * 1000}
        arguments = {"correlation": int(launch)} if launch else {}
        entries.append({**entry, "args": {"External id": 1, **arguments}})
    path.write_text(json.dumps({"deviceProperties": [{"id": 0}], "traceEvents": entries}))
    return path


def test_a_trace_is_split_as_it_was_made(tmp_path):
    spent = time_by_row(read(write_trace(tmp_path / "trace.json", CUDA)))
    assert spent == pytest.approx(ON_CUDA, abs=1e-6)
    assert sum(spent.values()) - spent["communication, hidden"] == pytest.approx(100)


@pytest.fixture
def train_steps(monkeypatch):
    """A function: a folder and device -> the logged messages. Of four steps the second and the third are traced."""

    def train(folder: pathlib.Path, device: str = "cpu") -> str:
        logged = []
        for level in ("info", "warning"):
            monkeypatch.setattr(profiler.log, level, lambda text, *_: logged.append(text))
        world: Any = SimpleNamespace(rank=1, device=torch.device(device))
        traced = Profiler(config.Profile(at_step=2, steps=2), folder, world)
        for step in range(1, 5):
            with traced.traced(step):
                torch.ones(64, 64) @ torch.ones(64, 64)
        return " ".join(logged)

    return train


def test_on_a_gpu_the_memory_of_the_same_steps_is_recorded(train_steps, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    record = lambda enabled="all", **_: calls.append(enabled)  # noqa: E731
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    train_steps(tmp_path, "cuda")
    snapshot = str(tmp_path / "profile/memory-rank-1.pickle")
    # written before recording ends, which may drop what was recorded
    assert calls == ["all", "synchronize", "synchronize", snapshot, None]
    assert (tmp_path / "profile/rank-1.txt").read_text().startswith("steps 2 to 3, rank 1")


def test_a_profile_that_lacks_the_steps_stops_nothing(train_steps, tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "read", lambda path: [])
    assert "the profile is incomplete" in train_steps(tmp_path)
    assert (tmp_path / "profile/rank-1.json").exists()
    (tmp_path / "file").touch()  # nor does one that cannot be written
    assert "the profile is incomplete" in train_steps(tmp_path / "file")
