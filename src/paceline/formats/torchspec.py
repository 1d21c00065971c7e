"""TorchSpec's layout, read only: model_type "dflash", flat keys, and other names for three tensors.

Its `num_target_layers` counts taps, and `target_num_hidden_layers` the target's layers, the opposite of z-lab's words.
Where it names no taps, they follow from these two by the common formula. It often does not say its block size.
"""

from paceline.drafter.taps import default_taps
from paceline.formats.foreign import ConfigFile, ForeignDrafter
from paceline.formats.qwen3 import read_body

NAMES = {
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
}


def read_torchspec(config: ConfigFile) -> ForeignDrafter:
    """Return what a TorchSpec folder says of its drafter."""
    body = read_body(config, config)
    taps, layers = config.layers("target_layer_ids"), config.whole("target_num_hidden_layers")
    num_taps = config.whole("num_target_layers")
    if taps is None and layers and num_taps:
        if num_taps > layers:
            raise config.refused(f"reads {num_taps:,} of the {layers:,} layers of its target (num_target_layers)")
        taps = default_taps(layers, num_taps)
    return ForeignDrafter(
        layout="TorchSpec",
        block_size=config.whole("block_size"),
        mask_token_id=config.whole("mask_token_id"),
        taps=taps,
        num_target_layers=layers,
        **body,
    )
