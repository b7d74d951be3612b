"""Benchmarks compare the core with extras: without one of these they are not tested."""

import config

NEEDED = ("float8", "huggingface", "lora", "optimizers")
collect_ignore_glob = [] if all(map(config.has_extra, NEEDED)) else ["test_*.py"]
