"""What the rest needs of the operating system. Imports nothing of this repository.

files.py       whole files and folders, synced and locked
processes.py   exit codes, printing, starting and ending with a parent
machine.py     cores and GPUs
"""
