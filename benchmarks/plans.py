"""What the machine can do by `paceline doctor`'s probes, and what `paceline plan --gpus` predicts from it.

The plan reads real files: a dataset of one length and a target's folder, whose weights are a hole in the file system.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts import Found
from transformers import Qwen3ForCausalLM

from paceline.bench.pipeline import PipelineWork
from paceline.bench.sparse import write_sparse_dataset
from paceline.config import RunSettings
from paceline.config_file import dump_settings
from paceline.observe.console import Console
from paceline.probe.entries import BY_NAME
from paceline.probe.examine import examine
from paceline.probe.finding import Bench
from paceline.recipes.plan import plan_epoch
from paceline.recipes.plan_gpus import Asked, plan_gpus
from paceline.runtime.profile import Rates, make_profile, save_profile, this_machine

PROBES = ("torch", "rates", "peer-copies", "nccl", "capture-two-gpus", "shared-compile")
_DRAWING = 8  # weights that are drawn at once
BESIDE = 2  # layers behind the deepest tap, which are in a target's files


def probe(device: str, profile: Path, found: Found) -> None:
    """Run the probes of several GPUs, add a row for each, and write a profile that `plan` reads."""
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(devices=0, cache=scratch, runs=scratch, scratch=scratch)
        results = examine(bench, lambda entry: print(f"  {entry.name}", flush=True), [BY_NAME[name] for name in PROBES])
    for result in results:
        allowed = ("ok", "degraded") if result.name == "shared-compile" else ("ok",)
        met = result.verdict in allowed if result.verdict != "skipped" or device == "cuda" else None
        found.add(f"{result.name}: {result.verdict}", result.observed, " or ".join(allowed), met)
    numbers = {result.name: result.numbers for result in results}
    rates = {name: Rates(**one) for name, one in numbers["rates"].get("rates", {}).items()}
    made = make_profile(
        this_machine(),
        compiles=True,
        captures=device == "cuda",
        flex_attention={},
        peer_gb_s=tuple(map(tuple, numbers["peer-copies"].get("gb_s", ()))),
        rates=rates or {"cpu": _cpu_rates()},
    )
    save_profile(made, profile)


def _cpu_rates() -> Rates:
    """Return what stands in for a GPU's rates."""
    a = torch.ones(256, 256)
    began = time.perf_counter()
    for _ in range(8):
        a @ a
    rate = 8 * 2 * 256**3 / (time.perf_counter() - began)
    return Rates(bf16_tflops=rate / 1e12, fp8_tflops=None, memory_gb_s=5.0)


def predicted(
    work: PipelineWork, folder: Path, profile: Path, *, gpus: Sequence[int], per_step: int
) -> dict[int, list[dict[str, Any]]]:
    """Return the splits that `paceline plan --gpus N` lists for the samples of `work`, by N; see bench.predict."""
    shape, fp8 = work.shape, "on" if work.fp8 else "off"
    write_target(work, folder / "target", real=False)
    (length,) = set(shape.lengths)
    write_sparse_dataset(folder / "dataset", np.full(64 * len(shape.lengths), length, dtype=np.int32))
    settings = RunSettings.model_validate(
        {
            "run_dir": str(folder / "run"),
            "target": {"model": str(folder / "target"), "dtype": work.dtype, "fp8": fp8},
            "drafter": shape.drafter.model_dump(),
            "data": {"dataset": str(folder / "dataset"), "align": length, "token_budget": length * len(shape.lengths)},
            "train": {**shape.train_settings(work.dtype).model_dump(), "batches_per_step": per_step, "fp8": fp8},
        }
    )
    path = folder / "RUN.yaml"
    path.write_text(dump_settings(settings), encoding="utf-8")
    found: dict[int, list[dict[str, Any]]] = {}
    for count in gpus:
        asked = Asked(count, profile, None, None)
        told = plan_epoch(
            path,
            [],
            seed=None,
            console=Console(json=True),
            asked=lambda run, buckets, share, console, asked=asked: plan_gpus(asked, run, buckets, share, console),
        )
        found[count] = told["gpus"]["splits"]
    return found


def write_target(work: PipelineWork, folder: Path, *, real: bool) -> int:
    """Write a target of this shape as its files would be and return their bytes; `real` weights are random numbers."""
    config = work.target.config(work.target.layers + BESIDE)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in Qwen3ForCausalLM(config).state_dict().items()}
    return _write_weights(folder / "model.safetensors", shapes, work.numbers, real=real)


def _write_weights(path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, *, real: bool) -> int:
    """Write weights in safetensors' form, front to back, a few in memory at a time; not `real` ones are a hole."""
    size, at, header = dtype.itemsize, 0, {}
    for name, shape in shapes.items():
        end = at + size * int(np.prod(shape))
        header[name] = {"dtype": {2: "BF16", 4: "F32"}[size], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with path.open("wb") as file, ThreadPoolExecutor(_DRAWING) as pool:
        file.write(len(told).to_bytes(8, "little") + told)
        order = list(enumerate(shapes.values())) if real else []
        for first in range(0, len(order), _DRAWING):
            for drawn in pool.map(lambda one: _drawn(*one, dtype), order[first : first + _DRAWING]):
                file.write(drawn.view(torch.uint8).numpy().data)
        file.truncate(8 + len(told) + at)
    return 8 + len(told) + at


def _drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a weight's random numbers; those of norms are ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype)
    return (0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)
