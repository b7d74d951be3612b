"""Before and around the ranks. The launcher imports torch only where there is a GPU driver, to count
GPUs; agent.py is another process, torchrun's.

launch.py    checks, prepares the text, starts the ranks and restarts them, ends with an exit code
ranks.py     how many ranks, the command and environment that start them, SLURM
agent.py     torchrun, without its reports
follower.py  starts what follows a run: the tracker, the comparison with the plan, the report
"""
