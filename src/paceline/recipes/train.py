"""`paceline train`: RUN.yaml in, a trained drafter out; wires dataset, target replicas and drafter in threads."""

from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import store
from paceline.checkpoint.drafter import DrafterMeta, save_drafter, save_provenance
from paceline.checkpoint.folder import claimed, write_whole
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Saved
from paceline.config import RunSettings
from paceline.config_file import dump_settings
from paceline.data import loader
from paceline.data.mixture import Mixture, first_table, open_mixture
from paceline.data.plan import BucketTable
from paceline.data.verify import BackgroundCheck, watched
from paceline.observe.console import Console
from paceline.observe.events import EventLog
from paceline.pipeline.threads import train_in_threads
from paceline.recipes.plan import print_buckets
from paceline.recipes.train_checks import check_inputs, check_run_folder, choose_policy
from paceline.recipes.train_resume import check_room, find_start, fixed_facts
from paceline.recipes.train_stop import StopRequest
from paceline.recipes.train_tell import Teller, Totals
from paceline.records import Interrupted, TokenBatch
from paceline.runtime.compiling import Policy
from paceline.target.load import TargetFacts, describe, load_ends


def train(
    settings: RunSettings, *, console: Console, resume: bool = False, resume_previous: bool = False
) -> dict[str, Any]:
    """Train the drafter that `settings` describe into its run folder and return a summary.

    `resume` goes on from the run's newest checkpoint, and `resume_previous` from one before it if that is damaged.

    Raises:
        Interrupted: a signal ended the run early.
    """
    # 1. Everything that can be refused before a model is loaded.
    run, resume = Path(settings.run_dir), resume or resume_previous
    check_run_folder(run, settings.data.folders, resume=resume)
    facts = describe(settings.target.model, settings.target.revision)
    mixture = open_mixture(settings.data)
    check_inputs(settings, facts, mixture, console)
    buckets = first_table(mixture, settings.data, seed=settings.train.seed)
    total_steps = loader.count_steps(mixture, settings.data, settings.train)
    largest = loader.largest_micro_batch(mixture, settings.data, settings.train, settings.drafter.block_size)
    print_buckets(buckets, console)
    policy = choose_policy(settings, console)

    # 2. The run folder is ours alone. Checksums are compared while the run is under way.
    with claimed(run, tell=console.line), closing(BackgroundCheck(mixture.datasets)) as check:
        check_run_folder(run, settings.data.folders, resume=resume)  # again: its last owner may have left more since
        store.sweep(run)
        fixed = fixed_facts(settings, facts, mixture, total_steps)
        start = find_start(run, fixed, previous=resume_previous, console=console) if resume else None
        check_room(run, settings, facts)
        if start is None:
            _say_what_made_it(run, facts, mixture)
        write_whole(run / "settings.yaml", dump_settings(settings))
        return _run(settings, facts, mixture, buckets, check, largest, fixed, start, policy, console)


def _run(
    settings: RunSettings,
    facts: TargetFacts,
    mixture: Mixture,
    buckets: BucketTable,
    check: BackgroundCheck,
    largest: TokenBatch,
    fixed: dict[str, Any],
    start: Saved | None,
    policy: Policy,
    console: Console,
) -> dict[str, Any]:
    run, total_steps = Path(settings.run_dir), fixed["total_steps"]
    first_step = start.steps if start else 0
    pin = any(torch.device(name).type == "cuda" for name in (*settings.pipeline.targets, *settings.pipeline.drafters))
    batches = loader.micro_batches(
        mixture, settings.data, settings.train, settings.drafter.block_size, first_step=first_step, pin=pin
    )
    # 3. Roles start, agree, work.
    with EventLog(run) as events, console.progress("train", total_steps) as tick:
        totals = Totals(**start.state["totals"]) if start else Totals()
        teller = Teller(settings, total_steps, totals, events=events, console=console, tick=tick)
        _tell_begin(events, settings, buckets, total_steps, start)

        stop = StopRequest(
            settings.checkpoint.grace_s, stopped=teller.stopped, on_asked=teller.on_asked, on_late=teller.on_late
        )
        saver = Saver(
            run,
            settings.checkpoint,
            describe=lambda: {**fixed, "totals": teller.state()},
            tell=teller.on_save,
            stopping=stop,
        )
        cut_short = total_steps == settings.train.max_steps
        try:
            with stop.on_signals():
                with saver:
                    drafter, recompiles = train_in_threads(
                        settings,
                        facts,
                        batches=watched(batches, check, cut_short=cut_short, on_whole=teller.on_whole),
                        largest=largest,
                        total_steps=total_steps,
                        load_ends=lambda: load_ends(facts),
                        policy=policy,
                        on_step=teller.on_step,
                        on_state=teller.on_state,
                        on_recompile=teller.on_recompile,
                        start=start,
                        saver=saver,
                        stopping=stop,
                        on_ready=stop.begin,
                    )
                if totals.steps < total_steps:
                    raise Interrupted(teller.stopped())
                # 4. What was learnt goes to disk.
                folder = save_drafter(run, drafter.state_dict(), _meta(settings, facts, totals.steps))
        except BaseException as error:
            kind = "interrupted" if isinstance(error, KeyboardInterrupt | Interrupted) else "failed"
            events.write(kind, message=str(error) or type(error).__name__)
            raise
        summary = {"run": str(run), "drafter": str(folder), **teller.summary()}
        summary |= {"policy": policy, "recompiles": recompiles, "train_s": teller.seconds()}
        events.write("trained", **summary)
    return summary


def _say_what_made_it(run: Path, facts: TargetFacts, mixture: Mixture) -> None:
    target = {"name": facts.name, "folder": str(facts.folder), "revision": facts.revision}
    made = [{"folder": str(dataset.folder), "rows": dataset.fingerprint} for dataset in mixture.datasets]
    save_provenance(run, target=target, dataset=made[0] if len(made) == 1 else made)


def _tell_begin(
    events: EventLog, settings: RunSettings, buckets: BucketTable, total_steps: int, start: Saved | None
) -> None:
    tree = settings.model_dump(mode="json")
    if start is not None:
        events.write("resumed", steps=start.steps, checkpoint=str(start.folder), settings=tree)
        return
    events.write("started", settings=tree)
    events.write("plan", **buckets.as_dict(), steps=total_steps)


def _meta(settings: RunSettings, facts: TargetFacts, steps: int) -> DrafterMeta:
    return DrafterMeta(
        settings=settings.drafter,
        target=str(facts.folder),
        target_revision=facts.revision,
        num_target_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        steps=steps,
    )
