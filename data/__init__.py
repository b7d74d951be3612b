"""What a run is trained on: text is prepared once into token files, and read as batches.

Text in, by data.prepare (or data.background, with data.order = "growing"):

    sources, arrow           documents of files and folders, in order
    hub_sources, hub         documents of Hugging Face data sets; repositories by id
    tokenizer, encode        documents -> token ids, by processes
    folder, identity         a source's folder: its name, and what it was prepared for
    writer, record           token files, and the manifest that records how far they are synced
    prepare                  all of these together
    fetch                    what a run reads from the hub, before it

Batches out, in train.py:

    tokens                   token files as streams, cut into windows
    mixture, order           sample number -> source -> window
    growing                  the same for text that is still being prepared
    dataset, loader          all of these together: sample number -> tokens; step -> batch
    show                     what a step reads, as text
"""
