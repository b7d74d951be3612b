"""What a run is trained on: text is prepared once into token files, and read as batches.

Text in, by `python -m data.prepare`, which the launcher starts and which may go on next to a run:

    source, rows     the files that a source names, local or on a hub; their rows
    row_format       rows -> documents: texts or, behind data.format, conversations; formats finds
                     data.format where no option says it
    hub              repositories of the Hugging Face hub in place of folders
    tokenizer        documents -> token ids; tokenizer_json, tokenizer_training
    folder, begin    the folder of a source: its name and its record, manifest.json; its beginning
    writer           appends token ids, and records how far they are synced
    prepare          all of these together
    preparer         its process, for the launcher

Batches out, in train.py:

    tokens           token files as streams; token_files: those of other programs
    mixture, order   sample number -> source -> window
    dataset, loader  all of these together: sample number -> tokens; step -> batch
"""
