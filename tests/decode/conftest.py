"""What tests of decoding share."""

from collections.abc import Callable
from typing import Any

import pytest
from fake_server import EOS, MODEL, Fake

from paceline.decode import remote_server
from paceline.decode.remote import KEY_VARIABLE, Limits, Remote
from paceline.decode.sampling import Sampling
from paceline.target.load import TargetFacts, load_tokenizer


@pytest.fixture
def make(tiny: TargetFacts, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Remote]:
    """Make an engine for servers; what it tells is in its `told`. It waits shortly after failures."""
    monkeypatch.setattr(remote_server, "FIRST_WAIT_S", 0.02)
    monkeypatch.setattr("paceline.decode.remote._LOOK_S", 0.01)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    def remote(*fakes: Fake | str, sampling: Sampling | None = None, **more: Any) -> Remote:
        told: list[str] = []
        limits = {name: more.pop(name) for name in Limits.__slots__ if name in more}
        made = Remote(
            [fake if isinstance(fake, str) else fake.url for fake in fakes],
            **{"model": MODEL, "tokenizer": load_tokenizer(str(tiny.folder)), "stop_ids": (EOS,), **more},
            vocab_size=128,
            sampling=sampling or Sampling(),
            limits=Limits(**{"concurrency": 4, **limits}),
            on_note=told.append,
        )
        made.told = told
        return made

    return remote
