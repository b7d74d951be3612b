"""Text -> token files, once: what training reads. `./run_train.sh -m prepare CONFIG`; the launcher
starts it where they are missing.

source, rows     the files that a source names, local or on a hub; their rows
row_format       rows -> documents: texts or, behind data.format, conversations
tokenizer_training   where no tokenizer is named
begin            the folder of a source begins with a manifest of no text
parts            a source's files in parts; one process prepares a part, alone
prepare          all parts, on all cores, and the final manifest
"""
