"""Benchmarks compare the core with extras and tools: without one of these they are not tested."""

from tests.conftest import REPO, has_extra

NEEDED = ("float8", "huggingface", "lora", "optimizers", "profiler")
has_all = (REPO / "tools").exists() and all(map(has_extra, NEEDED))
collect_ignore_glob = [] if has_all else ["test_*.py"]
