"""`paceline train`: RUN.yaml in, a trained drafter out; wires dataset, target replicas and drafter in threads."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint import store
from paceline.checkpoint.best import Best
from paceline.checkpoint.drafter import save_drafter
from paceline.checkpoint.folder import claimed, write_whole
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Saved
from paceline.config import RunSettings
from paceline.config_file import dump_settings
from paceline.data.set_aside import SetAside
from paceline.data.verify import BackgroundCheck
from paceline.formats.warm_start import WarmStart
from paceline.observe.attending import attended, check_attending
from paceline.observe.console import Console
from paceline.observe.events import EventLog
from paceline.observe.live import RunView
from paceline.observe.quarantine import Quarantine
from paceline.pipeline.threads import train_in_threads
from paceline.recipes.choose_fp8 import choose_fp8, fp8_of
from paceline.recipes.train_checks import check_run_folder, choose_policy
from paceline.recipes.train_evaluate import TrueAcceptance
from paceline.recipes.train_facts import drafter_meta, fixed_facts, say_what_made_it, step_flops, tell_begin
from paceline.recipes.train_fp8 import check_train_fp8
from paceline.recipes.train_guard import GuardTeller
from paceline.recipes.train_inputs import Inputs, open_inputs, show_inputs, stream
from paceline.recipes.train_listeners import listeners
from paceline.recipes.train_resume import best_so_far, check_room, find_start
from paceline.recipes.train_stages import Stages
from paceline.recipes.train_stop import StopRequest, check_notice, notice_file
from paceline.recipes.train_tell import Teller, Totals, known_rows
from paceline.recipes.train_warm import warm_start
from paceline.records import Interrupted
from paceline.runtime import pulse
from paceline.runtime.compiling import Policy
from paceline.target.load import load_ends


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
    stages = Stages(console, roles=settings.roles)
    check_run_folder(run, settings.data.folders, resume=resume, held_out=settings.evaluate.held_out)
    check_notice(settings.checkpoint)
    check_attending(settings.observe)
    inputs = open_inputs(settings, console, stages.took)
    warm = None if resume else warm_start(settings, inputs.facts, console)  # else the weights are in a checkpoint
    show_inputs(inputs, settings, console)
    policy = choose_policy(settings, console)
    check_train_fp8(settings, inputs.facts.hidden_size, policy)

    # 2. The run folder is ours alone. Checksums are compared while the run is under way.
    with claimed(run, tell=console.line), closing(BackgroundCheck(inputs.datasets)) as check:
        check_run_folder(run, settings.data.folders, resume=resume)  # again: its last owner may have left more since
        store.sweep(run)
        fixed = fixed_facts(settings, inputs)
        start = find_start(run, fixed, previous=resume_previous, console=console) if resume else None
        # Settings and checkpoints keep what was asked, checkpoints beside it what came of that.
        before = start.state.get("fp8") if start else None
        chosen = choose_fp8(settings, inputs.facts.hidden_size, policy, console, before=before)
        fixed["fp8"] = fp8_of(chosen)
        check_room(run, chosen, inputs.facts)
        if start is None:
            warm = warm or warm_start(settings, inputs.facts, console)
            say_what_made_it(run, inputs, warm)
        best = best_so_far(run, start, settings.evaluate.best_by, console)
        write_whole(run / "settings.yaml", dump_settings(settings))
        return _run(chosen, inputs, check, fixed, start, warm, best, policy, stages, console)


def _run(
    settings: RunSettings,
    inputs: Inputs,
    check: BackgroundCheck,
    fixed: dict[str, Any],
    start: Saved | None,
    warm: WarmStart | None,
    best: Best,
    policy: Policy,
    stages: Stages,
    console: Console,
) -> dict[str, Any]:
    run, total_steps = Path(settings.run_dir), inputs.total_steps
    view = RunView(console)
    # 3. Roles start, agree, work.
    with (
        EventLog(run, [view.follow], tell=console.line) as events,
        Quarantine(run) as quarantine,
        console.outlived(lambda text: events.write("console_lost", message=text)),
        attended(settings.observe, run, events, grace_s=settings.checkpoint.grace_s, tell=console.line),
        view,
    ):
        totals = Totals(**start.state["totals"]) if start else Totals()
        flops = partial(step_flops, settings, inputs.facts)
        teller = Teller(
            settings, total_steps, totals, flops=flops, events=events, quarantine=quarantine, stages=stages, best=best
        )
        guard = GuardTeller(inputs.mixture, quarantine=quarantine, events=events)
        tell_begin(events, settings, inputs, start, warm, best)
        stages.written_to(events)
        acceptance = TrueAcceptance(settings, inputs, start, best, events=events)
        view.begin()
        aside = SetAside(settings.data.bad_rows, on_row=teller.on_bad_row, known=known_rows(quarantine))

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
            describe=partial(_described, fixed, teller, best, acceptance),
            tell=teller.on_save,
            stopping=stop,
            best=best,
            total_steps=total_steps,
            line=start.line() if start else (),
            patient=pulse.patient,
            patience_s=settings.pipeline.work_timeout_s,
        )
        batches = stream(
            settings,
            inputs,
            check,
            first_step=start.steps if start else 0,
            looked=totals.held_out_steps,
            set_aside=aside,
            on_whole=teller.on_whole,
        )
        try:
            with stop.on_signals():
                for dataset, bad in inputs.bad_rows():
                    aside.add(dataset, bad)
                with saver:
                    drafter, recompiles = train_in_threads(
                        settings,
                        inputs.facts,
                        batches=batches,
                        largest=inputs.largest,
                        total_steps=total_steps,
                        load_ends=lambda: load_ends(inputs.facts),
                        policy=policy,
                        fill=warm.fill if warm else None,
                        start=start,
                        saver=saver,
                        stopping=stop,
                        moving=lambda: check.checked,
                        told=listeners(settings, teller, guard, stop, console, fp8=fixed["fp8"]),
                        plan=acceptance.plan(saver),
                    )
                if totals.steps < total_steps:
                    raise Interrupted(teller.stopped())
                # 4. What was learnt goes to disk.
                folder = save_drafter(
                    run, drafter.state_dict(), drafter_meta(settings.drafter, inputs.facts, totals.steps)
                )
        except BaseException as error:
            kind = "interrupted" if isinstance(error, KeyboardInterrupt | Interrupted) else "failed"
            events.write(kind, message=str(error) or type(error).__name__)
            raise
        summary = {"run": str(run), "drafter": str(folder), **teller.summary()}
        summary |= {"policy": policy, "fp8": fixed["fp8"], "recompiles": recompiles, "train_s": teller.seconds()}
        summary |= {"quarantined_rows": len(aside), **acceptance.summary()}
        events.write("trained", **summary)
    return summary


def _described(fixed: dict[str, Any], teller: Teller, best: Best, acceptance: TrueAcceptance) -> dict[str, Any]:
    """Return what a checkpoint says beside its tensors."""
    return {**fixed, "totals": teller.state(), "best": best.state(), "evaluation": acceptance.state()}
