"""What a decode step must read, by hand, and the whole measurement on a tiny shape."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from paceline.bench import generate
from paceline.cli import app


def tiny(tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_each_weight_once_and_both_halves_of_each_slot(tied: bool) -> None:
    model = LlamaForCausalLM(tiny(tied)).bfloat16()
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24 + 2 * 16
    assert generate.read_bytes(model) == (2 * (3 * layer + 16 + 50 * 16), 2 * 3 * 2 * 4 * 2)


def test_the_command_measures_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "smollm2_config", lambda: tiny(True))
    monkeypatch.setattr(generate, "PROMPT_TOKENS", (3, 9))
    monkeypatch.setattr(generate, "_copy_bandwidth", lambda device: 1e9)
    options = ["--device", "cpu", "--rows", "4", "--prompts", "6", "--tokens", "5", "--against", "2", "--json"]
    done = CliRunner().invoke(app, ["bench", "generate", *options])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert (result["rows"], result["prompts"], result["tokens"]) == (4, 6, 5)
    assert result["same_completions"] == 6
    assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["transformers_tokens_per_s"], abs=0.01)
    assert result["roofline_share"] > 0
    assert result["prefill_share"] + result["decode_share"] < 1
    assert torch.get_default_dtype() == torch.float32


def test_their_batch_is_what_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "bench_generate", lambda work, console: {"batch": work.against_batch})
    for options, batch in ((["--rows", "4"], 4), (["--rows", "4", "--prompts", "6"], 6), (["--against", "0"], 0)):
        done = CliRunner().invoke(app, ["bench", "generate", "--device", "cpu", "--json", *options])
        assert json.loads(done.stdout) == {"batch": batch}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--continuous", "--sampled"],
            "--continuous measures generate_batch with greedy decoding, got --sampled too. Leave one or the other out.",
        ),
        (["--captured"], "--captured needs a GPU (--device), got cpu. Leave it out, or name a GPU."),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "generate", "--device", "cpu", *options])
    assert str(done.exception) == message
