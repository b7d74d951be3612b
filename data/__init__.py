"""What training reads: token files, which tools/prepare/ makes of text.

tokens           token files as streams
mixture, order   sample number -> source -> window
folder           the folder of a source: its name and its manifest.json
dataset, loader  all of these together: sample number -> tokens; step -> batch
tokenizer, tokenizer_json   text <-> token ids, for tools; training reads ids alone
"""
