"""Before and around the ranks. The launcher imports torch only on a machine with a GPU driver, to
count GPUs. agent.py runs in torchrun's process, not in the launcher's.

launch.py    checks, prepares the text, starts and restarts the ranks, returns the exit code
ranks.py     how many ranks, the command and environment that start them, SLURM
agent.py     torchrun, without its reports
follower.py  starts the follower: rows to a tracker, the comparison with the plan, the report
"""
