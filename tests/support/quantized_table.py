"""What works with each kind of quantized target and what is refused; the checks are those of families of targets.

Run as a program it writes the second table of docs/targets.md anew.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantized_targets import QUANTIZED, Quantized, family_of, save_quantized
from target_matrix import CHECKS, DOCUMENT, Examined

from paceline.records import UserError
from paceline.target.load import describe

BEGIN, END = "<!-- quantized: begin -->", "<!-- quantized: end -->"
COMMAND = ".venv/bin/python tests/support/quantized_table.py"
COLUMNS = {name: CHECKS[name] for name in ("features", "ends, rope, heads", "training", "decoding")}


def examined(one: Quantized, place: Path) -> Examined:
    """The quantized target, whose stock model holds what its weights are worth."""
    folder, stock = save_quantized(one, place)
    target = Examined(family_of(one), folder)
    target.stock = lambda dtype: stock.to(dtype)  # type: ignore[method-assign]
    return target


def row_of(one: Quantized, place: Path) -> str:
    """Return a row of the table; every check raises where something else is found than the stock model gives."""
    target = examined(one, place)
    for check in COLUMNS.values():
        check(target)
    cells = [one.method, one.stored, one.family, one.takes or "–", *["works"] * len(COLUMNS)]
    return f"| {' | '.join(cells)} |"


def _method(method: str, **more: Any) -> Callable[[Path], str]:
    def change(folder: Path) -> str:
        path = folder / "config.json"
        told = json.loads(path.read_text()) | {"quantization_config": {"quant_method": method, **more}}
        path.write_text(json.dumps(told))
        return str(folder)

    return change


def _files(*names: str) -> Callable[[Path], str]:
    def change(folder: Path) -> str:
        (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_bytes(b"GGUF")
        return str(folder)

    return change


# What is refused for its configuration, and so by `init`, `plan` and `train`.
REFUSED: dict[str, Callable[[Path], str]] = {
    "torchao": _method("torchao"),
    "gptq of 3 bits": _method("gptq", bits=3),
    "awq gemv": _method("awq", bits=4, version="gemv"),
    "rotations": _method("compressed-tensors", config_groups={"g": {}}, transform_config={"config_groups": {"R1": {}}}),
    "2:4 sparsity": _method(
        "compressed-tensors", config_groups={"g": {}}, sparsity_config={"format": "sparse-24-bitmask"}
    ),
    "a file": lambda folder: str(folder / "model.gguf"),
    "several files": _files("model-00001-of-00002.gguf", "model-00002-of-00002.gguf"),
}


def reason_of(name: str, tiny: Path) -> str:
    """Return what is said of a target that is refused; `tiny` is a folder that the caller gives away."""
    target = REFUSED[name](tiny)
    try:
        describe(target)
    except UserError as refused:
        return f"- {refused}".replace(str(tiny), "TARGET")
    raise AssertionError(f"{name} was not refused")


def write(document: Path = DOCUMENT) -> None:
    """Write the table and its reasons anew."""
    from families import FAMILIES, save

    names = ["method", "weights", "tried with", "takes", *COLUMNS]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    for one in QUANTIZED:
        with tempfile.TemporaryDirectory() as place:
            lines.append(row_of(one, Path(place)))
    lines += ["", "What is refused, and why:", ""]
    for name in REFUSED:
        with tempfile.TemporaryDirectory() as place:
            lines.append(reason_of(name, save(FAMILIES[0], Path(place))))
    head, _, rest = document.read_text().partition(BEGIN)
    document.write_text("\n".join([head + BEGIN, *lines, END]) + rest.partition(END)[2])


if __name__ == "__main__":
    from transformers.utils import logging

    logging.disable_progress_bar()
    write()
    sys.exit(0)
