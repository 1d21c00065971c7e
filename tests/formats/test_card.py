"""The README.md of an export: what a reader is told, and that commands in it are commands."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.checkpoint.drafter import DrafterMeta
from paceline.config import RunSettings
from paceline.formats.card import model_card

EVALUATION = {
    "tau_trained": 3.14159,
    "tau_pooled": 3.0,
    "prompts": 32,
    "temperature": 0.0,
    "dtype": "float32",
    "lossless": True,
    "per_slot_acceptance": [1.0, 0.8, 0.75],
}


def card(meta: DrafterMeta, layout: str = "zlab", **more: Any) -> str:
    said: dict[str, Any] = {"target": "org/target", "revision": "abc", "settings": None, "provenance": {}}
    return model_card(meta, layout, Path("out dir"), **{**said, "evaluation": None, **more})


def commands(text: str) -> list[list[str]]:
    blocks = [part.split("```", 1)[0] for part in text.split("```sh\n")[1:]]
    return [shlex.split(block.replace("\\\n", " ")) for block in blocks]


def test_served_commands_count_as_each_server_counts(meta: DrafterMeta) -> None:
    vllm, sglang = commands(card(meta))
    assert vllm[:5] == ["vllm", "serve", "org/target", "--revision", "abc"]
    told = json.loads(vllm[vllm.index("--speculative-config") + 1])
    assert told == {"method": "dflash", "model": "out dir", "num_speculative_tokens": 7}
    assert sglang[sglang.index("--speculative-num-draft-tokens") + 1] == "8"
    assert sglang[sglang.index("--speculative-algorithm") + 1] == "DFLASH"
    assert sglang[sglang.index("--speculative-draft-model-path") + 1] == "out dir"
    assert sglang[sglang.index("--revision") + 1] == "abc"


def test_sglang_is_not_promised_for_the_layout_it_does_not_read(meta: DrafterMeta) -> None:
    text = card(meta, "speculators")
    assert [words[0] for words in commands(text)] == ["vllm"]
    assert "SGLang does not read this layout" in text


def test_what_was_measured(meta: DrafterMeta) -> None:
    text = card(meta, evaluation=EVALUATION)
    assert "| acceptance length τ, mean over prompts | 3.142 |" in text
    assert "| output equal to plain decoding | yes |" in text
    near = card(meta, evaluation={**EVALUATION, "dtype": "bfloat16", "near_ties": 3})
    assert "| output equal to plain decoding | yes, but for 3 answers parting at a near tie |" in near
    assert "| accepted up to slot 1, 2, … | 0.80 0.75 |" in text
    assert "Not measured" in card(meta)


def test_how_it_was_made(meta: DrafterMeta) -> None:
    settings = RunSettings.model_validate(
        {
            "run_dir": "r",
            "target": {"model": "org/target", "revision": "abc"},
            "drafter": meta.settings.model_dump(),
            "data": {"dataset": "d", "max_length": 3072},
        }
    )
    provenance = {
        "dataset": [
            {"folder": "d", "rows": "rows1", "longest": 900},
            {"folder": "e", "rows": "rows2", "longest": 3071},
        ],
        "packages": {"torch": "2.13.0", "numpy": None},
        "init": {"folder": "old", "sha256": {"model.safetensors": "0abc"}},
    }
    text = card(meta, settings=settings, provenance=provenance)
    for line in (
        "| `train.lr` | 0.0006 |",
        "| data | `d`, rows `rows1` |",
        "| data | `e`, rows `rows2` |",
        "| started from | `old`: model.safetensors sha256 `0abc` |",
        "| made with | torch 2.13.0 |",
        "- Trained on samples of at most 3,071 tokens; acceptance falls beyond that. The target goes to 4,096.",
    ):
        assert line in text.splitlines()
    assert "`train.max_steps`" not in text  # not set


@pytest.mark.parametrize("target", ["org/target", "/models/my target"])
def test_the_front_matter_names_a_hub_id_only_and_no_licence(meta: DrafterMeta, target: str) -> None:
    hub = not target.startswith("/")
    text = card(meta, target=target, revision="abc" if hub else None)
    front = yaml.safe_load(text.split("---")[1])
    assert front == {"tags": ["dflash", "speculative-decoding"]} | ({"base_model": target} if hub else {})
    assert commands(text)[0][2] == target


def test_a_blocks_size_is_the_drafters(meta: DrafterMeta) -> None:
    other = replace(meta, settings=meta.settings.model_copy(update={"block_size": 2}))
    assert '"num_speculative_tokens": 1' in card(other)
    assert "Tokens drafted at once: 1." in card(other)
