"""A stand-in for the sample lengths of a large run: 1,095,082 samples, about 2,300 tokens on average.

The run reported its six length buckets (edges and samples in thousands), not its lengths. Here lengths are uniform
inside each bucket but the last, where they decay exponentially (mean 1,900 beyond its lower edge) up to 8,192 tokens.

Shapes: N samples.
"""

import numpy as np
from jaxtyping import Int

EDGES = (64, 770, 1216, 1728, 2432, 3296, 8193)  # low <= length < high
THOUSANDS = (130, 194, 187, 189, 152, 243)
DECAY = 1900  # tokens
SAMPLES = 1_095_082


def run_lengths(count: int = SAMPLES, seed: int = 0) -> Int[np.ndarray, " N"]:
    """Return `count` lengths (int32) in random order.

    The first 1,095,000 hold exactly the reported thousands of each bucket. What goes beyond them repeats lengths drawn
    at random, so any count has the same distribution.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for low, high, thousands in zip(EDGES, EDGES[1:], THOUSANDS, strict=False):
        rows = thousands * 1000
        if high < EDGES[-1]:
            part = rng.integers(low, high, rows)
        else:
            drawn = low + rng.exponential(DECAY, rows * 2)
            part = drawn[drawn < high][:rows].astype(np.int64)
        parts.append(part)
    lengths_N = np.concatenate(parts).astype(np.int32)
    rng.shuffle(lengths_N)
    if count > len(lengths_N):
        more = rng.choice(lengths_N, count - len(lengths_N))
        lengths_N = np.concatenate([lengths_N, more])
    return lengths_N[:count]
