"""Conversations -> token ids, with which of them have a loss."""
