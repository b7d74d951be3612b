"""The fake itself: it counts waits and memory as a GPU would."""

import json

import pytest

from tests.fake_cuda.build import environment, python

pytestmark = pytest.mark.quick
# Each line is printed as the counters' changes, as JSON.
PROBE = """
import json, torch
from tests.fake_cuda.rank import counters
x = torch.zeros(1024, 1024, device="cuda")
pinned = torch.empty(1024, 1024, pin_memory=True)
event = torch.cuda.Event()
event.record()
for work in (lambda: x.add_(1), lambda: x.sum().item(), lambda: x.cpu(), lambda: pinned.copy_(x, non_blocking=True),
             event.synchronize, torch.cuda.synchronize, lambda: x @ x):
    before = counters()
    work()
    after = counters()
    print(json.dumps({name: after[name] - before[name] for name in after if after[name] != before[name]}))
"""
LIMIT = """
import resource, torch
held = [torch.zeros(2**30, device="cuda") for _ in range(9)]  # 4 GiB each
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**21  # in KiB
try:
    torch.empty(2**30, device="cuda")
except torch.OutOfMemoryError as error:
    print("out of memory" in str(error), torch.cuda.memory_allocated() == 36 * 2**30)
"""


def test_waits_and_launches_are_counted():
    lines = python("-c", PROBE, env=environment()).splitlines()
    add, item, to_host, to_pinned, event, device, matmul = map(json.loads, lines[-7:])
    assert add == {"kernels": 1}
    assert item["stream_waits"] == 1
    assert to_host["stream_waits"] == 1 and to_host["copy_waits"] == 1
    assert to_pinned == {}
    assert event == {"event_waits": 1} and device == {"device_waits": 1}
    assert matmul == {"matmuls": 1}


def test_memory_is_limited_and_costs_the_host_nothing():
    """A full-size model fits this machine; what exceeds the GPU raises as on a GPU."""
    for allocator in ("", "expandable_segments:True"):
        env = {**environment(memory_gib=39), "PYTORCH_ALLOC_CONF": allocator}
        assert "True True" in python("-c", LIMIT, env=env)
