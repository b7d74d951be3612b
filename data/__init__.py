"""The training data: token files, which tools/prepare/ makes from text.

folder.py   locates a source's folder of token files, and reads its manifest.json
tokens.py   reads token files as one stream
order.py    sample number -> source -> window
dataset.py  sample number -> tokens; a fork replaces this for other data
loader.py   step -> this rank's batch
"""
