"""AdamW's moments of a run of flat weights: their format, and whether they lie on the device or in host memory.

Those in host memory pass through the device in chunks while weights are updated: one is copied in, one is updated and
one is copied back at the same time, on streams of their own, which a CUDA graph takes along. That memory is page-locked
where it lies: torch's own pinned memory is rounded up to a power of two.

Shapes: S entries of the weights, R = S / 256 blocks, I = 256 entries of a block.
"""

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from paceline.records import RunError
from paceline.train.eight_bit import BLOCK, in_blocks
from paceline.train.flat import Flat

Format = Literal["float32", "8bit"]
# Kinds of tensors of a format, by the name under which they are saved, with how many entries share one of them. What is
# called float32 is in the weights' own format, which nothing but a test or a benchmark changes.
KINDS: dict[Format, dict[str, int]] = {
    "float32": {"exp_avg": 1, "exp_avg_sq": 1},
    "8bit": {"exp_avg_codes": 1, "exp_avg_scales": BLOCK, "exp_avg_sq_codes": 1, "exp_avg_sq_scales": BLOCK},
}
CHUNK = 2**24  # entries that pass through the device at once, 64 MiB of a float32 moment: a copy runs at full speed
STAGED = 2  # chunks on the device: one comes in while another goes back


class Moments:
    """Zeros at first. `parts` are the live tensors, in the order of the format's kinds."""

    def __init__(self, weights_S: Float[Tensor, " S"], form: Format, *, offload: bool, compiled: bool = True) -> None:
        """Allocate. `compiled` is whether an update is; else what it makes in passing limits it to chunks.

        In 8 bits it is limited so always: one kernel is made of it on a GPU (see `adamw_pass_8bit`), but that depends
        on the compiler, and what another one would make is as large as the moments that are saved.

        Raises:
            RunError: with `offload`, host memory for them, which a GPU can read, is not to be had.
        """
        device, S = weights_S.device, len(weights_S)
        self._kinds, self._offload, self._device = KINDS[form], offload, device
        self._at_once = S if compiled and form == "float32" and not offload else CHUNK

        def zeros(entries: int, where: torch.device) -> tuple[Tensor, ...]:
            return tuple(
                torch.zeros(entries // each, dtype=_dtype(form, each, weights_S.dtype), device=where)
                for each in self._kinds.values()
            )

        if not offload:
            self.parts = zeros(S, device)
            return
        self._staged = [zeros(min(CHUNK, S), device) for _ in range(STAGED)]
        self._streams: tuple[torch.cuda.Stream, ...] = ()  # in and back
        try:
            # In one piece: two of them could share a page, and a page is locked once.
            formats = [_dtype(form, each, weights_S.dtype) for each in self._kinds.values()]
            sizes = [S // each * kind.itemsize for each, kind in zip(self._kinds.values(), formats, strict=True)]
            self._host = torch.zeros(sum(sizes), dtype=torch.uint8)
            self.parts = tuple(part.view(kind) for part, kind in zip(self._host.split(sizes), formats, strict=True))
            if device.type == "cuda":
                self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device))
                _lock_pages(self._host, device)
        except RuntimeError as error:
            smaller = "" if form == "8bit" else "train.moments to 8bit, or "
            raise RunError(
                f"train.offload: moments needs {moments_bytes(form, S) / 2**30:.1f} GiB of page-locked host memory, "
                f"but the system does not give as much ({str(error).splitlines()[0]}). Set {smaller}train.offload to "
                "off."
            ) from error

    def each(self) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
        """Yield places in the weights and their moments on the device, which are to be updated in place, as `seen`.

        The current stream must be that of the update. On a GPU nothing waits for the device.
        """
        S = len(self.parts[0])
        places = [slice(first, min(first + self._at_once, S)) for first in range(0, S, max(1, self._at_once))]
        if not self._offload:
            for place in places:
                yield place, self._all_seen(self._cut(self.parts, place))
            return
        cuda = bool(self._streams)
        current = torch.cuda.current_stream(self._device) if cuda else None
        gone: list[torch.cuda.Event | None] = [None] * STAGED  # made anew each time: a graph waits for none of before
        if current is not None:
            self._streams[0].wait_stream(current)
        for at, place in enumerate(places):
            there = self._cut(self.parts, place)
            here = self._cut(self._staged[at % STAGED], slice(0, place.stop - place.start))
            with torch.cuda.stream(self._streams[0]) if cuda else nullcontext():
                if (free := gone[at % STAGED]) is not None:
                    self._streams[0].wait_event(free)
                for part, home in zip(here, there, strict=True):
                    part.copy_(home, non_blocking=True)
            if current is not None:
                current.wait_stream(self._streams[0])
            yield place, self._all_seen(here)
            if current is not None:
                self._streams[1].wait_stream(current)
            with torch.cuda.stream(self._streams[1]) if cuda else nullcontext():
                for part, home in zip(here, there, strict=True):
                    home.copy_(part, non_blocking=True)
                gone[at % STAGED] = self._streams[1].record_event() if cuda else None
        if current is not None:
            current.wait_stream(self._streams[1])

    def state(self, flat: Flat, first: int) -> dict[str, Tensor]:
        """Return the live tensors as `kind.weight`; the weights begin at entry `first` of the flat ones.

        Of float32 moments each weight has its own. Codes and scales go by leaf, whose blocks begin with it.
        """
        kept: dict[str, Tensor] = {}
        for (kind, each), part in zip(self._kinds.items(), self.parts, strict=True):
            if "exp_avg" in self._kinds:
                named = flat.named(part, first)
            else:
                named = flat.leaves(part) if each == 1 else flat.blocks(part, each)
            kept |= {f"{kind}.{name}": tensor for name, tensor in named.items()}
        return kept

    def wait(self) -> None:
        """Wait until an update that is under way has put everything back into host memory."""
        if self._offload and self._streams:
            torch.cuda.current_stream(self._device).synchronize()

    def seen(self, x_S: Tensor) -> Tensor:
        """Return weights, or what has an entry for each of them, as an update takes them: a block a row in 8 bits."""
        return in_blocks(x_S) if BLOCK in self._kinds.values() else x_S

    def _all_seen(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            self.seen(part) if each == 1 else part for each, part in zip(self._kinds.values(), parts, strict=True)
        )

    def _cut(self, parts: tuple[Tensor, ...], place: slice) -> tuple[Tensor, ...]:
        return tuple(
            part[place.start // each : place.stop // each]
            for each, part in zip(self._kinds.values(), parts, strict=True)
        )


def moments_bytes(form: Format, entries: int) -> int:
    """Return what moments of so many entries take, in a format that is not a test's."""
    return sum(entries // each * (1 if form == "8bit" and each == 1 else 4) for each in KINDS[form].values())


def _dtype(form: Format, each: int, weights: torch.dtype) -> torch.dtype:
    return weights if form == "float32" else torch.uint8 if each == 1 else torch.float32


def _lock_pages(memory: Tensor, device: torch.device) -> None:
    """Let GPUs copy from and to a tensor while the host goes on, until it is let go."""
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        place = memory.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(place, memory.nbytes, 1))  # 1: for every device
        weakref.finalize(memory, runtime.cudaHostUnregister, place).atexit = False
