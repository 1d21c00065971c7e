"""vLLM's counters of speculative decoding, out of the text of its /metrics."""

import math
import re
from dataclasses import dataclass

DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
GENERATED = "vllm:generation_tokens"
_USED = {DRAFTS, ACCEPTED, PER_POSITION, GENERATED}
_SAMPLE = re.compile(r"^(?P<name>[\w:]+?)(?:_total)?(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\S+)?$")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums over all engines and models of a server, by name and position of a draft (-1: it has none)."""

    sums: dict[tuple[str, int], float]

    def has(self, name: str) -> bool:
        """Return whether the server has such a counter."""
        return any(name == key for key, _ in self.sums)

    def get(self, name: str) -> float:
        """Return a counter without positions; 0 if there is none."""
        return self.sums.get((name, -1), 0.0)

    def since(self, before: "Counters") -> "Counters":
        """Return what was counted after `before`."""
        return Counters({key: value - before.sums.get(key, 0.0) for key, value in self.sums.items()})

    @property
    def fell(self) -> bool:
        """Whether one of a difference's counters was higher before, as after a new start."""
        return any(value < 0 for (name, _), value in self.sums.items() if name in _USED)

    @property
    def drafts(self) -> int:
        """Draft cycles."""
        return round(self.get(DRAFTS))

    @property
    def tau(self) -> float:
        """Pooled acceptance length: accepted drafts a cycle, and the target's own token."""
        return 1 + self.get(ACCEPTED) / self.get(DRAFTS)

    @property
    def per_slot(self) -> tuple[float, ...] | None:
        """[k]: share of cycles whose slots 1..k were all accepted; vLLM's position 0 is slot 1. None: not told."""
        places = sorted(place for name, place in self.sums if name == PER_POSITION)
        if not places:
            return None
        return (1.0, *(self.sums[PER_POSITION, place] / self.get(DRAFTS) for place in places))


def read_counters(text: str) -> Counters:
    """Return the counters of a Prometheus page; lines of other forms and values that are no number are passed over."""
    sums: dict[tuple[str, int], float] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None or not found["name"].startswith("vllm:"):
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        position = _POSITION.search(found["labels"] or "")
        key = found["name"], int(position[1]) if position else -1
        sums[key] = sums.get(key, 0.0) + value
    return Counters(sums)
