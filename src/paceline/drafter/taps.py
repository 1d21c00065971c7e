"""Which of the target's layers a drafter reads where nobody says."""

from paceline.records import UserError, many


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Return the tapped decoder layers (0-based): evenly from the 2nd to the third-to-last layer.

    The formula is the one of the DFlash reference (arXiv 2602.06036): `round(1 + i * (N - 4) / (m - 1))` with halves
    rounded to even, and `N // 2` for a single tap.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    taps = tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))
    if len(set(taps)) < num_taps:
        raise UserError(
            f"A target of {many(num_target_layers, 'layer')} has no {many(num_taps, 'distinct tap')}. Ask for "
            "fewer taps."
        )
    return taps
