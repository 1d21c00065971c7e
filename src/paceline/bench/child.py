"""What is measured in a process of its own, so that nothing else is in its memory: `python -m paceline.bench.child`.

Each function imports what it measures first, then takes times, and returns plain data, which is printed as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def open_and_plan(folder: str) -> dict[str, float]:
    """Open a dataset and plan epochs of it; memory is that of the first time, above what the imports took."""
    from paceline.bench.memory import forget_peak, memory_of
    from paceline.config import DataSettings
    from paceline.data.mixture import open_mixture, plan_epoch

    settings = DataSettings(dataset=folder)
    before = memory_of()
    after: dict[str, float] = {}
    forget_peak()
    opening, planning = [], []
    batches = 0
    for epoch in range(4):
        began = time.perf_counter()
        mixture = open_mixture(settings)
        opened = time.perf_counter()
        order, _ = plan_epoch(mixture, settings, seed=0, epoch=epoch, edges=mixture.edges(settings))
        planning.append(time.perf_counter() - opened)
        opening.append(opened - began)
        batches = len(order)
        after = after or memory_of()
    return {
        "open_s": opening[0],
        "open_again_s": min(opening[1:]),
        "plan_s": planning[0],
        "plan_again_s": min(planning[1:]),
        "resident_mib": after["VmHWM"] - before["VmRSS"],
        "anonymous_mib": after["RssAnon"] - before["RssAnon"],
        "batches": batches,
    }


_LOOKS = 16  # at memory in a pass: at its first micro-batch, and each time so much of it has passed


def load(folder: str, most: str = "0") -> dict[str, Any]:
    """Take one epoch from the loader, or `most` rows of it; memory is looked at in the same places of every pass.

    That is between micro-batches, and not at the end, where nothing of the epoch is held any more. Its peak is that of
    all of it, opening and planning included.
    """
    from paceline.bench.memory import memory_of, own_peak
    from paceline.bench.stream import epoch_of
    from paceline.data.manifest import load_manifest

    total = load_manifest(Path(folder)).rows
    total = min(int(most) or total, total)
    held: list[float] = []
    tokens = rows = batches = 0
    began = time.perf_counter()
    with own_peak() as peak:
        for lengths in epoch_of(folder):
            tokens += sum(lengths)
            rows += len(lengths)
            batches += 1
            while len(held) < _LOOKS and rows * _LOOKS >= total * len(held):
                held.append(memory_of()["RssAnon"])
            if rows >= total:
                break
    seconds = time.perf_counter() - began
    return {
        "rows": rows,
        "tokens": tokens,
        "micro_batches": batches,
        "seconds": seconds,
        "held_mib": held,
        "peak_mib": peak.mib,
    }


def tokenize(target: str, rows: str) -> dict[str, float]:
    """Call the bare tokenizer on the rendered conversations of a JSONL file, on all cores and all in one call.

    Twice: as `tokenizer(texts)`, and its Rust half alone, which is what `prepare` calls.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from paceline.target.load import load_tokenizer

    tokenizer = load_tokenizer(target, None)
    with Path(rows).open(encoding="utf-8") as file:
        texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in file]
    began, cpu_began = time.perf_counter(), time.process_time()
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)
    found = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began}
    tokens = sum(map(len, encoded["input_ids"]))
    del encoded
    began, cpu_began = time.perf_counter(), time.process_time()
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    found |= {"backend_seconds": time.perf_counter() - began, "backend_cpu_s": time.process_time() - cpu_began}
    assert sum(map(len, encodings)) == tokens
    return {"tokens": tokens, **found}


_JOBS: dict[str, Callable[..., dict[str, Any]]] = {"open": open_and_plan, "load": load, "tokenize": tokenize}

if __name__ == "__main__":
    print(json.dumps(_JOBS[sys.argv[1]](*sys.argv[2:])))
