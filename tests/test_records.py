"""How counts are said."""

import pytest

from paceline.records import many


@pytest.mark.parametrize(
    ("count", "what", "plural", "said"),
    [
        (0, "row", "", "0 rows"),
        (1, "row", "", "1 row"),
        (2, "row", "", "2 rows"),
        (1, "batch", "batches", "1 batch"),
        (12_000, "batch", "batches", "12,000 batches"),
    ],
)
def test_one_of_something_is_not_several(count: int, what: str, plural: str, said: str) -> None:
    assert many(count, what, plural) == said
