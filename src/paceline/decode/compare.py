"""Whether one drafter is accepted more than another: the paired bootstrap over prompts.

Both drafters answered the same prompts, and prompts differ among themselves far more than drafters do on one of them.
So the same resampled prompts go into both averages, and the interval is that of their difference.

Shapes: P prompts, R resamples.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 0
_MOST_DRAWS = 1 << 22  # at once


def paired_bootstrap(
    own_P: Float[np.ndarray, " P"], other_P: Float[np.ndarray, " P"], *, resamples: int = RESAMPLES, seed: int = SEED
) -> dict[str, Any]:
    """Return the two means, their difference (own - other), and percentile intervals of the three.

    The values are one a prompt, in the same order.
    """
    means_3R = resampled_means(np.stack([own_P, other_P, own_P - other_P]), resamples, seed)
    tail = (1 - CONFIDENCE) / 2
    low_3, high_3 = np.quantile(means_3R, [tail, 1 - tail], axis=1)
    own, other, difference = (
        {"mean": float(values.mean()), "low": float(low), "high": float(high)}
        for values, low, high in zip((own_P, other_P, own_P - other_P), low_3, high_3, strict=True)
    )
    return {
        "own": own,
        "other": other,
        "difference": difference,
        "prompts": len(own_P),
        "resamples": resamples,
        "confidence": CONFIDENCE,
        "seed": seed,
    }


def resampled_means(values_3P: Float[np.ndarray, "K P"], resamples: int, seed: int) -> Float[np.ndarray, "K R"]:
    """Return the means of `resamples` draws of P prompts with replacement, the same draws for all K rows."""
    generator = np.random.default_rng(seed)
    count = values_3P.shape[1]
    rows = max(1, _MOST_DRAWS // count)
    parts = []
    for at in range(0, resamples, rows):
        drawn_RP: Int[np.ndarray, "R P"] = generator.integers(count, size=(min(rows, resamples - at), count))
        parts.append(np.stack([values_P[drawn_RP].mean(1) for values_P in values_3P]))
    return np.concatenate(parts, axis=1)
