"""Where the time of traced steps went. The traces are made by hand, so that each answer is known."""

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import config
from extras.profiler import profiler
from extras.profiler.profiler import Profiler, read, row_of, table, time_by_row

BACKWARD = "autograd::engine::evaluate_function: "
CPU = [  # category, name, thread, begin and end in ms
    ("user_annotation", profiler.STEPS, 1, 0, 100),
    ("cpu_op", "aten::add", 3, -5, 2),  # on another thread, begun before the steps
    ("cpu_op", "aten::linear", 1, 5, 15),
    ("cpu_op", "aten::t", 1, 5, 6),
    ("cpu_op", "aten::mm", 1, 6, 14),
    # with FSDP2's hooks
    ("cpu_op", BACKWARD + "ScaledDotProductFlashAttentionForCpuBackward0", 1, 15, 25),
    ("cpu_op", "ScaledDotProductFlashAttentionForCpuBackward0", 1, 16, 24),
    ("cpu_op", "aten::bmm", 1, 17, 23),
    ("cpu_op", "_ChunkedCrossEntropy", 1, 30, 40),
    ("cpu_op", "aten::mm", 1, 31, 35),
    ("cpu_op", "aten::exp_", 1, 36, 38),
    ("cpu_op", "c10d::allreduce_", 1, 38, 39),
    ("cpu_op", BACKWARD + "_ChunkedCrossEntropyBackward", 1, 40, 50),
    ("user_annotation", "FSDP::pre_backward (blocks.0.attention)", 1, 41, 45),
    ("cpu_op", "c10d::_allgather_base_", 1, 42, 43),
    ("cpu_op", "_ChunkedCrossEntropyBackward", 1, 46, 49),
    ("cpu_op", "aten::mul", 1, 47, 49),
    ("user_annotation", "Optimizer.step#AdamW.step", 1, 60, 70),
    ("cpu_op", "aten::_fused_adamw_", 1, 62, 69),
    ("cpu_op", "## Call CompiledFxGraph fv37yo ##", 1, 70, 80),
    ("cpu_op", "aten::mm", 1, 72, 75),
    ("cpu_op", "_c10d_functional::wait_tensor", 1, 78, 79),
    ("user_annotation", "gloo:all_gather", 2, 74, 90),
    ("cpu_op", "aten::copy_", 2, 88, 89),
    ("python_function", "train.py(90): train", 1, 0, 100),
]
ON_CPU = {
    "matrix products": 13,
    "attention": 8,
    "loss": 12,
    "optimizer": 10,
    "elementwise, copies": 8,
    "communication, exposed": 13,
    "idle": 36,
    "communication, hidden": 5,
}

