"""Text -> token files, once: what training reads. `./run_train.sh -m prepare CONFIG`; the launcher
starts it where they are missing.

prepare.py             all parts, on all cores, and the final manifest
folders.py             creates a source's folder; compares it with the source's files
parts.py               a source's files in parts; one process prepares a part
source.py, rows.py     the files that a source names, local or on a hub; their rows
row_format.py, formats.py   rows -> documents: texts or, with data.format, conversations (chat/)
tokenizer.py, tokenizer_json.py   text <-> token ids: sentencepiece, tokenizer.json
tokenizer_training.py  trains a tokenizer where none is named
"""
