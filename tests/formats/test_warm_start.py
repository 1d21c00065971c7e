"""Drafters of other tools: what is taken over, what is told, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_drafter import META, N_L, SHAPE, H, V

from paceline.config import DrafterSettings
from paceline.drafter.model import Drafter
from paceline.formats.folder import INDEX
from paceline.formats.warm_start import WarmStart, open_warm_start
from paceline.formats.zlab import export_zlab
from paceline.records import UserError


def start(folder: Path, settings: DrafterSettings = SHAPE, **changes: Any) -> WarmStart:
    target = {"target": "the/target", "num_layers": N_L, "hidden_size": H, "vocab_size": V} | changes
    return open_warm_start(folder, settings, **target)


def filled(warm: WarmStart, settings: DrafterSettings = SHAPE) -> Drafter:
    return warm.fill(Drafter(settings, H))


def check_equal(found: Drafter, expected: Drafter, dtype: torch.dtype = torch.float32) -> None:
    theirs = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, theirs[name].to(dtype).float()), name


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tree = json.loads((folder / "config.json").read_text())
    change(tree)
    (folder / "config.json").write_text(json.dumps(tree))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# ------------------------------------------------------------------------------------------------- what is taken over


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_what_is_exported_comes_back(request: pytest.FixtureRequest, drafter: Drafter, layout: str) -> None:
    warm = start(request.getfixturevalue(layout))
    check_equal(filled(warm), drafter)
    assert warm.notes == ()
    assert warm.layout == {"zlab": "z-lab", "speculators": "speculators"}[layout]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrower_numbers_come_in_as_float32(drafter: Drafter, tmp_path: Path, dtype: torch.dtype) -> None:
    export_zlab(drafter, META, tmp_path / "e", dtype=dtype, card="", max_shard_bytes=10**9)
    check_equal(filled(start(tmp_path / "e")), drafter, dtype)


def test_several_files(drafter: Drafter, tmp_path: Path) -> None:
    export_zlab(drafter, META, tmp_path / "e", dtype=torch.float32, card="", max_shard_bytes=40_000)
    (tmp_path / "e" / "leftover.safetensors").write_bytes(b"no weights at all")  # no part of the drafter
    warm = start(tmp_path / "e")
    check_equal(filled(warm), drafter)
    assert len(warm.sha256) > 2


def torchspec(folder: Path) -> None:
    """Give a z-lab folder TorchSpec's names and keys, as its draft model and its configuration have them."""
    names = {"fc.weight": "context_proj.weight", "hidden_norm.weight": "context_norm.weight"}
    names |= {"norm.weight": "final_norm.weight"}

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for ours, theirs in names.items():
            tensors[theirs] = tensors.pop(ours)
        tensors["embed_tokens.weight"] = torch.zeros(V, H)

    rewrite(folder, rename)
    tree = json.loads((folder / "config.json").read_text())
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys += ("head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "mask_token_id")
    flat = {key: tree[key] for key in keys}
    flat |= {"model_type": "dflash", "architectures": ["DFlashDraftModel"], "target_num_hidden_layers": N_L}
    flat |= {"num_target_layers": 3, "target_layer_ids": [1, 4, 7], "target_hidden_size": H}
    (folder / "config.json").write_text(json.dumps(flat))


def test_torchspecs_names_and_keys(zlab: Path, drafter: Drafter) -> None:
    torchspec(zlab)
    warm = start(zlab)
    check_equal(filled(warm), drafter)
    assert warm.layout == "TorchSpec"
    assert warm.notes == ("it does not say its block_size; this run has 8 (drafter.block_size)",)


def test_torchspec_without_taps_means_the_common_formula(zlab: Path) -> None:
    torchspec(zlab)
    edit(zlab, lambda tree: tree.update(target_layer_ids=None))
    with pytest.raises(UserError, match=r"need drafter\.taps \[1, 4, 6\], not \[1, 4, 7\]\."):  # 1, 3.5 to even, 6
        start(zlab)
    edit(zlab, lambda tree: tree.update(num_target_layers=10**12))  # and no list of so many is made
    with pytest.raises(UserError, match=r"reads 1,000,000,000,000 of the 9 layers of its target"):
        start(zlab)


@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), 0, True])
def test_numbers_that_are_none(zlab: Path, value: Any) -> None:
    edit(zlab, lambda tree: tree.update(rms_norm_eps=value))
    with pytest.raises(UserError, match=r"must give rms_norm_eps as a positive number, but got .{1,70}\. Correct"):
        start(zlab)


