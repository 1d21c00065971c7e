"""A small byte-level tokenizer with ChatML; nothing comes from the network."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

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
