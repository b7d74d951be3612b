"""--dry-run: what a run will need, from one simulated step. Nothing that trains is in here.

File by file:

    arguments.py    the command line of --dry-run
    dry_run.py      the command: plans each world size, prints, suggests
    plan.py         a plan: the row that --json prints
    simulate.py     runs one step of the real program on fake tensors, under a fake process group
    blocks.py       which blocks need not run, as others are like them
    gpu_paths.py    a GPU's code paths on fake tensors; masks.py: FlexAttention's masks
    counted.py      counts memory, work and communication of each operator, by phase of the step
    devices.py      the GPUs' rates: what a phase takes, and when it runs
    show.py         tables, and a drawing of the timeline (svg.py)
    advice.py       what to change where a plan does not fit
    check.py        compares a run on GPUs with its plan
"""
