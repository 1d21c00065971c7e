"""Which row of the target's embedding stands for what a drafter has yet to write."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.data.manifest import NAME
from paceline.data.store import CompletionDataset, find_token, open_dataset
from paceline.records import UserError
from paceline.target.load import TargetFacts, load_tokenizer


def choose_mask_token(facts: TargetFacts, wanted: int | None, dataset: str | None = None) -> int:
    """Return the mask token: the one asked for, the tokenizer's, a row without a token, or an unused special.

    Where `dataset` is one that `prepare` wrote, it is one that never occurs there.

    Raises:
        UserError: the id is no row of the embedding, it is in the data, or there is no obvious choice.
    """
    data = open_dataset(Path(dataset)) if dataset is not None and (Path(dataset) / NAME).is_file() else None
    if wanted is not None:
        if not 0 <= wanted < facts.vocab_size:
            raise UserError(
                f"--mask-token-id must be a row of the target's embedding (0..{facts.vocab_size - 1}), got {wanted}."
            )
        if (row := _row_with(data, wanted)) is not None:
            raise UserError(
                f"--mask-token-id must never occur in the data, but token {wanted} is in row {row} of {dataset} "
                "(--dataset). Choose another id, or leave it out."
            )
        return wanted
    used = 0
    for token_id in _candidates(facts, load_tokenizer(str(facts.folder))):
        if _row_with(data, token_id) is None:
            return token_id
        used += 1
    but = f" that {dataset} (--dataset) never uses" if used else ""
    raise UserError(
        f"{facts.name} has no spare embedding row and no unused special token for the mask{but}. Name one that never "
        f"occurs in your data with --mask-token-id."
    )


def _candidates(facts: TargetFacts, tokenizer: Any) -> Iterator[int]:
    """Yield ids that no text of the target should hold, those that published drafters would have first.

    Never its padding, which often ends a text as well, nor what ends or begins one.
    """
    if tokenizer.mask_token_id is not None:
        yield tokenizer.mask_token_id
    first_spare = max(tokenizer.get_vocab().values(), default=-1) + 1  # not their number: ids may have gaps
    if first_spare < facts.vocab_size:
        yield first_spare
    template = tokenizer.chat_template or ""
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    named |= set(facts.eos_ids)
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items()):
        if token.special and token_id not in named and token.content not in template:
            yield token_id


def _row_with(data: CompletionDataset | None, token_id: int) -> int | None:
    if data is None or data.manifest.origin.mask_token_id == token_id:  # `prepare` saw to it that it does not occur
        return None
    return find_token(data, token_id)