def test_texts_of_others_are_cut_and_printable(zlab: Path) -> None:
    long = "\x1b[31m" + "x" * 5000
    edit(zlab, lambda tree: tree.update(layer_types=["sliding_attention"] * 2, sliding_window=long))
    (note,) = start(zlab).notes
    assert note.isprintable()
    assert len(note) < 150
    edit(zlab, lambda tree: tree.update(hidden_act=long))
    with pytest.raises(UserError) as caught:
        start(zlab)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_taps_that_are_missing_are_asked_for_by_their_key(speculators: Path) -> None:
    edit(speculators, lambda tree: tree.update(aux_hidden_state_layer_ids=None))
    with pytest.raises(UserError, match=r"Add aux_hidden_state_layer_ids to its config\.json\."):
        start(speculators)


def prefixed(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def fused(tensors: dict[str, torch.Tensor]) -> None:
    for i in range(SHAPE.layers):
        for place, parts, whole in (
            ("self_attn", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            ("mlp", ("gate_proj", "up_proj"), "gate_up_proj"),
        ):
            pieces = [tensors.pop(f"layers.{i}.{place}.{part}.weight") for part in parts]
            tensors[f"layers.{i}.{place}.{whole}.weight"] = torch.cat(pieces)


def with_what_is_not_needed(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {"embed_tokens.weight": torch.zeros(V, H), "lm_head.weight": torch.zeros(V, H)}
    tensors |= {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8), "t2d": torch.ones(V, dtype=torch.bool)}


@pytest.mark.parametrize("change", [prefixed, fused, with_what_is_not_needed])
def test_other_spellings_of_the_same_weights(zlab: Path, drafter: Drafter, change: Any) -> None:
    rewrite(zlab, change)
    check_equal(filled(start(zlab)), drafter)


def test_specforges_folder_keeps_its_keys_in_one_place(zlab: Path, drafter: Drafter) -> None:
    """Newer folders name block size, taps and mask token in dflash_config alone, and the base in rope_parameters."""

    def move(tree: dict[str, Any]) -> None:
        for key in ("block_size", "mask_token_id", "target_layer_ids", "rope_theta", "is_causal"):
            del tree[key]

    edit(zlab, move)
    warm = start(zlab)
    check_equal(filled(warm), drafter)
    assert warm.notes == ()


def test_old_z_lab_folders_keep_the_block_size_outside(zlab: Path) -> None:
    edit(zlab, lambda tree: tree["dflash_config"].pop("block_size"))
    assert start(zlab).notes == ()


# --------------------------------------------------------------------------------------------------------- what is told


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"block_size": 16}, "it was trained with blocks of 8; this run has 16 (drafter.block_size)"),
        ({"mask_token_id": 3}, "it was trained with mask token 101; this run has 3 (drafter.mask_token_id)"),
        (
            {"rms_norm_eps": 1e-6},
            "it was trained with an epsilon of 1e-05; this run has 1e-06 (drafter.rms_norm_eps)",
        ),
    ],
)
def test_what_is_the_users_choice_is_told(zlab: Path, drafter: Drafter, changes: dict[str, Any], note: str) -> None:
    settings = SHAPE.model_copy(update=changes)
    warm = start(zlab, settings)
    assert warm.notes == (note,)
    check_equal(filled(warm, settings), drafter)


