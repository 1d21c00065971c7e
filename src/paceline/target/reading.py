"""What transformers is told, and what it tells, while it reads weights; all threads share its hooks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

DeviceOf = Callable[[str], torch.device]  # of a weight, by its name in the model
GGUF_READER = "transformers.modeling_gguf_pytorch_utils"


def quiet() -> None:
    """Turn off transformers' bars and its note that a trunk leaves the head unread: roles report loading by name."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


@contextmanager
def bars_told_to(on_loaded: Callable[[float], None]) -> Iterator[None]:
    """Let a function learn what transformers would show as a bar; under BUILDING: all threads share the hook."""
    from transformers.utils import logging

    def told(factory: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        bar = factory(*args, **given)
        return _counted(bar, len(args[0]), on_loaded) if given.get("desc") == "Loading weights" else bar

    before = logging.set_tqdm_hook(told)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _counted(items: Iterable[Any], total: int, on_loaded: Callable[[float], None]) -> Iterator[Any]:
    for done, item in enumerate(items):
        on_loaded(done / total)
        yield item


@contextmanager
def put_by_name(device_of: DeviceOf) -> Iterator[None]:
    """Let weights go where a function says when they are read, by their names in the model; under BUILDING.

    transformers asks for each weight's device. It takes an answer from who loads only where accelerate is installed,
    which would put hooks of its own into the model. A version that asks in another way leaves weights on the CPU.
    """
    reading: Any = import_module("transformers.core_model_loading")
    before = getattr(reading, "get_device", None)
    if before is not None:
        reading.get_device = lambda _asked, name, **_: device_of(name)
    try:
        yield
    finally:
        if before is not None:
            reading.get_device = before


@contextmanager
def gguf_bar_told_to(on_loaded: Callable[[float], None]) -> Iterator[None]:
    """Let a function learn what transformers' reader of GGUF files would show as a bar; under BUILDING."""
    reader: Any = import_module(GGUF_READER)

    def told(items: Sequence[Any], **_: Any) -> Iterator[Any]:
        for done, item in enumerate(items):
            on_loaded(done / len(items))
            yield item

    before = reader.tqdm
    reader.tqdm = told
    try:
        yield
    finally:
        reader.tqdm = before
