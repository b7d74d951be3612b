"""Tokenizes text once, into the token files that training reads.

`./run_train.sh -m prepare CONFIG` runs it. The launcher runs it when token files are missing.

prepare.py             prepares all parts on all cores, then writes the final manifest
folders.py             creates a source's folder, and compares it with the source's files
parts.py               splits a source's files into parts; one process prepares one part
source.py, rows.py     list a source's files, local or on the Hugging Face hub, and read their rows
row_format.py, formats.py   turn rows into documents: texts, or conversations (chat/)
tokenizer.py, tokenizer_json.py   text <-> token ids, with sentencepiece or a tokenizer.json
tokenizer_training.py  trains a tokenizer when the configuration names none
"""
