"""What a node or a cluster may lack, looked for before data and ranks. A run can do without it: each
line says earlier, and with its cure, what would end the run later.

File by file:

    survey.py       all checks, and what they print
    finding.py      what a check returns
    limits.py       what a process may use: open files, locked and shared memory, memory
    disks.py        room for checkpoints, caches of compiled kernels, locks
    libraries.py    NCCL, cuDNN and cuBLAS: those that torch was built with
    network.py      the other nodes
    sizes.py        bytes of a model's states, and of its checkpoint
"""
