"""What can be said of a micro-batch that was trained on, for who looks into a step that went wrong.

Shapes: T tokens, D feature width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.records import Suspect


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """One micro-batch as it was trained on; the numbers are on the device until they are read."""

    samples: tuple[int, ...]
    features_sum: Tensor
    sums_2: Tensor  # loss, weight

    def read(self) -> Suspect:
        """Return the numbers (waits for the device)."""
        loss_sum, weight_sum = self.sums_2.tolist()
        features_sum = int(self.features_sum.item()) % 2 ** (8 * self.features_sum.itemsize)
        return Suspect(self.samples, features_sum, loss_sum, weight_sum)


def checksum(features_TD: Tensor) -> Tensor:
    """Return the sum of the bytes, taken as whole numbers of 64 bits and modulo 2**64: int64, exact in any order.

    Where a row holds no whole number of these, of 32 or 16 bits. It tells whether features were the same, not which
    token's differ. Summed in their own format, because torch would copy them into a wider one first.
    """
    row = features_TD.shape[1] * features_TD.element_size()
    words = next(kind for kind in (torch.int64, torch.int32, torch.int16) if row % kind.itemsize == 0)
    return features_TD.view(words).sum(dtype=words)
