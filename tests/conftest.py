"""Tiny random targets and what hangs on them. Everything is on the CPU and comes from seeds."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does, before torch is loaded

import checked  # noqa: F401  (replaces the import hook's wrapper before anything of paceline is imported)
import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paceline.blocks import anchor_candidates
from paceline.checkpoint.saver import Saver
from paceline.config import DrafterSettings
from paceline.data.manifest import Origin, tokenizer_fingerprint
from paceline.data.store import CompletionDataset, open_dataset
from paceline.data.writer import writing
from paceline.target.load import TargetFacts, describe, load_tokenizer

# The same examples on every run: what is red once stays red until it is mended.
settings.register_profile("paceline", derandomize=True, deadline=None)
settings.load_profile("paceline")

# Who is started in the background ignores Ctrl-C, and so would every process that a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup lets them ignore

VOCAB = 128
MASK = 3
EOS = 2


def _save_tokenizer(folder: Path) -> None:
    words = {"<unk>": 0, "<pad>": 1, "<eos>": EOS, "<mask>": MASK, **{f"w{i}": i for i in range(4, VOCAB)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", mask_token="<mask>", unk_token="<unk>", chat_template=template
    ).save_pretrained(folder)


@pytest.fixture(autouse=True)
def no_machine_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever `paceline doctor` found on this machine does not decide what the tests run."""
    monkeypatch.setattr("paceline.recipes.train_checks.profile_path", lambda: tmp_path / "no-machine.json")


@pytest.fixture
def every_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """No save is left out because the one before it is under way, however slow this machine's disk is."""
    between = Saver.between_steps

    def settled(self: Saver, *args: Any, **more: Any) -> None:
        self.settle()
        between(self, *args, **more)

    monkeypatch.setattr(Saver, "between_steps", settled)


@pytest.fixture
def traceable() -> Iterator[None]:
    """Switch the checks of shapes off, which torch.compile cannot trace."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 6 layers with an untied head. Weights are larger than usual, so its answers vary."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
    )
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 5 layers whose head is its embedding."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> TargetFacts:
    return describe(str(tiny_folder))


@pytest.fixture(scope="session")
def tied(tied_folder: Path) -> TargetFacts:
    return describe(str(tied_folder))


@pytest.fixture(scope="session")
def shape() -> DrafterSettings:
    """A drafter of two layers for the tiny Qwen3."""
    return DrafterSettings(
        block_size=4,
        layers=2,
        taps=(0, 2, 4),
        mask_token_id=MASK,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        rope_theta=10000.0,
    )


def save_rows(folder: Path, rows: list[tuple[list[int], int]], origin: Origin) -> Path:
    """Write a dataset from (ids, prompt length) pairs."""
    with writing(folder, overwrite=True) as writer:
        for line, (ids, prompt) in enumerate(rows, 1):
            mask = np.arange(len(ids)) >= prompt
            writer.add(np.array(ids, dtype=np.int64), mask, len(anchor_candidates(mask)), line=line)
        writer.complete(origin)
    return folder


@pytest.fixture
def write_dataset(tmp_path: Path, tiny_folder: Path) -> Callable[..., Path]:
    """Return a writer of a dataset for the tiny target from (ids, prompt length) pairs."""

    def write(rows: list[tuple[list[int], int]], name: str = "dataset") -> Path:
        fingerprint = tokenizer_fingerprint(load_tokenizer(str(tiny_folder)))
        origin = Origin(str(tiny_folder), "r", fingerprint, None, "given ids", MASK, [], {}, 0)
        return save_rows(tmp_path / name, rows, origin)

    return write


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., CompletionDataset]:
    """Return a maker of datasets of nobody's target from (ids, prompt length) pairs."""
    origin = Origin("tiny", "r1", "f" * 64, None, "given ids", 2, [], {}, 0)

    def make(rows: list[tuple[list[int], int]], name: str = "dataset") -> CompletionDataset:
        return open_dataset(save_rows(tmp_path / name, rows, origin))

    return make


@pytest.fixture
def random_rows() -> list[tuple[list[int], int]]:
    """24 samples of 8 to 40 tokens with prompts of 2 to 5; no token is the mask."""
    rng = np.random.default_rng(0)
    return [(rng.integers(4, VOCAB, rng.integers(8, 41)).tolist(), int(rng.integers(2, 6))) for _ in range(24)]
