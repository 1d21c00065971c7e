"""What `paceline train` reads: looked at before a model is loaded, then one stream of micro-batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from paceline.config import RunSettings
from paceline.data import loader
from paceline.data.held_out import HeldOut, open_held_out, with_held_out
from paceline.data.mixture import Mixture, first_table, open_mixture
from paceline.data.plan import BucketTable
from paceline.data.set_aside import BadRow, SetAside
from paceline.data.store import CompletionDataset
from paceline.data.verify import BackgroundCheck, watched
from paceline.observe.console import Console
from paceline.recipes.evaluator_memory import check_room_on_device
from paceline.recipes.plan import print_buckets
from paceline.recipes.train_checks import check_inputs
from paceline.recipes.train_prompts import Prompts, open_prompts
from paceline.records import TokenBatch, many
from paceline.target.load import TargetFacts, describe


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Target and data of a run, which fit one another and the settings."""

    facts: TargetFacts
    mixture: Mixture
    held_out: HeldOut | None
    buckets: BucketTable
    total_steps: int
    largest: TokenBatch  # that a target will see
    prompts: Prompts | None  # that are decoded while the run trains

    @property
    def datasets(self) -> list[CompletionDataset]:
        """All that is read, held out or not."""
        return [*self.mixture.datasets, *([self.held_out.dataset] if self.held_out else [])]

    def bad_rows(self) -> Iterator[tuple[CompletionDataset, BadRow]]:
        """Yield the rows that are in no epoch, as known before any is read."""
        for mixture in (self.mixture, *([self.held_out.mixture] if self.held_out else [])):
            yield from mixture.bad_rows()


def open_inputs(settings: RunSettings, console: Console, took: Callable[[str], None]) -> Inputs:
    """Open target and data and refuse what does not fit. `took` is told what was done.

    Raises:
        UserError: the first rule that is broken.
    """
    data, train, block_size = settings.data, settings.train, settings.drafter.block_size
    facts = describe(settings.target.model, settings.target.revision)
    vocab_size = facts.vocab_size
    mixture = open_mixture(data, vocab_size=vocab_size)
    held_out = open_held_out(settings.evaluate, data, train, block_size, first_row=len(mixture), vocab_size=vocab_size)
    check_inputs(settings, facts, mixture, console, held_out.dataset if held_out else None)
    took("dataset opened")
    buckets = first_table(mixture, data, seed=train.seed)
    total_steps = loader.count_steps(mixture, data, train)
    largest = loader.largest_micro_batch(mixture, data, train, block_size)
    if held_out:
        largest = max(largest, held_out.largest(), key=lambda batch: batch.input_ids.numel())
    prompts = None
    if settings.evaluate.device is not None:
        prompts = open_prompts(settings, facts, held_out, console)
        check_room_on_device(settings, facts, prompts)
    took("planned")
    return Inputs(facts, mixture, held_out, buckets, total_steps, largest, prompts)


def show_inputs(inputs: Inputs, settings: RunSettings, console: Console) -> None:
    """Say what there is."""
    print_buckets(inputs.buckets, console)
    if inputs.held_out:
        every = settings.evaluate.every_steps
        more = ", before every true acceptance" if inputs.prompts else ""
        console.line(
            f"  {many(inputs.held_out.rows, 'row')} held out, looked at every {every:,} steps{more} and at the end"
        )
    if inputs.prompts:
        evaluate = settings.evaluate
        console.line(
            f"  {many(len(inputs.prompts.ids), 'prompt')} of {inputs.prompts.source} decoded on {evaluate.device} "
            f"every {many(evaluate.tau_every_steps, 'step')} and at the end"
        )


def stream(
    settings: RunSettings,
    inputs: Inputs,
    check: BackgroundCheck,
    *,
    first_step: int,
    looked: int | None,
    set_aside: SetAside,
    on_whole: Callable[[int], None],
) -> Iterator[TokenBatch]:
    """Return the run's micro-batches from `first_step` on, held-out ones among them. `check`, `on_whole`: see watched.

    `looked` is after how many steps the last held-out loss was. If another was due before `first_step`, as where the
    part of the run before this one broke between the two, it comes first. Rows that turn out to be bad go to
    `set_aside`.
    """
    devices = (*settings.pipeline.targets, *settings.pipeline.drafters)
    pin = any(torch.device(name).type == "cuda" for name in devices)
    batches = loader.micro_batches(
        inputs.mixture,
        settings.data,
        settings.train,
        settings.drafter.block_size,
        first_step=first_step,
        pin=pin,
        set_aside=set_aside,
    )
    cut_short = inputs.total_steps == settings.train.max_steps
    batches = watched(batches, check, cut_short=cut_short, on_whole=on_whole)
    due = partial(settings.evaluate.due, total_steps=inputs.total_steps)
    owed = first_step if first_step and due(first_step) and looked != first_step else None
    return with_held_out(batches, inputs.held_out, due, owed=owed, pin=pin, on_bad=set_aside.add)
