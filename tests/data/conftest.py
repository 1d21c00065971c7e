"""A small byte-level tokenizer with ChatML, and datasets made of given rows; nothing comes from the network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from paceline.blocks import anchor_candidates
from paceline.data import store

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = "the sum of two numbers is a number; what is it? it is the answer\n" * 50


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """Return a maker of tokenizers with the same vocabulary; the chat template is ChatML or the given one."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)  # as SmolLM2 and Qwen have it
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>", "<|mask|>"],
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS], trainer)

    def make(template: str | None = CHATML) -> Any:
        copy = Tokenizer.from_str(backend.to_str())
        return PreTrainedTokenizerFast(
            tokenizer_object=copy, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=template
        )

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()


ORIGIN = store.Origin("tiny", "r1", "f" * 64, None, "given ids", 2, [], {}, 0)


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., store.CompletionDataset]:
    """Return a maker of datasets from (ids, prompt length) pairs."""

    def make(rows: list[tuple[list[int], int]], name: str = "dataset") -> store.CompletionDataset:
        with store.writing(tmp_path / name, overwrite=True) as writer:
            for ids, prompt in rows:
                mask = np.arange(len(ids)) >= prompt
                writer.add(np.array(ids), mask, len(anchor_candidates(mask)))
            writer.finish(ORIGIN)
        return store.open_dataset(tmp_path / name)

    return make
