"""What a drafter's step has to compute at least: the one count of operations behind every share of a device's peak."""

from paceline.config import DrafterSettings


def useful_flops(
    drafter: DrafterSettings, *, hidden_size: int, vocab_size: int, tokens: int, visible: int, blocks: int
) -> float:
    """Return the floating-point operations of the useful work in steps with so many real tokens and blocks.

    `visible` is how many context tokens all blocks see together. Everything is linear in these three, so sums over
    steps and ranks may be given. A matrix product counts 2 operations an entry; backward costs twice the forward,
    except where no gradient is needed: the features have none, and the frozen head has none for its weight.
    """
    d, h = drafter, hidden_size
    slots = blocks * d.block_size
    wide, narrow = d.heads * d.head_dim, d.kv_heads * d.head_dim
    fc = tokens * len(d.taps) * h * h
    context = tokens * h * 2 * narrow * d.layers
    matrices = slots * (2 * h * wide + 2 * h * narrow + 3 * h * d.intermediate_size) * d.layers
    attention = 2 * wide * d.block_size * (visible + slots) * d.layers
    head = blocks * (d.block_size - 1) * h * vocab_size
    return 2.0 * (2 * fc + 3 * (context + matrices + attention) + 2 * head)
