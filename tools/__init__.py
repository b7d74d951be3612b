"""Programs that inspect a run, a configuration or a checkpoint; `python -m tools` lists them.
Nothing outside this folder imports it, so `rm -r tools` removes it.
"""
