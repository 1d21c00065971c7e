"""`paceline train`: RUN.yaml in, a trained drafter out; wires dataset, target replicas and drafter in threads."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from paceline import checkpoint
from paceline.config import RunSettings, dump_settings
from paceline.data import loader
from paceline.data.mixture import Mixture, first_table, open_mixture
from paceline.data.plan import BucketTable
from paceline.data.verify import BackgroundCheck, watched
from paceline.observe.console import Console, Tick
from paceline.observe.events import EventLog
from paceline.pipeline.supervisor import RoleState
from paceline.pipeline.threads import train_in_threads
from paceline.recipes.plan import print_buckets
from paceline.recipes.train_checks import check_inputs, check_run_folder, choose_policy
from paceline.records import StepReport, TokenBatch
from paceline.runtime.compiling import Policy
from paceline.target.load import TargetFacts, describe, load_ends


def train(settings: RunSettings, *, console: Console) -> dict[str, Any]:
    """Train the drafter that `settings` describe into its run folder and return a summary."""
    # 1. Everything that can be refused before a model is loaded.
    run = Path(settings.run_dir)
    check_run_folder(run, settings.data.folders)
    facts = describe(settings.target.model, settings.target.revision)
    mixture = open_mixture(settings.data)
    check_inputs(settings, facts, mixture, console)
    buckets = first_table(mixture, settings.data, seed=settings.train.seed)
    total_steps = loader.count_steps(mixture, settings.data, settings.train)
    B = settings.drafter.block_size
    pin = any(torch.device(name).type == "cuda" for name in (*settings.pipeline.targets, *settings.pipeline.drafters))
    batches = loader.micro_batches(mixture, settings.data, settings.train, B, pin=pin)
    largest = loader.largest_micro_batch(mixture, settings.data, settings.train, B)
    print_buckets(buckets, console)
    policy = choose_policy(settings, console)

    # 2. The run folder says what made it, and is ours alone. Checksums are compared while the run is under way.
    with checkpoint.claimed(run), closing(BackgroundCheck(mixture.datasets)) as check:
        return _run(settings, facts, mixture, buckets, batches, check, largest, total_steps, policy, console)


def _run(
    settings: RunSettings,
    facts: TargetFacts,
    mixture: Mixture,
    buckets: BucketTable,
    batches: Iterator[TokenBatch],
    check: BackgroundCheck,
    largest: TokenBatch,
    total_steps: int,
    policy: Policy,
    console: Console,
) -> dict[str, Any]:
    run = Path(settings.run_dir)
    (run / "settings.yaml").write_text(dump_settings(settings))
    target = {"name": facts.name, "folder": str(facts.folder), "revision": facts.revision}
    made = [{"folder": str(dataset.folder), "rows": dataset.fingerprint} for dataset in mixture.datasets]
    checkpoint.save_provenance(run, target=target, dataset=made[0] if len(made) == 1 else made)

    # 3. Roles start, agree, work.
    totals = _Totals()
    began = time.monotonic()
    with EventLog(run) as events, console.progress("train", total_steps) as tick:
        events.write("started", settings=settings.model_dump(mode="json"))
        events.write("plan", **buckets.as_dict(), steps=total_steps)

        def on_state(report: RoleState) -> None:
            events.write("role", role=report.role.name, device=report.role.device, state=report.state, s=report.seconds)
            if report.state in ("loading", "compiling", "ready"):
                console.line(f"  {report.role.name} on {report.role.device}: {report.state} ({report.seconds:.1f} s)")

        def on_step(report: StepReport) -> None:
            totals.add(report)
            _tell(report, settings, total_steps, events, tick)

        def on_whole(shards: int) -> None:
            events.write("checksums", shards=shards)

        def on_recompile(guard: str) -> None:
            events.write("recompile", guard=guard)
            console.line(f"  a step did not fit what was compiled and ran without: {guard[:200]}")

        cut_short = total_steps == settings.train.max_steps
        try:
            drafter, recompiles = train_in_threads(
                settings,
                facts,
                batches=watched(batches, check, cut_short=cut_short, on_whole=on_whole),
                largest=largest,
                total_steps=total_steps,
                load_ends=lambda: load_ends(facts),
                policy=policy,
                on_step=on_step,
                on_state=on_state,
                on_recompile=on_recompile,
            )
        except BaseException as error:
            kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            events.write(kind, message=str(error) or type(error).__name__)
            raise
        # 4. What was learnt goes to disk.
        folder = checkpoint.save_drafter(run, drafter.state_dict(), _meta(settings, facts, totals.steps))
        summary = {
            "run": str(run),
            "drafter": str(folder),
            "train_steps": totals.steps,
            "loss": totals.last_loss,
            "real_anchor_share": totals.blocks / max(totals.anchor_slots, 1),
            "padding_share": 1 - totals.tokens / max(totals.padded_tokens, 1),
            "policy": policy,
            "recompiles": recompiles,
            "train_s": round(time.monotonic() - began, 1),
        }
        events.write("trained", **summary)
    return summary


class _Totals:
    """Sums over the run for its summary."""

    def __init__(self) -> None:
        self.steps = self.blocks = self.anchor_slots = self.tokens = self.padded_tokens = 0
        self.last_loss = float("nan")

    def add(self, report: StepReport) -> None:
        self.steps += 1
        self.blocks += report.blocks
        self.anchor_slots += report.anchor_slots
        self.tokens += report.tokens
        self.padded_tokens += report.padded_tokens
        self.last_loss = report.loss


def _tell(report: StepReport, settings: RunSettings, total_steps: int, events: EventLog, tick: Tick) -> None:
    tick(report.step + 1, note=f"loss {report.loss:.3f} accept {report.acceptance:.2f} lr {report.lr:.1e}")
    last = report.step + 1 == total_steps
    if report.step % settings.train.log_every == 0 or last:
        values = {name: getattr(report, name) for name in report.__slots__}
        events.write("step", **values, loss=report.loss, acceptance=report.acceptance, total_steps=total_steps)


def _meta(settings: RunSettings, facts: TargetFacts, steps: int) -> checkpoint.DrafterMeta:
    return checkpoint.DrafterMeta(
        settings=settings.drafter,
        target=str(facts.folder),
        target_revision=facts.revision,
        num_target_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        steps=steps,
    )