CUDA = [  # of what a host thread launches, and of kernels (their thread is the stream), the correlation too
    ("gpu_user_annotation", profiler.STEPS, 7, 10, 95),
    ("user_annotation", profiler.STEPS, 1, 0, 100),
    # launched before the trace began
    ("kernel", "void at::native::elementwise_kernel<128, 2>", 7, -3, 1, 90),
    ("cpu_op", "aten::mm", 1, 1, 3),
    ("cuda_runtime", "cudaLaunchKernelExC", 1, 2, 2.5, 1),
    ("kernel", "nvjet_tst_192x192_64x4_1x2_h_bz_coopA_NTT", 7, 10, 30, 1),
    ("cpu_op", "c10d::_allgather_base_", 1, 3, 4),
    ("cuda_runtime", "cudaLaunchKernelExC", 1, 3, 4, 2),
    ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20, 5, 25, 2),
    ("cuda_runtime", "cudaLaunchKernel", 1, 4, 4.5, 3),  # called by the next two
    ("cpu_op", "aten::mm", 1, 4, 5),
    ("cpu_op", "_ChunkedCrossEntropy", 1, 4, 6),
    ("kernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 7, 30, 40, 3),
    ("cpu_op", "## Call CompiledFxGraph fv37yo ##", 1, 6, 8),
    ("cuda_driver", "cuLaunchKernel", 1, 6, 7, 4),
    ("kernel", "triton_poi_fused__scaled_dot_product_flash_attention_mm_0", 7, 40, 45, 4),
    ("cpu_op", "aten::_scaled_dot_product_cudnn_attention", 1, 8, 10),
    ("cuda_driver", "cuLaunchKernelEx", 1, 8, 9, 5),
    ("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 7, 45, 50, 5),
    ("cuda_runtime", "cudaMemsetAsync", 1, 9, 10, 6),
    ("gpu_memset", "Memset (Device)", 7, 50, 51, 6),
    ("cpu_op", "fsdp::chunk_cat", 2, 10, 12),
    ("cuda_runtime", "cudaLaunchKernel", 2, 10, 11, 7),
    # while attention runs
    ("kernel", "void at::native::detail::chunk_cat_cuda_kernel<float>", 30, 46, 52, 7),
    ("cpu_op", "MmBackward0", 2, 12, 15),
    ("cpu_op", "aten::mm", 2, 13, 15),  # autograd's thread
    ("cuda_runtime", "cudaLaunchKernel", 2, 14, 15, 8),
    ("kernel", "void splitKreduce_kernel<32, 16>", 7, 55, 65, 8),
    ("user_annotation", "Optimizer.step#AdamW.step", 1, 16, 20),
    ("cpu_op", "aten::_fused_adamw_", 1, 16, 19),
    ("cuda_runtime", "cudaLaunchKernel", 1, 17, 18, 9),
    ("kernel", "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 7, 70, 80, 9),
    ("kernel", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 20, 78, 90, 10),
    ("cpu_op", "aten::add", 1, 91, 92),  # on the host: the device is idle
    ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 7, 92, 93, 11),
    ("kernel", "ncclDevKernel_AllGather_RING_LL", 20, 98, 105, 12),  # ends after the steps
]
ON_CUDA = {
    "matrix products": 30,
    "attention": 6,
    "loss": 10,
    "optimizer": 10,
    "elementwise, copies": 8,
    "communication, exposed": 17,
    "idle": 19,
    "communication, hidden": 17,
}


def write_trace(path: pathlib.Path, events: list[tuple]) -> pathlib.Path:
    """As torch.profiler exports it: microseconds, among events of other kinds."""
    entries: list[dict] = [
        {"ph": "M", "name": "process_name", "ts": 0, "pid": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": 4e12},
        {"ph": "X", "cat": "Trace", "name": "Profiler", "tid": "Profiler", "ts": 4e12, "dur": 1e6},
    ]
    for category, name, thread, begin, end, *correlation in events:
        entry = {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread}
        entry |= {"ts": 4e12 + begin * 1000, "dur": (end - begin) * 1000}
        arguments = {"correlation": correlation[0]} if correlation else {}
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
    assert "not in the sum" in lines[-1]


@pytest.mark.parametrize(
    "row, names",
    [
        ("matrix products", "aten::addmm_ mkldnn::_linear_pointwise triton_tem_fused_mm_t_3"),
        ("matrix products", "aten::_scaled_mm"),
        ("attention", "aten::_scaled_dot_product_flash_attention_backward"),
        ("attention", "ScaledDotProductCudnnAttentionBackward0 fmha_cutlassF_bf16_aligned_64x64"),
        ("attention", "triton_tem_fused_flex_attention_backward_2"),
        ("loss", "aten::nll_loss_backward aten::cross_entropy_loss"),
        ("elementwise, copies", "aten::mul fsdp::split_with_sizes_copy"),
        ("elementwise, copies", "triton_red_fused__to_copy_add_mm_rsqrt_2"),
        ("communication, exposed", "nccl:_all_gather_base ncclKernel_AllReduce_RING"),
        ("communication, exposed", "_c10d_functional::wait_tensor"),
        ("idle", "FSDP::root_pre_forward torch::autograd::AccumulateGrad"),
        ("idle", "MmBackward0 CompiledFunctionBackward"),
    ],
)
def test_names_and_their_rows(row, names):
    assert {row_of(name, "cpu_op", "idle") for name in names.split()} == {row}


@pytest.fixture
def profiled(tmp_path, monkeypatch, caplog):
    """A function: device -> Profiler of steps 2 and 3, whose log is caught."""
    monkeypatch.setattr(profiler.log, "propagate", True)
    caplog.set_level("INFO")

    def make(device: str) -> Profiler:
        world: Any = SimpleNamespace(rank=1, device=torch.device(device))
        return Profiler(config.Profile(at_step=2, steps=2), tmp_path, world)

    return make


def train_four_steps(traced: Profiler) -> None:
    for step in range(1, 5):
        with traced.traced(step):
            torch.ones(64, 64) @ torch.ones(64, 64)


def test_on_a_gpu_the_memory_of_the_same_steps_is_recorded(profiled, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    memory = torch.cuda.memory
    record = lambda enabled="all", **_: calls.append(enabled)  # noqa: E731
    monkeypatch.setattr(memory, "_record_memory_history", record)
    monkeypatch.setattr(memory, "_dump_snapshot", calls.append)
    train_four_steps(profiled("cuda"))
    snapshot = str(tmp_path / "profile/memory-rank-1.pickle")
    # written before recording ends, which may drop what was recorded
    assert calls == ["all", "synchronize", "synchronize", snapshot, None]
    assert (tmp_path / "profile/rank-1.txt").read_text().startswith("steps 2 to 3, rank 1")


def test_a_trace_that_lost_the_steps_stops_nothing(profiled, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(profiler, "read", lambda path: [])
    train_four_steps(profiled("cpu"))
    assert "the profile is incomplete" in caplog.text
    assert (tmp_path / "profile/rank-1.json").exists()


def test_a_profile_that_cannot_be_written_stops_nothing(profiled, tmp_path, caplog):
    (tmp_path / "profile").write_text("a file where the folder should be")
    train_four_steps(profiled("cpu"))
    assert "the profile is incomplete" in caplog.text


@pytest.mark.parametrize("first, is_late", [(1, False), (4, True)])
def test_a_launch_after_the_steps_to_trace_says_so(profiled, caplog, first, is_late):
    with profiled("cpu").traced(first):
        pass
    assert ("at_step = 2 was before this launch" in caplog.text) is is_late
