"""The verb `prepare`: conversations in, a dataset of tokenized completions out; or a dataset's checksums checked."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint.folder import free_bytes
from paceline.data import chat, completions, exclude, prepare, sources, verify, workshop, writer
from paceline.data.manifest import Origin, tokenizer_fingerprint
from paceline.data.pieces import Job
from paceline.data.rows import RowLimits
from paceline.data.set_aside import without_anchors
from paceline.data.store import open_dataset
from paceline.records import UserError
from paceline.target import load


def prepare_dataset(
    inputs: list[Path],
    out: Path,
    *,
    target: str,
    revision: str | None,
    max_length: int,
    on_long: Literal["refuse", "truncate"] = "refuse",
    mask_token_id: int | None = None,
    options: chat.ChatOptions | None = None,
    exclude_sets: Sequence[Path] = (),
    on_bad: Literal["quarantine", "stop"] = "quarantine",
    max_quarantined: float = 0.01,
    workers: int = 1,
    overwrite: bool = False,
    on_progress: Callable[[int, int | None], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Tokenize the inputs' rows into the dataset `out` and return a summary (plain data).

    Bad rows go to `<out>.quarantine.jsonl` beside the dataset with their reasons; `on_bad="stop"` makes the first of
    them an error, and so does a share of them above `max_quarantined`. `on_progress` gets rows done and rows in all,
    `on_note` a warning that comes before an error; other notes stand in the summary.

    Raises:
        UserError: an input cannot be read, the place is taken, too many rows are bad, or none is left.
        RunError: the disk is full or a process died.
    """
    # 1. Everything that can fail early: the place, the target, the inputs.
    out = out if out.name else out.absolute()  # `.` has no name to put the quarantine beside
    paths = sources.find_files(inputs)
    workshop.check_apart([*inputs, *paths], exclude_sets, out)
    facts = load.describe(target, revision)
    if mask_token_id is not None and mask_token_id >= facts.vocab_size:
        raise UserError(
            f"--mask-token-id must be a row of the target's embedding (0..{facts.vocab_size - 1}), got {mask_token_id}."
        )
    job = Job(
        chat=chat.ChatEncoder(load.load_tokenizer(target, revision), options or chat.ChatOptions()),
        limits=RowLimits(max_length, on_long, mask_token_id, facts.vocab_size),
        exclude=exclude.read_eval_sets(exclude_sets) if exclude_sets else None,
        folder=str(workshop.workshop_of(out)),
        stop_at_bad=on_bad == "stop",
    )
    files = [sources.inspect_file(path) for path in paths]
    sums = {path: file.sha256 for path, file in zip(paths, files, strict=True)}
    completions.check_sources(sums, tokenizer_fingerprint(job.chat.tokenizer), facts.name)
    origin = _origin(facts.name, facts.revision, job, files)
    # 2. The dataset, found or made.
    found = None
    if not overwrite:
        found = prepare.find_prepared(out, origin.recipe, max_quarantined=max_quarantined, stop_at_bad=job.stop_at_bad)
        if found is None:
            writer.check_place(out, overwrite=False)
    if found is None:
        _tell_room(paths, out, on_note)
    done = found or prepare.make(
        job,
        files,
        out,
        origin,
        workers=workers,
        max_quarantined=max_quarantined,
        overwrite=overwrite,
        on_progress=on_progress,
        on_note=on_note,
    )
    return _summary(out, done, job, found=found is not None)


def verify_datasets(
    folders: list[Path], on_progress: Callable[[int, int | None], None] = lambda done, total: None
) -> dict[str, Any]:
    """Read every byte of the datasets and compare it with their manifests; return a summary.

    Raises:
        UserError: a dataset cannot be opened, has no checksums, or a shard is damaged (it is named).
    """
    total = done = 0
    datasets = [open_dataset(folder) for folder in folders]
    for dataset in datasets:
        total += len(dataset.manifest.shards)
    for dataset in datasets:
        for shard in dataset.manifest.shards:
            verify.check_shard(dataset.folder, shard)
            done += 1
            on_progress(done, total)
        verify.check_counts(dataset)
    return {
        "datasets": [str(folder) for folder in folders],
        "rows": sum(len(dataset) for dataset in datasets),
        "shards": total,
        "bytes": sum(shard.bytes for dataset in datasets for shard in dataset.manifest.shards),
        "rows_without_anchors": sum(len(without_anchors(dataset)) for dataset in datasets),
        "whole": True,
    }


def _tell_room(paths: Sequence[Path], out: Path, on_note: Callable[[str], None]) -> None:
    """Say early where the disk may not do: a token takes 4 bytes and a text about as many."""
    place = next(path for path in (out, *out.absolute().parents) if path.is_dir())
    free, needed = free_bytes(place), sum(path.stat().st_size for path in paths)
    if free < needed:
        on_note(
            f"Warning: the disk of {out} has {free / 2**20:,.0f} MiB free, and the inputs have {needed / 2**20:,.0f}: "
            "a dataset takes about as much, so it may not fit. What was finished is used again if it does not."
        )


def _origin(target: str, revision: str, job: Job, files: list[sources.SourceFile]) -> Origin:
    tokenizer = job.chat.tokenizer
    template = tokenizer.chat_template and chat.chat_template(tokenizer)
    origin = Origin(
        target=target,
        target_revision=revision,
        tokenizer=tokenizer_fingerprint(tokenizer),
        chat_template=hashlib.sha256(template.encode()).hexdigest() if template else None,
        mask_rule=job.chat.mask_rule,
        mask_token_id=job.limits.mask_token_id,
        sources=[],
        quarantined={},
        truncated=0,
    )
    return replace(origin, recipe=prepare.recipe_of(job, files, origin))


def _summary(out: Path, done: prepare.Prepared, job: Job, *, found: bool) -> dict[str, Any]:
    manifest, origin = done.manifest, done.manifest.origin
    return {
        "dataset": str(out),
        "rows_read": manifest.rows + sum(origin.quarantined.values()),
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "supervised_tokens": manifest.supervised_tokens,
        "supervised_share": manifest.supervised_tokens / max(manifest.tokens, 1),
        "longest": manifest.longest,
        "truncated": origin.truncated,
        "tokens_cut": origin.tokens_cut,
        "supervised_cut": origin.supervised_cut,
        "quarantined": origin.quarantined,
        "quarantine": str(done.quarantine) if done.quarantine else None,
        "shards": len(manifest.shards),
        "fingerprint": manifest.fingerprint,
        "found": found,
        "eval_prompts": job.exclude.counts if job.exclude else None,
        "notes": [*done.notes, *([job.exclude.counted] if job.exclude else [])],
    }
