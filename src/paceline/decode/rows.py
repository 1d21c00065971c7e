"""What the device knows of the rows that are decoded: their tokens, how far they are and when they end.

Everything lies in buffers that stay where they are, so a step over them can be captured, and nothing in a step waits
for the device. Shapes: R rows, N entering rows, T padded prompt length, W leading rows that a step advances, S slots,
B tokens that a step may add to a row.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor


class Rows:
    """Tokens of R rows by position, and for each the place of its newest token, its last place and whether it ended."""

    def __init__(self, rows: int, slots: int, stop_ids: Sequence[int], device: torch.device) -> None:
        self.ids_RS = torch.zeros(rows, slots, dtype=torch.int64, device=device)
        # Where a cycle of speculative decoding began: 1 + the drafts that the target agreed to. 0 elsewhere before the
        # newest token.
        self.cycles_RS = torch.zeros(rows, slots, dtype=torch.int16, device=device)
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
        self.cycles_RS[rows_N] = 0
        self.place_R[rows_N] = place_N
        self.end_R[rows_N] = end_N
        self.noise_R[rows_N] = noise_N
        self.ended_R[rows_N] = self._stops(token_N) | (place_N >= end_N)

    def newest(self, width: int) -> Int[Tensor, " W"]:
        """Return the newest token of the first `width` rows."""
        return self.ids_RS[:width].gather(1, self.place_R[:width, None])[:, 0]

    def note_cycle(self, accepted_W: Int[Tensor, " W"]) -> None:
        """Note how many drafts the cycle accepted that begins at the leading rows' newest tokens. Before `advance`;
        what is noted at the last token of a row that has ended counts for nothing."""
        width = len(accepted_W)
        noted_W1 = (1 + accepted_W).to(self.cycles_RS.dtype)[:, None]
        self.cycles_RS[:width].scatter_(1, self.place_R[:width, None], noted_W1)

    def advance(self, token_WB: Int[Tensor, "W B"], count_W: Int[Tensor, " W"] | None = None) -> None:
        """Append the first `count` tokens (all) to each of the leading rows that has not ended, up to its last place
        and its first stop token. B - 1 slots must be there behind a row's last place."""
        width, most = token_WB.shape
        place_W, ended_W = self.place_R[:width], self.ended_R[:width]
        offset_B = torch.arange(1, most + 1, device=token_WB.device)
        stops_WB = self._stops(token_WB)
        until_stop_W = torch.where(stops_WB, offset_B, most + 1).amin(1)
        added_W = torch.minimum(self.end_R[:width] - place_W, until_stop_W).clamp(max=most)
        if count_W is not None:
            added_W = torch.minimum(added_W, count_W)
        added_W = torch.where(ended_W, 0, added_W)
        # What is not added leaves the slot as it is.
        at_WB = (place_W[:, None] + offset_B).clamp(max=self.ids_RS.shape[1] - 1)
        ids_WS = self.ids_RS[:width]
        ids_WS.scatter_(1, at_WB, torch.where(offset_B <= added_W[:, None], token_WB, ids_WS.gather(1, at_WB)))
        place_W += added_W
        ended_W |= (until_stop_W <= added_W) | (place_W >= self.end_R[:width])

    def _stops(self, tokens: Tensor) -> Tensor:
        return (tokens[..., None] == self._stop_E).any(-1)

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy rows onto others; the sources have ended from now on."""
        source_N, destination_N = torch.tensor([sources, destinations], device=self.place_R.device)
        for buffer in (self.ids_RS, self.cycles_RS, self.place_R, self.end_R, self.noise_R, self.ended_R):
            buffer[destination_N] = buffer[source_N]
        self.ended_R[source_N] = True

    def look(self) -> tuple[list[bool], list[int]]:
        """Wait for the device; return for each row whether it has ended and the place of its newest token."""
        self._seen_2R.copy_(torch.stack((self.ended_R.long(), self.place_R)), non_blocking=True)
        wait(self.place_R.device)
        ended, places = self._seen_2R.tolist()
        return [bool(flag) for flag in ended], places

    def fetch(self, rows: Sequence[int], longest: int) -> "Callable[[], Fetched]":
        """Take the first `longest` places of rows as they are now; what is returned waits for them and lists them."""
        at = torch.tensor(rows, device=self.ids_RS.device)
        wanted = [buffer[at, :longest] for buffer in (self.ids_RS, self.cycles_RS)]
        if not self.ids_RS.is_cuda:
            return lambda: (wanted[0].tolist(), wanted[1].tolist())
        hosts = [torch.empty(w.shape, dtype=w.dtype, pin_memory=True).copy_(w, non_blocking=True) for w in wanted]
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.ids_RS.device))

        def read() -> Fetched:
            copied.synchronize()
            return hosts[0].tolist(), hosts[1].tolist()

        return read


Fetched = tuple[list[list[int]], list[list[int]]]  # for each row its tokens and its notes of cycles, by place


def wait(device: torch.device) -> None:
    """Wait until this thread's stream has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
