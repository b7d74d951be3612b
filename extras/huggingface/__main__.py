"""Exports checkpoints as Hugging Face folders, and imports these: see extras/huggingface/convert.py."""

import config
from extras.huggingface.convert import main

if __name__ == "__main__":
    config.run_tool(main)
