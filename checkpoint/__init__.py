"""Checkpoints: checkpoints/step-00000100/ holds the tensors of every rank (*.distcp and .metadata, the format of
torch.distributed.checkpoint), state.json, the tokenizer, and manifest.json with the size and SHA-256 of all of them.

It is written under another name and renamed when all of it is on disk: a folder with that name is a whole checkpoint.
Nothing in it can run code when it is read.
"""
