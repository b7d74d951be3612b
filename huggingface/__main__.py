"""`python -m huggingface export|import`: see huggingface/convert.py."""

import config
from huggingface.convert import main

if __name__ == "__main__":
    config.run_tool(main)
