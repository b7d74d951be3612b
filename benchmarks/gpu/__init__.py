"""The first hour on a GPU, as one command: python -m benchmarks.gpu. docs/cluster.md explains it.

File by file:

    __main__.py     the command line; which arms still lack a result; the JSON file
    arms.py         what is measured, in which order
    environment.py  versions, the device, the attention kernel, a collective
    trace.py        a step's time by kernel and stream
    training.py     train.py on this device: its losses next to a CPU's, a resume, an evaluation
    processes.py    starts the processes that measure, and kills those that do not answer
    measure.py      runs in those processes: one row for each arm
    planned.py      what the planner predicts for an arm
    report.py       compares rows; the tables
    rank_of_many.py one GPU as rank 0 of many, a program of its own; slept_network.py: its collectives
"""
