"""A target replica's part in a run: take token batches, give feature batches."""

from collections.abc import Callable, Iterator

import torch

from paceline import blocks
from paceline.records import FeatureBatch, TokenBatch
from paceline.runtime.gate import Gate
from paceline.target.feature_cache import FeatureCache
from paceline.target.load import TargetFacts, fingerprint
from paceline.target.model import FeatureTarget

_IDLE = "waiting for data"


class TargetReplica:
    """One copy of the target on one device. `doing` says what it works on, for a message if it fails."""

    def __init__(
        self,
        index: int,
        device: str,
        *,
        facts: TargetFacts,
        taps: tuple[int, ...],
        dtype: torch.dtype,
        wire: torch.dtype,
        largest: TokenBatch,
        source: Iterator[TokenBatch],
        cache: FeatureCache,
        deliver: Callable[[FeatureBatch], None],
        gate: Gate,
    ) -> None:
        self.name, self.device, self.doing = f"target replica {index}", device, ""
        self._facts, self._taps, self._dtype, self._wire = facts, taps, dtype, wire
        self._largest, self._source, self._cache = largest, source, cache
        self._deliver, self._gate = deliver, gate

    def load(self) -> None:
        """Load the weights."""
        self._revision = fingerprint(self._facts.folder)  # of what is loaded now, not of what was looked at before
        self._target = FeatureTarget(self._facts, self._taps, dtype=self._dtype, device=self.device)

    def warm(self) -> dict[str, object]:
        """Rehearse the largest micro-batch and return what the drafter must agree with."""
        self.doing = f"the largest micro-batch {tuple(self._largest.input_ids.shape)}"
        features_TD = self._features(self._largest)
        self.doing = ""
        return {
            "target revision": self._revision,
            "taps": self._taps,
            "feature width": features_TD.shape[1],
            "feature dtype": str(features_TD.dtype),
            "rope theta": self._facts.rope_theta,
        }

    def run(self) -> None:
        """Serve token batches until the stream ends."""
        self.doing = _IDLE
        for tokens in self._source:
            self.doing = f"micro-batch {tokens.seq} (rows {', '.join(map(str, tokens.samples[:8]))})"
            with self._gate.work():
                features_TD = self._cache.get(tokens.samples)
                if features_TD is None:
                    features_TD = self._features(tokens)
                    self._cache.put(tokens.samples, features_TD)
            self._deliver(FeatureBatch(tokens, features_TD, blocks.context_positions(tokens.lengths)))
            self.doing = _IDLE  # the next micro-batch is built while it is asked for, and may be what fails
        self.doing = ""

    def _features(self, tokens: TokenBatch) -> torch.Tensor:
        return self._target.features(tokens).to(self._wire)
