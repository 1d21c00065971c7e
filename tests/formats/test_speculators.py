"""The speculators layout and weights in several files, read back as others read them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.drafter import DrafterMeta
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.formats import folder as written_folder
from paceline.formats.folder import is_empty_or_export, read_size
from paceline.formats.speculators import export_speculators
from paceline.formats.zlab import export_zlab
from paceline.records import RunError, UserError

WHERE = {"verifier": "org/target", "verifier_architectures": ["Qwen3ForCausalLM"], "card": "# card\n"}


def test_the_body_and_the_targets_own_ends_are_written(speculators: Path, drafter: Drafter, ends: FrozenEnds) -> None:
    tensors = load_file(speculators / "model.safetensors")
    assert torch.equal(tensors.pop("embed_tokens.weight"), ends.embed_VH)
    assert torch.equal(tensors.pop("lm_head.weight"), ends.head_VH)
    own = dict(drafter.named_parameters())
    assert tensors.keys() == own.keys()
    assert all(torch.equal(tensors[name], own[name]) for name in own)


def test_a_tied_head_is_written_twice(drafter: Drafter, meta: DrafterMeta, ends: FrozenEnds, tmp_path: Path) -> None:
    tied = FrozenEnds(ends.embed_VH, ends.embed_VH)
    out = tmp_path / "e"
    export_speculators(drafter, meta, tied, out, **WHERE, dtype=torch.float32, max_shard_bytes=10**9)
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])


def test_weights_in_several_files_are_the_same_weights(drafter: Drafter, meta: DrafterMeta, tmp_path: Path) -> None:
    out = tmp_path / "e"
    told = export_zlab(drafter, meta, out, dtype=torch.float32, card="# card\n", max_shard_bytes=40_000)
    count = len(told["files"])
    assert count > 2
    assert told["files"] == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert not (out / "model.safetensors").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    own = dict(drafter.named_parameters())
    assert index["weight_map"].keys() == own.keys()
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in own.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(out / file)[name], own[name])
    for file in told["files"]:  # whatever does not fit in one file has one of its own
        tensors = load_file(out / file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 40_000


@pytest.mark.parametrize("change", ["another value", "in another file"])
def test_a_file_of_several_that_differs_is_noticed(
    drafter: Drafter, meta: DrafterMeta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    real = written_folder.save_file

    def save(tensors, path, metadata):
        tensors = {name: value.clone() for name, value in tensors.items()}
        if change == "another value" and "norm.weight" in tensors:
            tensors["norm.weight"][5] += 1
        if change == "in another file" and "norm.weight" not in tensors:
            tensors["norm.weight"] = drafter.norm.weight.detach().clone()
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(written_folder, "save_file", save)
    with pytest.raises(RunError, match="read back differ from the drafter in .*'norm.weight'"):
        export_zlab(drafter, meta, tmp_path / "e", dtype=torch.float32, card="", max_shard_bytes=40_000)
    assert not (tmp_path / "e").exists()


def test_every_layout_that_is_written_is_known_again(
    zlab: Path, speculators: Path, drafter: Drafter, meta: DrafterMeta, tmp_path: Path
) -> None:
    several = tmp_path / "several"
    export_zlab(drafter, meta, several, dtype=torch.float32, card="", max_shard_bytes=40_000)
    older = tmp_path / "older"
    export_zlab(drafter, meta, older, dtype=torch.float32, card="", max_shard_bytes=10**9)
    (older / "README.md").unlink()
    (tmp_path / "empty").mkdir()
    for folder in (zlab, speculators, several, older, tmp_path / "empty"):
        assert is_empty_or_export(folder), folder
        (folder / "notes.txt").write_text("mine")
        assert not is_empty_or_export(folder), folder


def test_an_export_of_several_files_is_replaced_by_one_of_one(
    drafter: Drafter, meta: DrafterMeta, tmp_path: Path
) -> None:
    for size in (40_000, 10**9):
        export_zlab(drafter, meta, tmp_path / "e", dtype=torch.float32, card="", max_shard_bytes=size)
    names = {path.name for path in (tmp_path / "e").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}


def test_a_model_of_another_kind_is_no_export(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for text in ('{"architectures": ["Qwen3ForCausalLM"]}', "[]", "{", '{"architectures": null}'):
        (tmp_path / "config.json").write_text(text)
        assert not is_empty_or_export(tmp_path)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1.5KB", 1500), ("2TB", 2 * 10**12)]
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text, "--max-shard-size") == size


@pytest.mark.parametrize("text", ["", "5", "GB", "0GB", "-1GB", "5GiB", "1e3MB", "nan GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match=r"^--max-shard-size must be a size such as 5GB or 500MB, got "):
        read_size(text, "--max-shard-size")
