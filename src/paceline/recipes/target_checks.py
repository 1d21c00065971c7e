"""What a target's architecture rules out for the data of a run, refused by `plan` and `train`."""

from paceline.config import DataSettings
from paceline.data.plan import ROUND
from paceline.records import UserError
from paceline.target.conventions import Conventions


def check_data(conventions: Conventions, data: DataSettings, name: str) -> None:
    """Refuse data whose samples would change one another's features.

    Raises:
        UserError: samples share rows and layers would carry one over into the next, or the longest would turn the
            others by other angles.
    """
    limit = conventions.rope_limit
    # Padding counts, too: rows are rounded up. In a shared row positions begin anew with each sample.
    step = {"bucketed": data.align, "trimmed": ROUND, "packed": 1}[data.layout]
    longest = -(-data.max_length // step) * step
    if limit and longest > limit:
        raise UserError(
            f"data.max_length must not exceed {limit:,} for {name}, whose rope_type turns all samples of a batch by "
            f"other angles once a row is longer, got {data.max_length:,} (rows of {longest:,}). Lower it, or use "
            "another target."
        )
    if data.layout == "packed" and conventions.memory:
        raise UserError(
            f"data.layout packed lays samples end to end, and {name} has layers ({', '.join(conventions.memory)}) that "
            "may carry one over into the next. Set data.layout to trimmed or bucketed."
        )
