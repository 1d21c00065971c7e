"""One epoch of the loader's micro-batches as training takes them, for a measurement of nothing but the loader."""

from collections.abc import Iterator

from paceline.config import DataSettings, TrainSettings
from paceline.data.loader import micro_batches
from paceline.data.mixture import open_mixture
from paceline.data.prefetch import Prefetch

BLOCK_SIZE = 16


def epoch_of(folder: str) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of the samples in each micro-batch of an epoch, which a thread builds ahead."""
    data, train = DataSettings(dataset=folder), TrainSettings(epochs=1)
    mixture = open_mixture(data)
    with Prefetch(micro_batches(mixture, data, train, BLOCK_SIZE), data.prefetch) as stream:
        for batch in stream:
            yield batch.lengths
