"""What a run is trained on: text is prepared once into token files, and read as batches.

Text in, by data.prepare, which may go on beside the run:

    source, rows     the files that a source names, local or on the hub; their rows -> documents
    tokenizer        documents -> token ids; tokenizer_json, tokenizer_training
    folder           the folder of a source: its name, its identity, its record (manifest.json)
    begin            begins a folder; compares a source's files with those it was begun for
    writer           appends token ids, and records how far they are synced
    prepare          all of these together
    preparer         the process that goes on preparing beside a run, for the launcher

Batches out, in train.py:

    tokens           token files as streams of ids
    token_files      opens those that another program wrote
    mixture, order   sample number -> source -> window
    dataset, loader  all of these together: sample number -> tokens; step -> batch
"""
