"""The fake itself: it counts waits and memory as a GPU would."""

import json
import pathlib
import subprocess
import sys

from tests.fake_cuda import build, configurations
from tests.fake_cuda.configurations import Case, Text

# Each line is printed as the counters' changes, or as JSON.
PROBE = """
import json, torch
from tests.fake_cuda.rank import counters
def changes(work):
    before = counters()
    work()
    after = counters()
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}
x = torch.zeros(1024, 1024, device="cuda")
pinned = torch.empty(1024, 1024, pin_memory=True)
event = torch.cuda.Event()
event.record()
for work in (
    lambda: x.add_(1),
    lambda: x.sum().item(),
    lambda: x.cpu(),
    lambda: pinned.copy_(x, non_blocking=True),
    event.synchronize,
    torch.cuda.synchronize,
    lambda: x @ x,
):
    print(json.dumps(changes(work)))
"""


def run(program: str, **settings: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=build.REPO,
        env=build.environment(**settings),
        capture_output=True,
        text=True,
    )


def test_waits_and_launches_are_counted() -> None:
    done = run(PROBE)
    assert done.returncode == 0, done.stderr
    add, item, to_host, to_pinned, event, device, matmul = map(json.loads, done.stdout.splitlines())
    assert add == {"kernels": 1}
    assert item["stream_waits"] == 1
    assert to_host["stream_waits"] == 1
    assert to_host["copy_waits"] == 1
    assert to_pinned == {}
    assert event == {"event_waits": 1}
    assert device == {"device_waits": 1}
    assert matmul == {"matmuls": 1}


def test_memory_is_limited_and_costs_the_host_nothing() -> None:
    """A full-size model fits this machine; what exceeds the GPU raises as on a GPU."""
    program = """
import resource, torch
held = [torch.zeros(2**30, device="cuda") for _ in range(9)]  # 4 GiB each
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**21)  # in KiB
try:
    torch.empty(2**30, device="cuda")
except torch.OutOfMemoryError as error:
    print("out of memory" in str(error), torch.cuda.memory_allocated() == 36 * 2**30)
"""
    for allocator in ("", "expandable_segments:True"):
        done = run(
            f"import os; os.environ['PYTORCH_ALLOC_CONF'] = '{allocator}'" + program,
            memory_gib=39,
        )
        assert done.stdout.split() == ["True"] * 3, done.stdout + done.stderr


def test_a_planted_wait_is_seen(text: Text, tmp_path: pathlib.Path) -> None:
    """The control of every test that finds no wait in a step."""
    case = Case("tiny", "eager")
    path = configurations.write_config(case, text, tmp_path)
    clean, _ = configurations.run_alone(path, 1)
    planted, _ = configurations.run_alone(path, 1, "--plant-wait")
    for name, difference in (("stream_waits", 1), ("event_waits", 0)):
        assert planted["steps"][1][name] == clean["steps"][1][name] + difference
