"""`paceline train`: RUN.yaml in, a trained drafter out; wires dataset, target replicas and drafter in threads."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import store
from paceline.checkpoint.best import Best
from paceline.checkpoint.drafter import save_drafter
from paceline.checkpoint.folder import claimed, write_whole
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Saved
from paceline.config import RunSettings
from paceline.config_file import dump_settings
from paceline.data import loader
from paceline.data.held_out import HeldOut, open_held_out, with_held_out
from paceline.data.mixture import Mixture, first_table, open_mixture
from paceline.data.plan import BucketTable
from paceline.data.set_aside import SetAside
from paceline.data.verify import BackgroundCheck, watched
from paceline.formats.warm_start import WarmStart
from paceline.observe.console import Console
from paceline.observe.events import EventLog
from paceline.observe.quarantine import Quarantine
from paceline.pipeline.threads import train_in_threads
from paceline.recipes.plan import print_buckets
from paceline.recipes.train_checks import check_inputs, check_run_folder, choose_policy
from paceline.recipes.train_facts import drafter_meta, fixed_facts, say_what_made_it
from paceline.recipes.train_guard import GuardTeller
from paceline.recipes.train_resume import best_so_far, check_room, find_start
from paceline.recipes.train_stop import StopRequest, check_notice, notice_file
from paceline.recipes.train_tell import Teller, Totals, known_rows
from paceline.recipes.train_warm import warm_start
from paceline.records import Interrupted, TokenBatch
from paceline.runtime import pulse
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
    evaluate, block_size = settings.evaluate, settings.drafter.block_size
    check_run_folder(run, settings.data.folders, resume=resume, held_out=evaluate.held_out)
    check_notice(settings.checkpoint)
    facts = describe(settings.target.model, settings.target.revision)
    vocab_size = facts.vocab_size
    mixture = open_mixture(settings.data, vocab_size=vocab_size)
    held_out = open_held_out(
        evaluate, settings.data, settings.train, block_size, first_row=len(mixture), vocab_size=vocab_size
    )
    check_inputs(settings, facts, mixture, console, held_out.dataset if held_out else None)
    warm = None if resume else warm_start(settings, facts, console)  # who goes on has the weights in a checkpoint
    buckets = first_table(mixture, settings.data, seed=settings.train.seed)
    total_steps = loader.count_steps(mixture, settings.data, settings.train)
    largest = loader.largest_micro_batch(mixture, settings.data, settings.train, block_size)
    print_buckets(buckets, console)
    if held_out:
        largest = max(largest, held_out.largest(), key=lambda batch: batch.input_ids.numel())
        console.line(
            f"  {held_out.rows:,} rows held out, looked at every {evaluate.every_steps:,} steps and at the end"
        )
    policy = choose_policy(settings, console)

    # 2. The run folder is ours alone. Checksums are compared while the run is under way.
    read = [*mixture.datasets, *([held_out.dataset] if held_out else [])]
    with claimed(run, tell=console.line), closing(BackgroundCheck(read)) as check:
        check_run_folder(run, settings.data.folders, resume=resume)  # again: its last owner may have left more since
        store.sweep(run)
        fixed = fixed_facts(settings, facts, mixture, held_out, total_steps)
        start = find_start(run, fixed, previous=resume_previous, console=console) if resume else None
        check_room(run, settings, facts)
        if start is None:
            warm = warm or warm_start(settings, facts, console)
            say_what_made_it(run, facts, mixture, held_out, warm)
        best = best_so_far(run, start, console)
        write_whole(run / "settings.yaml", dump_settings(settings))
        return _run(
            settings, facts, mixture, held_out, buckets, check, largest, fixed, start, warm, best, policy, console
        )


def _run(
    settings: RunSettings,
    facts: TargetFacts,
    mixture: Mixture,
    held_out: HeldOut | None,
    buckets: BucketTable,
    check: BackgroundCheck,
    largest: TokenBatch,
    fixed: dict[str, Any],
    start: Saved | None,
    warm: WarmStart | None,
    best: Best,
    policy: Policy,
    console: Console,
) -> dict[str, Any]:
    run, total_steps = Path(settings.run_dir), fixed["total_steps"]
    first_step = start.steps if start else 0
    pin = any(torch.device(name).type == "cuda" for name in (*settings.pipeline.targets, *settings.pipeline.drafters))
    # 3. Roles start, agree, work.
    with EventLog(run) as events, Quarantine(run) as quarantine, console.progress("train", total_steps) as tick:
        totals = Totals(**start.state["totals"]) if start else Totals()
        teller = Teller(
            settings,
            total_steps,
            totals,
            events=events,
            quarantine=quarantine,
            console=console,
            tick=tick,
            best=best,
        )
        guard = GuardTeller(mixture, quarantine=quarantine, events=events, console=console)
        _tell_begin(events, settings, buckets, total_steps, start, warm, best)
        aside = SetAside(settings.data.bad_rows, on_row=teller.on_bad_row, known=known_rows(quarantine))
        batches = loader.micro_batches(
            mixture,
            settings.data,
            settings.train,
            settings.drafter.block_size,
            first_step=first_step,
            pin=pin,
            set_aside=aside,
        )

        stop = StopRequest(
            settings.checkpoint.grace_s,
            stopped=teller.stopped,
            on_asked=teller.on_asked,
            on_late=teller.on_late,
            notice=notice_file(settings.checkpoint),
        )
        saver = Saver(
            run,
            settings.checkpoint,
            describe=lambda: {**fixed, "totals": teller.state(), "best": best.state()},
            tell=teller.on_save,
            stopping=stop,
            best=best,
            total_steps=total_steps,
            patient=pulse.patient,
            patience_s=settings.pipeline.work_timeout_s,
        )
        cut_short = total_steps == settings.train.max_steps
        batches = watched(batches, check, cut_short=cut_short, on_whole=teller.on_whole)
        due = partial(settings.evaluate.due, total_steps=total_steps)
        # The part before this one may have broken between its last step and the held-out loss that follows.
        owed = first_step if first_step and due(first_step) and totals.held_out_steps != first_step else None
        try:
            with stop.on_signals():
                for rows in (mixture, *([held_out.mixture] if held_out else [])):
                    for dataset, bad in rows.bad_rows():
                        aside.add(dataset, bad)
                with saver:
                    drafter, recompiles = train_in_threads(
                        settings,
                        facts,
                        batches=with_held_out(batches, held_out, due, owed=owed, pin=pin, on_bad=aside.add),
                        largest=largest,
                        total_steps=total_steps,
                        load_ends=lambda: load_ends(facts),
                        policy=policy,
                        on_step=guard.watched(teller.on_step, settings.pipeline.drafters + settings.pipeline.targets),
                        on_held_out=teller.on_held_out,
                        on_state=teller.on_state,
                        on_recompile=teller.on_recompile,
                        on_rejected=guard.on_rejected,
                        on_rolled_back=teller.on_rolled_back,
                        warn=console.line,
                        fill=warm.fill if warm else None,
                        start=start,
                        saver=saver,
                        stopping=stop,
                        on_ready=stop.begin,
                        on_replica=teller.on_replica,
                        moving=lambda: check.checked,
                    )
                if totals.steps < total_steps:
                    raise Interrupted(teller.stopped())
                # 4. What was learnt goes to disk.
                folder = save_drafter(run, drafter.state_dict(), drafter_meta(settings, facts, totals.steps))
        except BaseException as error:
            kind = "interrupted" if isinstance(error, KeyboardInterrupt | Interrupted) else "failed"
            events.write(kind, message=str(error) or type(error).__name__)
            raise
        summary = {"run": str(run), "drafter": str(folder), **teller.summary()}
        summary |= {"policy": policy, "recompiles": recompiles, "train_s": teller.seconds()}
        summary |= {"quarantined_rows": len(aside)}
        events.write("trained", **summary)
    return summary


def _tell_begin(
    events: EventLog,
    settings: RunSettings,
    buckets: BucketTable,
    total_steps: int,
    start: Saved | None,
    warm: WarmStart | None,
    best: Best,
) -> None:
    tree = settings.model_dump(mode="json")
    if start is not None:
        events.write("resumed", steps=start.steps, checkpoint=str(start.folder), best=best.state(), settings=tree)
        return
    events.write("started", settings=tree)
    events.write("plan", **buckets.as_dict(), steps=total_steps)
    if warm is not None:
        events.write("warm_start", **warm.as_dict())
