"""Folders that other programs load."""
