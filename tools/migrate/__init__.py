"""Converts the settings of other trainers."""
