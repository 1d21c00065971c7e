"""Load and convert exported drafters with PyPI's `speculators`: `PYTHON peer_speculators.py FOLDER`.

It runs in that package's own virtual environment and imports nothing of paceline.

    FOLDER/request.json           speculators, zlab, target: folders; anchors: places in the sequence, ascending
    FOLDER/request.safetensors    ids [1, S], features [1, S, m * H]
    FOLDER/converted              what the package's converter makes of the z-lab folder
    FOLDER/reply.json             versions; config: the speculators folder as the package reads it; converted: the other
                                  one; auto: what AutoConfig makes of the request's folders; unexpected, missing:
                                  tensors that only a file has, or only the model, of both folders
    FOLDER/reply.safetensors      hidden [1, A * B, H] and logits [1, A * B, V] of the blocks at the anchors;
                                  loaded.NAME and converted.NAME: what both folders are in memory
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.convert.entrypoints import convert_model
from transformers import AutoConfig


def main(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text())
    tensors = load_file(folder / "request.safetensors")
    converted = str(folder / "converted")
    convert_model(request["zlab"], request["target"], "dflash", output_path=converted, validate_device="cpu")
    reply = {
        "versions": {name: version(name) for name in ("speculators", "torch", "transformers")},
        "auto": {name: auto(request[name]) for name in ("zlab", "speculators")},
    }
    out, loading = {}, {}
    for name, place in (("loaded", request["speculators"]), ("converted", converted)):
        model, loading[name] = load(place)
        reply["config" if name == "loaded" else name] = model.config.to_dict()
        out |= {f"{name}.{key}": value.clone() for key, value in model.state_dict().items()}
        if name == "loaded":
            out |= draft(model, tensors["ids"], tensors["features"], request["anchors"])
    reply |= {key: {name: found[key] for name, found in loading.items()} for key in ("unexpected", "missing")}
    save_file({key: value.contiguous() for key, value in out.items()}, folder / "reply.safetensors")
    (folder / "reply.json").write_text(json.dumps(reply, indent=2, default=str) + "\n")


def load(place: str):
    """Return the package's own model, with attention that a CPU has, and what its file had too many or too few."""
    config = SpeculatorModelConfig.from_pretrained(place)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(place, config=config).eval()
    names = set(load_file(Path(place) / "model.safetensors"))
    own = set(model.state_dict())
    return model, {"unexpected": sorted(names - own), "missing": sorted(own - names)}


@torch.inference_mode()
def draft(model, ids, features, anchors) -> dict:
    """Run the package's training forward and keep what its head gets and gives; only the anchors may be drawn."""
    kept = {}
    model.norm.register_forward_hook(lambda module, args, output: kept.update(hidden=output))
    model.lm_head.register_forward_hook(lambda module, args, output: kept.update(logits=output))
    loss_mask = torch.zeros_like(ids)
    loss_mask[:, anchors] = 1
    model(
        hidden_states=features,
        input_ids=ids,
        loss_mask=loss_mask,
        verifier_last_hidden_states=torch.zeros(1, ids.shape[1], model.hidden_size),
        document_ids=torch.zeros_like(ids),
        loss_config={"ce": (lambda logits, targets: logits.sum(-1) * 0, 1.0)},
        max_anchors=len(anchors),
    )
    return {key: value.clone() for key, value in kept.items()}


def auto(place: str) -> str:
    """Return the class that transformers alone takes a folder for, or the error's first sentence."""
    try:
        return type(AutoConfig.from_pretrained(place)).__name__
    except ValueError as error:
        return f"{type(error).__name__}: {str(error).split('. ')[0]}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
