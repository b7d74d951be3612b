"""Adapters need a base, a Hugging Face folder."""

import config

collect_ignore_glob = [] if config.has_extra("huggingface") else ["test_*.py"]
