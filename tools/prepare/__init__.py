"""Text -> token files, once: what training reads. `./run_train.sh -m prepare CONFIG`; the launcher
starts it where they are missing.

source, rows     the files that a source names, local or on a hub; their rows
row_format       rows -> documents: texts or, behind data.format, conversations
tokenizer_training   where no tokenizer is named
begin            the folder of a source begins with a record of no text
writer           appends token ids, and records how far they are synced
prepare          all of these together
"""
