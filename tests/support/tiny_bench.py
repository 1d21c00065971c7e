"""A target of 50 words and a drafter's shape, in the place of those that `bench decode` measures."""

import pytest
from transformers import LlamaConfig

from paceline.bench import decode, generate


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `bench decode` measure them."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    monkeypatch.setattr(generate, "smollm2_config", lambda: config)
    monkeypatch.setattr(decode, "SMALL", {"layers": 2, "block_size": 4, "taps": (0, 2, 3), "mask_token_id": 3})
