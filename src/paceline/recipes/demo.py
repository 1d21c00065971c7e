"""`paceline demo`: the whole journey on a small real model, from prompts to an exported drafter."""

import json
import resource
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paceline.data.completions import load_ledger
from paceline.data.prompt_file import Messages, PromptLines
from paceline.observe.console import Console
from paceline.recipes.demo_sizes import SIZES, Size, demo_settings, generate_rows
from paceline.recipes.evaluate import evaluate
from paceline.recipes.evaluate_asked import Asking
from paceline.recipes.export import export
from paceline.recipes.generate import generate_completions
from paceline.recipes.generate_asked import Asked
from paceline.recipes.prepare import prepare_dataset
from paceline.recipes.prompts import split_prompts
from paceline.recipes.train import train
from paceline.records import RunError, UserError, many
from paceline.runtime.profile import cache_folder
from paceline.target.load import describe
from paceline.target.smollm2 import fetch_smollm2

SEED = 0
NOTE = "DEMO.txt"  # marks a folder as the demo's own


def demo(run: Path, *, size_name: str, console: Console) -> dict[str, Any]:
    """Run every stage and write RUN/report.json. Completions of an earlier demo of the same size are used again."""
    began = time.monotonic()
    size = SIZES[size_name]
    _check_extra()
    _claim(run)
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if size_name == "gpu" and not gpus:
        raise UserError("--size gpu needs a CUDA device and this machine has none. Leave --size out.")
    device = gpus[0] if gpus else "cpu"

    console.stage("1/7 fetch and convert SmolLM2-135M-Instruct")
    folder = fetch_smollm2(cache_folder(), lambda text: console.line(f"  {text}"))
    train_prompts, held_out = (_messages(texts) for texts in split_prompts(size.prompts, size.held_out, SEED))

    console.stage("2/7 generate: the target writes its own completions")
    generated = _generate(run, folder, train_prompts, size, gpus or ["cpu"], console)

    console.stage("3/7 prepare: an Arrow dataset of token ids")
    settings = demo_settings(run, folder, size, gpus)
    with console.progress("prepare") as tick:
        prepared = prepare_dataset(
            [Path(generated["completions"])],
            Path(settings.data.folders[0]),
            target=str(folder),
            revision=None,
            max_length=size.context_slots,
            mask_token_id=settings.drafter.mask_token_id,
            overwrite=True,
            on_progress=tick,
            on_note=console.line,
        )
    console.line(
        f"  {many(prepared['rows'], 'row')}, {prepared['tokens']:,} tokens, quarantined {prepared['quarantined']}"
    )

    console.stage(f"4/7 plan and 5/7 train: target replicas on {', '.join(settings.pipeline.targets)}, drafter beside")
    trained = train(settings, console=console)

    console.stage("6/7 evaluate: speculative decoding of held-out prompts")
    evaluated = evaluate(
        run,
        held_out,
        Asking(size.max_new_tokens),
        device=device,
        dtype="float32",
        rows=size.evaluate_rows,
        timed_prompts=size.timed_prompts,
        untrained_prompts=size.untrained_prompts,
        console=console,
    )

    console.stage("7/7 export: the z-lab layout")
    exported = export(run, None, dtype="float32", overwrite=True)
    report = {
        "size": size_name,
        "target": str(folder),
        **{key: value for key, value in evaluated.items() if key not in ("run", "target")},
        "tokens_generated": generated["tokens_generated"],
        **{key: trained[key] for key in ("train_steps", "loss", "real_anchor_share", "padding_share", "train_s")},
        "export_dir": exported["folder"],
        "wall_s": round(time.monotonic() - began, 1),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    (run / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    if not report["lossless"]:
        raise RunError(
            f"Speculative and plain greedy decoding differ at (prompt, token) {report['first_difference']} in float32: "
            f"two tokens equal within rounding, or a fault of paceline. Please report {run / 'report.json'}."
        )
    return report


def _check_extra() -> None:
    for name in ("gguf", "reasoning_gym"):
        if find_spec(name) is None:  # before the model is fetched
            raise UserError(
                f"`paceline demo` needs the extra `demo`, but {name} is not installed: pip install 'paceline[demo]'."
            )


def _claim(run: Path) -> None:
    """Take a folder for the demo: empty, or an earlier demo's, whose results go so that none outlives its run.

    Raises:
        UserError: the folder holds something else.
    """
    if run.exists() and any(run.iterdir()) and not (run / NOTE).is_file():
        raise UserError(f"{run} (--run-dir) holds something that is no demo. Choose another folder.")
    run.mkdir(parents=True, exist_ok=True)
    (run / NOTE).write_text("This folder belongs to `paceline demo`, which replaces what is in it.\n")
    names = ("drafter", "export", "checkpoints", "events.jsonl", "quarantine.jsonl", "evaluation.json", "report.json")
    more = (*run.glob("evaluation-step-*.json"), *run.glob("events-*.jsonl"))
    for path in (*(run / name for name in names), *more):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _messages(texts: list[str]) -> list[Messages]:
    return [[{"role": "user", "content": text}] for text in texts]


def _generate(
    run: Path, folder: Path, prompts: list[Messages], size: Size, devices: list[str], console: Console
) -> dict[str, Any]:
    """Generate, or go on with what an earlier demo generated from the same prompts with the same target."""
    asked = Asked(
        str(folder), max_new_tokens=size.max_new_tokens, devices=devices, rows=generate_rows(size), max_quarantined=0.0
    )
    place = run / "completions"
    there = load_ledger(place)
    same = {
        "revision": describe(str(folder)).revision,
        "max_new_tokens": size.max_new_tokens,
        "prompts": PromptLines(prompts).sha256(),
    }
    other = there is not None and any(there.asked[key] != value for key, value in same.items())
    return generate_completions(prompts, place, asked, console=console, overwrite=other)
