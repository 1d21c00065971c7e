"""Decoding: completions, speculative decoding and its evaluation."""
