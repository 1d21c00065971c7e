"""What the device knows of the rows that are decoded: their tokens, how far they are and when they end.

Everything lies in buffers that stay where they are, so a step over them can be captured, and nothing in a step waits
for the device. Shapes: R rows, N entering rows, T padded prompt length, W leading rows that a step advances, S slots.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor


class Rows:
    """Tokens of R rows by position, and for each the place of its newest token, its last place and whether it ended."""

    def __init__(self, rows: int, slots: int, stop_ids: Sequence[int], device: torch.device) -> None:
        self.ids_RS = torch.zeros(rows, slots, dtype=torch.int64, device=device)
        self.place_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.end_R = torch.zeros_like(self.place_R)
        self.noise_R = torch.zeros_like(self.place_R)
        self.ended_R = torch.ones(rows, dtype=torch.bool, device=device)
        self._stop_E = torch.tensor(list(stop_ids), dtype=torch.int64, device=device)
        # Where the host reads how far the rows are: pinned, so that the copy does not hold the host up.
        self._seen_2R = torch.zeros(2, rows, dtype=torch.int64, pin_memory=device.type == "cuda")

    def enter(
        self,
        rows_N: Int[Tensor, " N"],
        ids_NT: Int[Tensor, "N T"],
        place_N: Int[Tensor, " N"],
        end_N: Int[Tensor, " N"],
        noise_N: Int[Tensor, " N"],
        token_N: Int[Tensor, " N"],
    ) -> None:
        """Start rows with a prompt and their first token, which stands at `place`; they may go on to `end`."""
        self.ids_RS[:, : ids_NT.shape[1]][rows_N] = ids_NT
        self.ids_RS[rows_N, place_N] = token_N
        self.place_R[rows_N] = place_N
        self.end_R[rows_N] = end_N
        self.noise_R[rows_N] = noise_N
        self.ended_R[rows_N] = self._stops(token_N) | (place_N >= end_N)

    def newest(self, width: int) -> Int[Tensor, " W"]:
        """Return the newest token of the first `width` rows."""
        return self.ids_RS[:width].gather(1, self.place_R[:width, None])[:, 0]

    def advance(self, token_W: Int[Tensor, " W"]) -> None:
        """Append a token to each of the leading rows that has not ended."""
        width = len(token_W)
        place_W, ended_W = self.place_R[:width], self.ended_R[:width]
        kept_W = torch.where(ended_W, self.newest(width), token_W)  # an ended row writes its last token once more
        place_W += (~ended_W).long()
        self.ids_RS[:width].scatter_(1, place_W[:, None], kept_W[:, None])
        ended_W |= self._stops(kept_W) | (place_W >= self.end_R[:width])

    def _stops(self, token_N: Tensor) -> Tensor:
        return (token_N[:, None] == self._stop_E).any(1)

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy rows onto others; the sources have ended from now on."""
        source_N, destination_N = torch.tensor([sources, destinations], device=self.place_R.device)
        for buffer in (self.ids_RS, self.place_R, self.end_R, self.noise_R, self.ended_R):
            buffer[destination_N] = buffer[source_N]
        self.ended_R[source_N] = True

    def look(self) -> tuple[list[bool], list[int]]:
        """Wait for the device; return for each row whether it has ended and the place of its newest token."""
        self._seen_2R.copy_(torch.stack((self.ended_R.long(), self.place_R)), non_blocking=True)
        wait(self.place_R.device)
        ended, places = self._seen_2R.tolist()
        return [bool(flag) for flag in ended], places

    def fetch(self, rows: Sequence[int], longest: int) -> Callable[[], list[list[int]]]:
        """Take the first `longest` tokens of rows as they are now; what is returned waits for them and lists them."""
        wanted = self.ids_RS[torch.tensor(rows, device=self.ids_RS.device), :longest]
        if not wanted.is_cuda:
            return wanted.tolist
        host = torch.empty(wanted.shape, dtype=wanted.dtype, pin_memory=True).copy_(wanted, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(wanted.device))

        def read() -> list[list[int]]:
            copied.synchronize()
            return host.tolist()

        return read


def wait(device: torch.device) -> None:
    """Wait until this thread's stream has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
