"""Prepares a configuration's text: tokenizes it, once, into token files."""

from config import run_tool
from tools.prepare.prepare import main

if __name__ == "__main__":
    run_tool(main)
