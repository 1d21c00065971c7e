"""A key/value cache whose rows advance on their own, for any transformers decoder with plain attention.

The stock caches write all rows at one place; in continuous batching and in speculative decoding every row is
somewhere else. Here tokens are written at their own positions, stale entries behind a row's end are masked by
position and overwritten later, so taking back rejected tokens costs nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache


class RowCache(Cache):
    """Keys and values `[rows, heads, slots, width]` of every layer, allocated at the first write.

    `aim` says which rows and positions the next forward writes and how many slots it reads; `aim_at_start` is for
    prompts, which read nothing but themselves.
    """

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__(layers=[])
        self.rows, self.slots = rows, slots
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._rows: slice | Tensor = slice(0, 0)
        self._places: tuple[Tensor, Tensor] | None = None  # None: rows are written from their start
        self._reach = 0

    def aim(self, first_row: int, positions_RT: Int[Tensor, "R T"], reach: int) -> Bool[Tensor, "R 1 T reach"]:
        """Choose rows first_row.. and their write positions; return who sees whom among the first `reach` slots."""
        count = len(positions_RT)
        self._rows = slice(first_row, first_row + count)
        row_ids = torch.arange(first_row, first_row + count, device=positions_RT.device)
        self._places = (row_ids[:, None], positions_RT)
        self._reach = min(reach, self.slots)
        slots = torch.arange(self._reach, device=positions_RT.device)
        return (slots <= positions_RT[..., None])[:, None]

    def aim_at_start(self, rows_R: Int[Tensor, " R"]) -> None:
        """Choose any rows, whose tokens are written from slot 0 on; what follows a shorter prompt is written over."""
        self._rows, self._places = rows_R, None

    def update(
        self, key_states: Float[Tensor, "R M T E"], value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values; return what is read: the aimed rows' first slots (views), or what came."""
        if layer_idx == len(self.keys):
            for store, states in ((self.keys, key_states), (self.values, value_states)):
                # Zeros: a masked slot is multiplied by nothing, which must not be nothing times infinity.
                store.append(states.new_zeros(self.rows, states.shape[1], self.slots, states.shape[3]))
        return self._write(self.keys[layer_idx], key_states), self._write(self.values[layer_idx], value_states)

    def _write(self, store: Tensor, states: Tensor) -> Tensor:
        if self._places is None:
            store[:, :, : states.shape[2]][self._rows] = states
            return states
        rows, positions = self._places
        store[rows, :, positions] = states.transpose(1, 2)
        return store[self._rows, :, : self._reach]

    @torch.no_grad()
    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy rows onto others, so that running rows stay side by side when some end."""
        for store in (*self.keys, *self.values):
            at = torch.tensor([sources, destinations], device=store.device)
            store[at[1]] = store[at[0]]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions and mask are always passed, nothing is inferred from the cache."""
        return 0
