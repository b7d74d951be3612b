"""What looks at a run, a configuration or a checkpoint. Nothing outside this folder imports it, and
`rm -r` removes it: see `python -m tools`.
"""