@pytest.mark.parametrize(
    ("layout", "change", "note"),
    [
        (
            "zlab",
            lambda tree: tree.update(layer_types=["sliding_attention", "full_attention"], sliding_window=2048),
            "it was trained with 1 of 2 layers seeing a window of 2048 tokens",
        ),
        ("zlab", lambda tree: tree.update(is_causal=True), "it was trained with causal attention in its blocks"),
        (
            "zlab",
            lambda tree: (tree.pop("mask_token_id"), tree["dflash_config"].pop("mask_token_id")),
            "it does not say its mask_token_id; this run has 101 (drafter.mask_token_id)",
        ),
        (
            "zlab",
            lambda tree: (tree.pop("rope_theta"), tree.pop("rope_parameters")),
            "it does not say its rotary base; this run has 500000 (drafter.rope_theta)",
        ),
        (
            "speculators",
            lambda tree: tree.update(sample_from_anchor=True),
            "it was trained to predict the token after each slot (sample_from_anchor), not the slot's own",
        ),
        (
            "speculators",
            lambda tree: tree.update(draft_vocab_size=64),
            "it was trained with 64 of the vocabulary's tokens; all of the target's head is used here",
        ),
    ],
)
def test_what_was_trained_otherwise_is_told(
    request: pytest.FixtureRequest, layout: str, change: Any, note: str
) -> None:
    folder = request.getfixturevalue(layout)
    edit(folder, change)
    assert start(folder).notes == (note,)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"hidden_size": 64}, "is for a target of hidden size 48, and the/target (target.model) has 64."),
        ({"vocab_size": 130}, "is for a target with a vocabulary of 128, and the/target (target.model) has 130."),
    ],
)
def test_a_drafter_of_another_target(
    request: pytest.FixtureRequest, layout: str, changes: dict[str, int], end: str
) -> None:
    folder = request.getfixturevalue(layout)
    with pytest.raises(UserError) as error:
        start(folder, **changes)
    assert str(error.value) == f"The drafter of {folder} (train.init_from) {end} Take a drafter of this target."


def test_a_drafter_of_a_target_of_another_depth(zlab: Path) -> None:
    with pytest.raises(UserError, match=r"a target with layers numbering 9, and the/target \(target\.model\) has 12\."):
        start(zlab, num_layers=12)


@pytest.mark.parametrize(
    ("changes", "need"),
    [
        ({"layers": 3}, "drafter.layers 2, not 3"),
        ({"heads": 4}, "drafter.heads 6, not 4"),
        ({"kv_heads": 3}, "drafter.kv_heads 2, not 3"),
        ({"head_dim": 32}, "drafter.head_dim 16, not 32"),
        ({"intermediate_size": 81}, "drafter.intermediate_size 80, not 81"),
        ({"taps": (1, 4)}, "drafter.taps [1, 4, 7], not [1, 4]"),
        ({"taps": (0, 3, 6)}, "drafter.taps [1, 4, 7], not [0, 3, 6]"),
        ({"layers": 1, "heads": 2}, "drafter.layers 2, not 1; drafter.heads 6, not 2"),
    ],
)
@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_other_sizes_say_what_to_set(
    request: pytest.FixtureRequest, layout: str, changes: dict[str, Any], need: str
) -> None:
    folder = request.getfixturevalue(layout)
    with pytest.raises(UserError) as error:
        start(folder, SHAPE.model_copy(update=changes))
    assert str(error.value) == f"Weights of {folder} (train.init_from) need {need}. Set that, or take another drafter."


def test_another_rotary_base(zlab: Path) -> None:
    with pytest.raises(UserError, match=r"has the rotary base 500000, and drafter\.rope_theta, .* is 10000"):
        start(zlab, SHAPE.model_copy(update={"rope_theta": 10000.0}))


