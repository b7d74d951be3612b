"""Reads and writes Hugging Face folders: config.json, weights, tokenizer.

A run reads the folder that model.init_from names.
"""
