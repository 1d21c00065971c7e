"""Which targets are found and which are refused, in one sentence."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.records import UserError
from paceline.target.load import (
    TargetFacts,
    describe,
    load_causal,
    load_ends,
    load_tokenizer,
    load_trunk,
    resolve,
)


def test_facts_of_a_folder(tiny: TargetFacts, tied: TargetFacts) -> None:
    assert (tiny.num_layers, tiny.hidden_size, tiny.vocab_size, tiny.head_dim) == (6, 64, 128, 16)
    assert (tied.heads, tied.kv_heads, tied.head_dim, tied.eos_ids) == (3, 1, 16, (2,))
    assert tiny.revision != tied.revision


def test_a_changed_weight_file_changes_the_revision(tiny_folder: Path, tmp_path: Path, tiny: TargetFacts) -> None:
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    assert describe(str(copy)).revision == tiny.revision
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert describe(str(copy)).revision != tiny.revision
    data[-5] ^= 1
    weights.write_bytes(data)
    assert describe(str(copy)).revision == tiny.revision
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert describe(str(copy)).revision != tiny.revision


def test_an_untied_target_without_a_head_is_refused(tiny: TargetFacts, tiny_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="no lm_head.weight although its config does not tie it"):
        load_ends(describe(str(copy)))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no target folder .*nowhere"):
        resolve(str(tmp_path / "nowhere"))


def test_a_hub_id_needs_a_revision_and_its_absence_offline_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no folder some-org/some-model here. Give the target's folder, or with a"):
        resolve("some-org/some-model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="neither a folder, nor in the local cache"):
        resolve("some-org/some-model", "0123abcd")


def test_a_hub_id_in_the_local_cache_needs_no_network(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    snapshot = tmp_path / "models--some-org--tiny" / "snapshots" / commit
    shutil.copytree(tiny_folder, snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert resolve("some-org/tiny", commit) == snapshot


@pytest.mark.parametrize(
    ("missing", "said"), [("*.safetensors", "no \\*.safetensors"), ("config.json", "no config.json")]
)
def test_an_incomplete_folder_is_refused(tiny_folder: Path, tmp_path: Path, missing: str, said: str) -> None:
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    for path in copy.glob(missing):
        path.unlink()
    with pytest.raises(UserError, match=said):
        resolve(str(copy))


def test_a_folder_without_a_tokenizer_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(UserError, match="no tokenizer.json"):
        load_tokenizer(str(copy))


def test_a_config_that_is_not_json_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    (copy / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as a model configuration"):
        describe(str(copy))


def test_loading_in_several_threads_at_once_gives_whole_models(tied: TargetFacts, tiny: TargetFacts) -> None:
    """transformers builds models under process-wide switches (default dtype, init, meta device)."""
    failed: list[BaseException] = []

    def work(which: int) -> None:
        try:
            facts, dtype = ((tied, torch.bfloat16), (tiny, torch.float32), (tied, torch.float32))[which % 3]
            for _ in range(4):
                expected = load_file(facts.folder / "model.safetensors")
                trunk = load_trunk(facts, 2, dtype=dtype, device="cpu")
                assert torch.equal(trunk.embed_tokens.weight, expected["model.embed_tokens.weight"].to(dtype))
                assert {p.dtype for p in trunk.parameters()} == {dtype}
                ends = load_ends(facts)
                assert torch.equal(ends.embed_VH, expected["model.embed_tokens.weight"])
                model = load_causal(facts, dtype=dtype, device="cpu")
                assert torch.equal(model.lm_head.weight, ends.head_VH.to(dtype))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    assert torch.get_default_dtype() == torch.float32
    model = load_causal(tied, dtype=torch.float32, device="cpu")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_how_far_loading_is_is_told(tiny: TargetFacts, capfd: pytest.CaptureFixture[str]) -> None:
    shares: list[float] = []
    trunk = load_trunk(tiny, 2, dtype=torch.float32, device="cpu", on_loaded=shares.append)
    whole = 1 + 6 * 11 + 1  # embedding, eleven tensors a layer, norm
    assert len(list(trunk.parameters())) == 1 + 3 * 11
    assert shares == pytest.approx([done / whole for done in range(whole)])
    assert capfd.readouterr() == ("", "")
    load_trunk(tiny, 2, dtype=torch.float32, device="cpu")
    assert len(shares) == whole, "who loads next is not told to the one before"