CONFIGS: dict[str, tuple[Any, str]] = {
    "no drafter": (
        lambda tree: (tree.pop("dflash_config"), tree.update(architectures=["Qwen3ForCausalLM"])),
        r"is no DFlash drafter: its config\.json has neither dflash_config",
    ),
    "no taps": (
        lambda tree: (tree.pop("target_layer_ids"), tree["dflash_config"].pop("target_layer_ids")),
        r"does not say which of the target's layers its drafter reads",
    ),
    "blocks of one": (
        lambda tree: tree["dflash_config"].update(block_size=1),
        r"has block_size 1, so it drafts nothing",
    ),
    "YaRN": (
        lambda tree: tree.update(rope_scaling={"type": "yarn", "factor": 4.0}),
        r"it scales its rotary positions \('yarn'\)",
    ),
    "part of a head": (
        lambda tree: tree.update(partial_rotary_factor=0.25),
        r"it turns a part of each head only \(partial_rotary_factor\)",
    ),
    "axes": (
        lambda tree: tree["rope_parameters"].update(mrope_section=[1, 2, 3]),
        r"rotary positions of several axes",
    ),
    "scaled embeddings": (
        lambda tree: tree["dflash_config"].update(input_embedding_scale=45.25),
        r"multiplies embeddings by 45\.25, and .* has 1 there\. Take a drafter of this target\.",
    ),
    "capped logits": (
        lambda tree: tree["dflash_config"].update(final_logit_softcapping=30.0),
        r"caps logits at 30 \(0: not\), and .* has 0 there\.",
    ),
    "scaled logits": (
        lambda tree: tree["dflash_config"].update(output_multiplier=0.25),
        r"it sets output_multiplier to 0\.25, which drafters here do not follow",
    ),
    "activation": (lambda tree: tree.update(hidden_act="gelu"), r"has the activation 'gelu'"),
    "a size as text": (
        lambda tree: tree.update(num_hidden_layers="2"),
        r"must give num_hidden_layers as a whole number, but got '2'\.",
    ),
    "a size of none": (
        lambda tree: tree.update(num_attention_heads=0),
        r"must give num_attention_heads as a whole number from 1 up, but got 0\.",
    ),
    "no size": (
        lambda tree: tree.pop("intermediate_size"),
        r"must give intermediate_size as a whole number from 1 up, but it is missing\.",
    ),
    "true as a size": (
        lambda tree: tree.update(hidden_size=True),
        r"must give hidden_size as a whole number, but got True\.",
    ),
    "taps that are no list": (
        lambda tree: tree["dflash_config"].update(target_layer_ids="1,4,7"),
        r"must give dflash_config\.target_layer_ids as a list of layer numbers, but got '1,4,7'\.",
    ),
    "a section that is none": (
        lambda tree: tree.update(dflash_config=[1]),
        r"must give dflash_config as an object, but got \[1\]\.",
    ),
    "a base below zero": (
        lambda tree: tree["rope_parameters"].update(rope_theta=-1.0),
        r"must give rope_parameters\.rope_theta as a positive number, but got -1\.0\.",
    ),
    "another speculator": (
        lambda tree: tree.update(speculators_model_type="eagle3"),
        r"it is a 'eagle3' speculator, and drafters here are DFlash",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations_that_are_refused(zlab: Path, case: str) -> None:
    change, message = CONFIGS[case]
    edit(zlab, change)
    with pytest.raises(UserError, match=message) as error:
        start(zlab)
    check_sentence(error.value, zlab)


def check_sentence(error: UserError, folder: Path) -> None:
    text = str(error)
    assert str(folder) in text
    assert "train.init_from" in text
    assert text.endswith(".")
    assert "\n" not in text


def test_the_embeddings_output_is_no_tap(speculators: Path) -> None:
    edit(speculators, lambda tree: tree.update(aux_hidden_state_layer_ids=[0, 5, 8]))
    with pytest.raises(UserError, match=r"reads the embedding's output as a feature"):
        start(speculators)


def lacking(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["layers.1.mlp.up_proj.weight"]


def lacking_many(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("layers.1.")]:
        del tensors[name]


def extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["candidate_selector.hidden_projection.weight"] = torch.zeros(4, 4)


def biased(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.self_attn.q_proj.bias"] = torch.zeros(96)


def reshaped(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros(H, 2 * H)


def transposed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.0.mlp.down_proj.weight"] = tensors["layers.0.mlp.down_proj.weight"].T.contiguous()


def quantised(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros(H, 3 * H, dtype=torch.int8)


def eight_bits(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].to(torch.float8_e4m3fn)


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][3] = float("inf")


def undefined(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.self_attn.k_norm.weight"][0] = float("nan")


def twice(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["norm.weight"].clone()


def wrongly_fused(tensors: dict[str, torch.Tensor]) -> None:
    fused(tensors)
    tensors["layers.0.self_attn.qkv_proj.weight"] = tensors["layers.0.self_attn.qkv_proj.weight"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacking, r"lacks layers\.1\.mlp\.up_proj\.weight\. "),
        (lacking_many, r"lacks layers\.1\.\S+, layers\.1\.\S+, layers\.1\.\S+ and 8 more\. "),
        (extra, r"no place for: candidate_selector\.hidden_projection\.weight\. "),
        (biased, r"no place for: layers\.0\.self_attn\.q_proj\.bias\. "),
        (reshaped, r"holds fc\.weight in shape \[48, 96\], and the settings \(drafter\) make it \[48, 144\]\."),
        (transposed, r"holds layers\.0\.mlp\.down_proj\.weight in shape \[80, 48\]"),
        (quantised, r"holds fc\.weight as I8, and weights have to be float32, bfloat16 or float16\."),
        (eight_bits, r"holds norm\.weight as F8_E4M3"),
        (infinite, r"holds values that are not finite in norm\.weight\."),
        (undefined, r"holds values that are not finite in layers\.1\.self_attn\.k_norm\.weight\."),
        (twice, r"holds norm\.weight twice, as model\.norm\.weight and as norm\.weight\."),
        (wrongly_fused, r"must hold layers\.0\.self_attn\.qkv_proj\.weight with 160 rows .* found shape \[159, 48\]\."),
    ],
)
def test_weights_that_are_refused(zlab: Path, change: Any, message: str) -> None:
    rewrite(zlab, change)
    with pytest.raises(UserError, match=message) as error:
        start(zlab)
    check_sentence(error.value, zlab)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def torn_config(folder: Path) -> None:
    (folder / "config.json").write_text((folder / "config.json").read_text()[:-30])


def no_utf8(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe")


def a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    torch.save({}, folder / "pytorch_model.bin")
    no_weights(folder)


def truncated(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")


def other_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def index_of_what_is_missing(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": "model-00001-of-00002.safetensors"}}))


def index_of_what_lies_outside(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "other.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": "../other.safetensors"}}))


def damaged_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ["norm.weight"]}')


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {}}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_config, r"has no config\.json\. Name the folder"),
        (torn_config, r"config\.json \(train\.init_from\) cannot be read as JSON"),
        (no_utf8, r"config\.json \(train\.init_from\) cannot be read as JSON"),
        (a_list, r"config\.json \(train\.init_from\) must hold a JSON object, found list\."),
        (no_weights, r"holds no weights: model\.safetensors is missing"),
        (pickled, r"holds its weights pickled only \(pytorch_model\.bin\)"),
        (truncated, r"model\.safetensors \(train\.init_from\) is damaged: .*"),
        (garbage, r"model\.safetensors \(train\.init_from\) is damaged: .*"),
        (other_name, r"holds weights\.safetensors but neither model\.safetensors nor model\.safetensors\.index\.json"),
        (index_of_what_is_missing, r"names 'model-00001-of-00002\.safetensors', which is not in the folder"),
        (index_of_what_lies_outside, r"names '\.\./other\.safetensors', which is not in the folder"),
        (damaged_index, r"index\.json \(train\.init_from\) cannot be read \(AttributeError\)"),
        (empty_index, r"index\.json \(train\.init_from\) names no file\. "),
    ],
)
def test_folders_that_are_refused(zlab: Path, change: Any, message: str) -> None:
    change(zlab)
    with pytest.raises(UserError, match=message) as error:
        start(zlab)
    check_sentence(error.value, zlab)


def test_files_that_are_no_folder(zlab: Path) -> None:
    with pytest.raises(UserError, match=r"^There is no folder .*config\.json \(train\.init_from\)\."):
        start(zlab / "config.json")


def test_weights_that_go_while_the_run_begins(zlab: Path) -> None:
    warm = start(zlab)
    (zlab / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors \(train\.init_from\) cannot be read: "):
        filled(warm)
