"""Benchmarks compare the core with extras: without one of these they are not tested."""

from tests.conftest import has_extra

NEEDED = ("float8", "huggingface", "lora", "migrate", "optimizers", "reports")
collect_ignore_glob = [] if all(map(has_extra, NEEDED)) else ["test_*.py"]
