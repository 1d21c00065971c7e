"""What `paceline train` refuses of train.fp8 before it loads a model."""

import torch

from paceline.config import RunSettings
from paceline.drafter.float8 import check_sizes, product_sizes
from paceline.records import UserError
from paceline.runtime.compiling import Policy
from paceline.target.products import check_fp8


def check_train_fp8(settings: RunSettings, hidden_size: int, policy: Policy) -> None:
    """Refuse products in fp8 where the drafter's devices, its sizes or the policy do not allow them.

    Raises:
        UserError: train.fp8 asks for what cannot be had.
    """
    if settings.train.fp8 != "on":
        return
    for device in settings.pipeline.drafters:
        if torch.device(device).type != "cuda":
            raise UserError(
                f"train.fp8: on needs CUDA devices in pipeline.drafters, got {device}. Set train.fp8 to off."
            )
        check_fp8(torch.device(device), "train.fp8")
    if policy == "eager":
        raise UserError(
            "train.fp8: on needs train.policy compiled or captured, and auto became eager (see `paceline doctor`). "
            "Set one of them, or train.fp8 to off."
        )
    check_sizes(product_sizes(settings.drafter, settings.train, hidden_size))
