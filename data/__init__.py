"""What a run is trained on: text is prepared once into token files, and read as batches.

Text in, by data.prepare (or data.background, with data.order = "growing"):

    local_files, rows        which files a source names; their rows, by arrow and json_array
    hub_sources, hub         the files and rows of Hugging Face data sets; repositories by id
    sources                  rows -> documents, in order, from where reading stopped
    tokenizer, encode        documents -> token ids, by processes; tokenizer_json, tokenizer_training
    folder, folder_names     the folder of a source: which one, its beginning, checks
    identity                 what a folder is prepared for
    writer, record           token files, and the manifest that records how far they are synced
    prepare                  all of these together; console prints, cores counts
    formats                  whether rows are texts or conversations, if no option says it
    fetch                    what a run will read from the hub, fetched before it starts

Batches out, in train.py:

    tokens                   token files as streams, cut into windows
    mixture, order           sample number -> source -> window
    growing, background      the same for text that a process beside the run still prepares
    dataset, loader          all of these together: sample number -> tokens; step -> batch
    show                     what a step reads, as text
"""
