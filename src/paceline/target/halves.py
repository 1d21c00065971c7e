"""A micro-batch in two halves, for a device that has no room for the whole."""

from dataclasses import replace

import torch

from paceline.records import TokenBatch


def halves(tokens: TokenBatch) -> tuple[TokenBatch, TokenBatch] | None:
    """Return two parts whose features, laid end to end, are those of the whole; None for a single sample.

    Rows keep their width, so that what is computed for a row stays the same. A packed row is cut between two samples,
    where its tokens are most nearly halved. Both parts carry the blocks of the whole, which the target does not read.
    """
    lengths = tokens.lengths
    if len(lengths) < 2:
        return None
    if tokens.packed:
        ends = [sum(lengths[:count]) for count in range(1, len(lengths))]
        count = 1 + min(range(len(ends)), key=lambda at: abs(2 * ends[at] - tokens.num_tokens))
        used = ends[count - 1]
        ids = tokens.input_ids[:, :used], tokens.input_ids[:, used : tokens.num_tokens]
        places = torch.arange(used), torch.arange(tokens.num_tokens - used)
    else:
        count = len(lengths) // 2
        used, behind = sum(lengths[:count]), count * tokens.input_ids.shape[1]
        ids = tokens.input_ids[:count], tokens.input_ids[count:]
        places = tokens.places_T[:used], tokens.places_T[used:] - behind
    one, other = (
        replace(tokens, samples=samples, input_ids=part_RS, lengths=part, places_T=places_T)
        for samples, part_RS, part, places_T in zip(
            (tokens.samples[:count], tokens.samples[count:]),
            ids,
            (lengths[:count], lengths[count:]),
            places,
            strict=True,
        )
    )
    return one, other
