"""Breaks steps of a run: their loss is not a number, or loss or gradients are many times what they were."""

import torch

from paceline.records import FeatureBatch
from paceline.train.step import DrafterStep


def inject(steps: dict[int, str]) -> None:
    """Break the last micro-batch that a rank gets of these steps as said: nan, loss or norm."""
    load, micro = DrafterStep.load, DrafterStep.micro

    def loaded(self: DrafterStep, batch: FeatureBatch) -> None:
        self.poison = steps.get(batch.tokens.step) if batch.tokens.closes_step else None
        if self.poison == "nan":
            features_TD = batch.features_TD.clone()
            features_TD[len(features_TD) // 2] = float("nan")
            batch = FeatureBatch(batch.tokens, features_TD, batch.positions_T)
        load(self, batch)

    def run(self: DrafterStep) -> None:
        micro(self)
        if self.poison == "loss":
            self.sums[0] *= 1000
            self.micro_sums[0] *= 1000
        elif self.poison == "norm":
            with torch.no_grad():
                self.gradients *= 1000

    DrafterStep.load, DrafterStep.micro = loaded, run
