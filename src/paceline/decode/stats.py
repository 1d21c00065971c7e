"""What an engine has done so far, and how to say it in a line."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch


@dataclass(slots=True)
class Stats:
    """Sums since an engine began. Its thread writes them; others may read them at any time."""

    finished: int = 0  # completions
    finished_tokens: int = 0  # tokens of those
    tokens: int = 0  # generated, also of completions that are not finished
    prompt_tokens: int = 0  # read, padding not counted
    padded_tokens: int = 0  # read, padding counted
    prefill_s: float = 0.0  # the device's time
    decode_s: float = 0.0
    steps: int = 0  # decode steps
    row_steps: int = 0  # rows that decode steps computed, ended and empty ones too
    slot_steps: int = 0  # cache slots of rows that went on, summed over steps: what must be read
    captured: int = 0  # CUDA graphs

    @property
    def busy_s(self) -> float:
        """Seconds in which the device had work."""
        return self.prefill_s + self.decode_s


def progress_note(stats: Sequence[Stats], seconds: float, total: int | None = None) -> str:
    """Return tokens/s, the mean length, the time left (where the total is known) and each replica's busy share."""
    finished, tokens = sum(s.finished for s in stats), sum(s.tokens for s in stats)
    parts = [f"{tokens / seconds:,.0f} tokens/s" if seconds else "0 tokens/s"]
    if finished:
        parts.append(f"mean length {sum(s.finished_tokens for s in stats) / finished:.0f}")
        if total is not None:
            minutes, left_s = divmod(round(seconds / finished * (total - finished)), 60)
            parts.append(f"eta {minutes}:{left_s:02d}")
    if len(stats) > 1 and seconds:
        shares = [min(1.0, s.busy_s / seconds) for s in stats]
        parts.append("busy " + " ".join(f"{share:.0%}" for share in shares) + f" (mean {fmean(shares):.0%})")
    return ", ".join(parts)


class Watch:
    """Marks in the device's work and the seconds between them, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> "float | torch.cuda.Event":
        """Return a mark behind all work that this thread gave the device so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, one: "float | torch.cuda.Event", other: "float | torch.cuda.Event") -> float:
        """Return the seconds between two marks, which the device has passed."""
        if isinstance(one, float) or isinstance(other, float):
            return float(other) - float(one)  # type: ignore[arg-type]
        return one.elapsed_time(other) / 1e3
