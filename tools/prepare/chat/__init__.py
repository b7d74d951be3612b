"""Turns conversations into token ids and a loss mask."""
