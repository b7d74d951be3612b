"""What training reads: token files, which tools/prepare/ makes of text.

folder.py   where a source's folder of token files is, and what its manifest.json says
tokens.py   token files read as one stream
order.py    sample number -> source -> window
dataset.py  sample number -> tokens; what a fork's own data replaces
loader.py   step -> this rank's batch
"""
