"""Roles in threads: handshake, order, credits and failure."""
