"""Conversations in, micro-batches out: chat, rows, store, plan, loader."""
