"""The verb `prepare`: conversations in, a dataset of tokenized completions out."""

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from paceline.data import chat, rows, sources, store
from paceline.records import UserError
from paceline.target import load


def prepare(
    inputs: list[Path],
    out: Path,
    *,
    target: str,
    revision: str | None,
    max_length: int,
    on_long: Literal["refuse", "truncate"] = "refuse",
    mask_token_id: int | None = None,
    on_bad: Literal["quarantine", "stop"] = "quarantine",
    overwrite: bool = False,
    on_progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Tokenize the inputs' rows into the dataset `out` and return a summary (plain data).

    Bad rows go to `<out>.quarantine.jsonl` beside the dataset with their reasons; `on_bad="stop"` makes the first of
    them an error. `on_progress` gets rows done and rows in all.

    Raises:
        UserError: an input cannot be read, the place is taken, or no row is left.
    """
    # 1. Everything that can fail early: the place, the inputs, the target.
    out = out if out.name else out.absolute()  # `.` has no name to put the quarantine beside
    store.check_place(out, overwrite=overwrite)
    files = [sources.inspect_file(path) for path in sources.find_files(inputs)]
    facts = load.describe(target, revision)
    if mask_token_id is not None and mask_token_id >= facts.vocab_size:
        raise UserError(
            f"--mask-token-id must be a row of the target's embedding (0..{facts.vocab_size - 1}), got {mask_token_id}."
        )
    tokenizer = load.load_tokenizer(target, revision)
    encoder = chat.ChatEncoder(tokenizer)
    template = tokenizer.chat_template and chat.chat_template(tokenizer)
    limits = rows.RowLimits(max_length, on_long, mask_token_id, facts.vocab_size)

    # 2. Row by row into the store.
    truncated = 0
    quarantine_path = out.with_name(f"{out.name}.quarantine.jsonl")
    with (
        closing(rows.Quarantine(quarantine_path, stop=on_bad == "stop")) as quarantine,
        store.writing(out, overwrite=overwrite) as writer,
    ):
        for sample in rows.read_samples(files, encoder, limits, quarantine, on_progress):
            writer.add(sample.input_ids, sample.loss_mask, sample.candidates)
            truncated += sample.truncated
        if writer.rows == 0:
            raise UserError(_nothing_left(inputs, quarantine))
        origin = store.Origin(
            target=facts.name,
            target_revision=facts.revision,
            tokenizer=store.tokenizer_fingerprint(tokenizer),
            chat_template=hashlib.sha256(template.encode()).hexdigest() if template else None,
            mask_rule=encoder.mask_rule,
            mask_token_id=mask_token_id,
            sources=[asdict(file) for file in files],
            quarantined=dict(quarantine.counts),
            truncated=truncated,
        )
        manifest = writer.finish(origin)

    # 3. What came of every row.
    return {
        "dataset": str(out),
        "rows_read": manifest.rows + quarantine.counts.total(),
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "supervised_tokens": manifest.supervised_tokens,
        "longest": manifest.longest,
        "truncated": truncated,
        "quarantined": dict(quarantine.counts),
        "quarantine": str(quarantine_path) if quarantine.counts else None,
        "fingerprint": manifest.fingerprint,
    }


def _nothing_left(inputs: list[Path], quarantine: rows.Quarantine) -> str:
    names = ", ".join(map(str, inputs))
    if not quarantine.counts:
        return f"{names} holds no rows, so there is nothing to prepare. Give a file with rows."
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in quarantine.counts.most_common())
    return f"No row of {names} can be used ({reasons}). See {quarantine.path} for each of them."
