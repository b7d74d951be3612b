"""Checkpoints: checkpoints/step-00000100/ holds the shards of every rank (*.distcp and .metadata, the format of
torch.distributed.checkpoint), state.json, the tokenizer, and manifest.json with the size and SHA-256 of each file.

It is written under a temporary name and renamed once everything is on disk: a folder with the final name is complete.
Reading it cannot execute code from it.
"""
