"""`paceline demo`: the whole journey on a small real model, from prompts to an exported drafter."""

import hashlib
import json
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from paceline.config import DataSettings, RunSettings, TargetSettings, TrainSettings
from paceline.data.prompt_file import Messages
from paceline.observe.console import Console
from paceline.recipes.demo_sizes import SIZES, Size
from paceline.recipes.evaluate import evaluate
from paceline.recipes.export import export
from paceline.recipes.generate import generate_completions
from paceline.recipes.init import choose_mask_token, drafter_for, pipeline_for
from paceline.recipes.prepare import prepare
from paceline.recipes.prompts import split_prompts
from paceline.recipes.train import train
from paceline.records import RunError, UserError
from paceline.target.load import describe
from paceline.target.smollm2 import default_cache, fetch_smollm2

SEED = 0


def demo(run: Path, *, size_name: str, console: Console) -> dict[str, Any]:
    """Run every stage and write RUN/report.json. Completions of an earlier demo of the same size are used again."""
    began = time.monotonic()
    size = SIZES[size_name]
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if size_name == "gpu" and not gpus:
        raise UserError("--size gpu needs a CUDA device and this machine has none. Leave --size out.")
    device = gpus[0] if gpus else "cpu"

    console.stage("1/7 fetch and convert SmolLM2-135M-Instruct")
    folder = fetch_smollm2(default_cache(), lambda text: console.line(f"  {text}"))
    train_prompts, held_out = (_messages(texts) for texts in split_prompts(size.prompts, size.held_out, SEED))

    console.stage("2/7 generate: the target writes its own completions")
    generated = _generate(run, folder, train_prompts, size, device, console)

    console.stage("3/7 prepare: an Arrow dataset of token ids")
    settings = demo_settings(run, folder, size, gpus)
    prepared = prepare(
        [Path(generated["completions"])],
        Path(settings.data.dataset),
        target=str(folder),
        revision=None,
        max_length=size.context_slots,
        mask_token_id=settings.drafter.mask_token_id,
        overwrite=True,
    )
    console.line(f"  {prepared['rows']:,} rows, {prepared['tokens']:,} tokens, quarantined {prepared['quarantined']}")

    console.stage("4/7 plan and 5/7 train: two target replicas and a drafter in threads")
    for name in ("drafter", "events.jsonl"):  # an earlier demo's results
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    trained = train(settings, console=console)

    console.stage("6/7 evaluate: speculative decoding of held-out prompts")
    evaluated = evaluate(
        run,
        held_out,
        device=device,
        dtype="float32",
        max_new_tokens=size.max_new_tokens,
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
            f"Speculative decoding changed the target's output at (prompt, token) {report['first_difference']}; see "
            f"{run / 'report.json'}. This is a fault of paceline: please report it."
        )
    return report


def demo_settings(run: Path, folder: Path, size: Size, gpus: list[str]) -> RunSettings:
    """Return the run's settings: on the CPU two target replicas and a drafter, else what the devices allow."""
    facts = describe(str(folder))
    mask = choose_mask_token(facts, None)
    cache = {"feature_cache": "memory", "feature_cache_gib": 2.0 if not gpus else 40.0}
    threads = {"targets": ("cpu", "cpu"), "target_threads": 1, "drafter_threads": 2} if not gpus else {}
    return RunSettings(
        run_dir=str(run),
        target=TargetSettings(model=str(folder)),
        drafter=drafter_for(facts, mask_token_id=mask, taps=size.taps, layers=size.layers, block_size=size.block_size),
        data=DataSettings(
            dataset=str(run / "dataset"),
            token_budget=size.token_budget,
            max_batch=size.max_batch,
            reshuffle="batches",
        ),
        train=TrainSettings(
            epochs=size.epochs,
            context_slots=size.context_slots,
            anchor_slots=size.anchor_slots,
            anchors_per_sample=size.anchors_per_sample,
            batches_per_step=size.batches_per_step,
            optimizer=size.optimizer,
            lr=size.lr,
            logits_mib=1024 if gpus else 64,
        ),
        pipeline=pipeline_for(gpus, **threads, **cache),
    )


def _messages(texts: list[str]) -> list[Messages]:
    return [[{"role": "user", "content": text}] for text in texts]


def _generate(
    run: Path, folder: Path, prompts: list[Messages], size: Size, device: str, console: Console
) -> dict[str, Any]:
    """Generate, or use again what an earlier demo generated from the same prompts with the same target."""
    asked = {
        "target": describe(str(folder)).revision,
        "max_new_tokens": size.max_new_tokens,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }
    note = run / "completions.json"
    if note.is_file():
        known = json.loads(note.read_text())
        if known["asked"] == asked and Path(known["summary"]["completions"]).is_file():
            console.line(f"  used again: {known['summary']['completions']}")
            return dict(known["summary"])
    summary = generate_completions(
        prompts,
        run / "completions.jsonl",
        model=str(folder),
        revision=None,
        device=device,
        dtype="bfloat16",
        max_new_tokens=size.max_new_tokens,
        rows=size.generate_rows,
        console=console,
    )
    note.write_text(json.dumps({"asked": asked, "summary": summary}, indent=2) + "\n")
    return summary


def default_size() -> str:
    """Return gpu where there is one, else cpu."""
    return "gpu" if torch.cuda.is_available() else "cpu"
