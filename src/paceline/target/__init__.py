"""The frozen language model: loading, taps, decoding and its replica loop."""
