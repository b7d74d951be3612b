"""Before and around the ranks: the launcher, a process that imports no torch on a CPU.

launch.py    checks, prepares the text, starts the ranks, turns their outcome into an exit code
ranks.py     how many ranks, the command and environment that start them, SLURM
agent.py     torchrun, without its reports
follower.py  starts what follows a run: the tracker, the comparison with the plan, the report
"""
