"""Hugging Face folders, in and out: config.json, weights, tokenizer.

A run reads one where model.init_from names it.
"""
