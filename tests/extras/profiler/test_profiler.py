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
from extras.profiler.profiler import Profiler, read, row_of, table, time_by_row

CATEGORIES = {"op": "cpu_op", "range": "user_annotation", "call": "cuda_runtime"}
CATEGORIES |= {"copy": "gpu_memcpy", "set": "gpu_memset", "python": "python_function"}
# thread, begin and end in ms, category, name. The first aten::add began before the steps.
CPU = """1 0 100 range traced steps; 1 0 100 python train.py(90): train; 3 -5 2 op aten::add
1 5 15 op aten::linear; 1 5 6 op aten::t; 1 6 14 op aten::mm
1 15 25 op autograd::engine::evaluate_function: ScaledDotProductFlashAttentionForCpuBackward0
1 16 24 op ScaledDotProductFlashAttentionForCpuBackward0; 1 17 23 op aten::bmm
1 30 40 op _ChunkedCrossEntropy; 1 31 35 op aten::mm; 1 36 38 op aten::exp_; 1 38 39 op c10d::allreduce_
1 40 50 op autograd::engine::evaluate_function: _ChunkedCrossEntropyBackward
1 41 45 range FSDP::pre_backward (blocks.0.attention); 1 42 43 op c10d::_allgather_base_
1 46 49 op _ChunkedCrossEntropyBackward; 1 47 49 op aten::mul
1 60 70 range Optimizer.step#AdamW.step; 1 62 69 op aten::_fused_adamw_
1 70 80 op ## Call CompiledFxGraph fv37yo ##; 1 72 75 op aten::mm; 1 78 79 op _c10d_functional::wait_tensor
2 74 90 range gloo:all_gather; 2 88 89 op aten::copy_"""
# And "> n" of a call, "< n" of what it launched. 90 was launched before the trace began; attention runs while 7 does;
# 12 ends after the steps. A kernel's thread is its stream.
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
ON_CPU = dict(zip([*profiler.ROWS, profiler.HIDDEN], (13, 8, 12, 10, 8, 13, 36, 5)))
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


@pytest.mark.parametrize("events, answer", [(CPU, ON_CPU), (CUDA, ON_CUDA)], ids=["cpu", "cuda"])
def test_a_trace_is_split_as_it_was_made(events, answer, tmp_path):
    spent = time_by_row(read(write_trace(tmp_path / "trace.json", events)))
    assert spent == pytest.approx(answer, abs=1e-6)
    assert sum(spent.values()) - spent["communication, hidden"] == pytest.approx(100)


def test_the_table_is_per_step_and_adds_up():
    lines = table({row: float(ms) for row, ms in ON_CUDA.items()}, steps=2).splitlines()
    assert lines[0].split() == ["matrix", "products", "15.000", "ms", "30.0%"]
    assert lines[-2].split() == ["step", "50.000", "ms", "100.0%"]
    assert lines[-1].split()[:4] == ["communication,", "hidden", "8.500", "ms"]


@pytest.mark.parametrize(
    "row, names",
    {
        "matrix products": "aten::addmm_ mkldnn::_linear_pointwise triton_tem_fused_mm_t_3 aten::_scaled_mm",
        "attention": "aten::_scaled_dot_product_flash_attention_backward fmha_cutlassF_bf16_aligned_64x64 "
        "ScaledDotProductCudnnAttentionBackward0 triton_tem_fused_flex_attention_backward_2",
        "loss": "aten::nll_loss_backward aten::cross_entropy_loss",
        "elementwise, copies": "aten::mul fsdp::split_with_sizes_copy triton_red_fused__to_copy_add_mm_rsqrt_2",
        "communication, exposed": "nccl:_all_gather_base ncclKernel_AllReduce_RING _c10d_functional::wait_tensor",
        "idle": "FSDP::root_pre_forward torch::autograd::AccumulateGrad MmBackward0 CompiledFunctionBackward",
    }.items(),
)
def test_names_and_their_rows(row, names):
    assert {row_of(name, "cpu_op", "idle") for name in names.split()} == {row}


@pytest.fixture
def train_steps(monkeypatch):
    """A function: a folder, device and first step -> the logged messages. Of up to four steps the
    second and the third are traced."""

    def train(folder: pathlib.Path, device: str = "cpu", first: int = 1) -> str:
        logged = []
        for level in ("info", "warning"):
            monkeypatch.setattr(profiler.log, level, lambda text, *_: logged.append(text))
        world: Any = SimpleNamespace(rank=1, device=torch.device(device))
        traced = Profiler(config.Profile(at_step=2, steps=2), folder, world)
        for step in range(first, 5):
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


@pytest.mark.parametrize("first", [1, 4])
def test_a_launch_after_the_steps_to_trace_says_so(train_steps, tmp_path, first):
    assert ("was before this launch" in train_steps(tmp_path, first=first)) == (first == 4)
