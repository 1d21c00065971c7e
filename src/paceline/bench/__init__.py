"""Measurements of this machine that a person starts: nothing in here is a timed test."""
