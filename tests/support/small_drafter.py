"""A small drafter whose values no loader falls back to, and of which target it is."""

from paceline.checkpoint.drafter import DrafterMeta
from paceline.config import DrafterSettings

H, V, N_L = 48, 128, 9
SHAPE = DrafterSettings(
    block_size=8,
    layers=2,
    taps=(1, 4, 7),
    mask_token_id=101,
    heads=6,
    kv_heads=2,
    head_dim=16,
    intermediate_size=80,
    rope_theta=500000.0,
    rms_norm_eps=1e-5,
)
META = DrafterMeta(
    settings=SHAPE,
    target="somewhere/target",
    target_revision="r",
    num_target_layers=N_L,
    hidden_size=H,
    vocab_size=V,
    max_positions=4096,
    steps=7,
)
