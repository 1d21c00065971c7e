"""The one-shape step against a plain loop over blocks, and against other ways of cutting the same data."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline import blocks
from paceline.config import DataSettings, DrafterSettings, TrainSettings
from paceline.data import loader
from paceline.data.mixture import Mixture
from paceline.data.store import CompletionDataset, open_dataset
from paceline.drafter.attention import Dense
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.joined import leaf_names
from paceline.drafter.model import Drafter
from paceline.drafter.packed import pack, unpack
from paceline.records import FeatureBatch, Rejection, RunError, StepReport, TokenBatch
from paceline.runtime.compiling import forbid_recompiles
from paceline.target.load import TargetFacts, load_ends
from paceline.target.model import FeatureTarget
from paceline.train import check
from paceline.train.loop import alone, train_loop
from paceline.train.optim import learning_rate
from paceline.train.step import DrafterStep, Look, checksum

SETTINGS = TrainSettings(
    epochs=1, context_slots=200, anchor_slots=40, anchors_per_sample=6, batches_per_step=100, dtype="float32", seed=5
)


@pytest.fixture(scope="module")
def target(tiny: TargetFacts, shape: DrafterSettings) -> FeatureTarget:
    return FeatureTarget(tiny, shape.taps, dtype=torch.float64, device="cpu")


@pytest.fixture(scope="module")
def ends(tiny: TargetFacts) -> FrozenEnds:
    return load_ends(tiny).to("cpu", torch.float64)


@pytest.fixture
def dataset(write_dataset: Callable[..., Path], random_rows: list) -> CompletionDataset:
    return open_dataset(write_dataset(random_rows))


def features_of(target: FeatureTarget, tokens: TokenBatch) -> FeatureBatch:
    features = target.features(tokens)
    return FeatureBatch(tokens, features, blocks.context_positions(tokens.lengths))


def by_itself(target: FeatureTarget, ids: np.ndarray) -> torch.Tensor:
    """A sample's features from a forward of its own."""
    with torch.inference_mode():
        target._trunk(torch.tensor(ids.astype(np.int64))[None], use_cache=False)
        features = target._taps.take()[0]
    return features.clone()


def make_step(tiny: TargetFacts, shape: DrafterSettings, ends: FrozenEnds, settings: TrainSettings) -> DrafterStep:
    return DrafterStep(Drafter(shape, tiny.hidden_size).initialise(0).double(), ends, settings)


def one_step(
    step: DrafterStep, target: FeatureTarget, dataset: CompletionDataset, data: DataSettings
) -> tuple[StepReport, list[torch.Tensor]]:
    """Run the micro-batches of the first step and return its sums and summed gradients."""
    step.clear()
    for tokens in loader.micro_batches(Mixture([dataset]), data, step.settings, step.drafter.settings.block_size):
        batch = features_of(target, tokens)
        step.load(batch)
        step.micro()
    return step.report(batch.tokens, 0.0), [p.grad.clone() for p in step.drafter.parameters()]


def test_bytes_are_loaded_as_what_they_stand_for(
    tiny: TargetFacts, shape: DrafterSettings, ends: FrozenEnds, dataset: CompletionDataset
) -> None:
    """Widening them first gives the same, and what was there before does not shine through."""
    target = FeatureTarget(tiny, shape.taps, dtype=torch.float32, device="cpu")
    tokens = next(loader.micro_batches(Mixture([dataset]), data_settings(), SETTINGS, shape.block_size))
    exact = features_of(target, tokens)
    bytes_TP = pack(exact.features_TD, len(shape.taps))
    widened_TD = torch.zeros_like(exact.features_TD)
    unpack(bytes_TP, widened_TD)
    loaded = []
    for features in (bytes_TP, widened_TD):
        step = make_step(tiny, shape, ends, SETTINGS)
        step.buffers.features_CD.fill_(7)
        step.load(replace(exact, features_TD=features))
        loaded.append(step.buffers.features_CD)
    assert torch.equal(*loaded)
    assert not loaded[0][tokens.num_tokens :].any()
    torch.testing.assert_close(loaded[0][: tokens.num_tokens].float(), exact.features_TD, rtol=1 / 16, atol=1e-3)


def data_settings(**changes: object) -> DataSettings:
    return DataSettings.model_validate({"dataset": "", "align": 8, "token_budget": 160, "buckets": 3} | changes)


def plain_loop(
    drafter: Drafter, ends: FrozenEnds, target: FeatureTarget, dataset: CompletionDataset, settings: TrainSettings
) -> tuple[torch.Tensor, float, list[int]]:
    """The loss stated block by block, without masks: a block reads its own sample's features before its anchor."""
    shape = drafter.settings
    B, weights = shape.block_size, blocks.slot_weights(shape.block_size, blocks.default_gamma(shape.block_size))
    total, weight_sum, accepted = torch.zeros((), dtype=torch.float64), 0.0, [0] * (B - 1)
    for row in range(len(dataset)):
        ids, mask = dataset.row(row)
        features = by_itself(target, ids)
        drawn = blocks.sample_anchors(
            blocks.anchor_candidates(mask), settings.anchors_per_sample, seed=settings.seed, epoch=0, sample=row
        )
        for anchor in drawn.tolist():
            context = drafter.context(features[None, :anchor], torch.arange(anchor)[None])
            tokens = torch.tensor([[int(ids[anchor])] + [shape.mask_token_id] * (B - 1)])
            everything = Dense(torch.ones(1, B, anchor + B, dtype=torch.bool))
            hidden = drafter(ends.embed(tokens), anchor + torch.arange(B)[None], context, everything)
            logits = ends.logits(hidden)[0]
            right = True
            for slot in range(1, B):
                place = anchor + slot
                if place >= len(ids) or not mask[place]:
                    break
                label = torch.tensor(int(ids[place]))
                total = total + weights[slot] * F.cross_entropy(logits[slot], label)
                weight_sum += float(weights[slot])
                right = right and int(logits[slot].argmax()) == int(label)
                accepted[slot - 1] += right
    return total, weight_sum, accepted


def test_loss_and_gradients_equal_a_plain_loop_over_blocks(tiny, shape, target, ends, dataset) -> None:
    step = make_step(tiny, shape, ends, SETTINGS)
    report, gradients = one_step(step, target, dataset, data_settings())
    fresh = Drafter(shape, tiny.hidden_size).initialise(0).double()
    total, weight_sum, accepted = plain_loop(fresh, ends, target, dataset, SETTINGS)
    expected = torch.autograd.grad(total, list(fresh.parameters()))
    assert report.loss_sum == pytest.approx(total.item(), rel=1e-9)
    assert report.weight_sum == pytest.approx(weight_sum, rel=1e-12)
    assert list(report.accepted_K) == accepted
    for (name, _), ours, theirs in zip(fresh.named_parameters(), gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9, msg=name)


OTHER_WAYS = {
    "one bucket, much padding": ({"buckets": 1, "token_budget": 10000}, {}),
    "one sample a batch": ({"max_batch": 1}, {}),
    "other edges": ({"edges": (24, 40), "token_budget": 80}, {}),
    "padded to the edge": ({"layout": "bucketed"}, {}),
    "packed": ({"layout": "packed", "token_budget": 90}, {}),
    "packed, small micro-batches": ({"layout": "packed", "token_budget": 90}, {"anchor_slots": 6}),
    "small micro-batches": ({}, {"context_slots": 50, "anchor_slots": 6}),
    "large micro-batches, mostly unused": ({}, {"context_slots": 2000, "anchor_slots": 400}),
    "small buffer of logits": ({}, {"logits_mib": 1}),
}


@pytest.mark.parametrize("way", OTHER_WAYS, ids=str)
def test_the_loss_does_not_depend_on_how_the_data_is_cut(tiny, shape, target, ends, dataset, way: str) -> None:
    data, train = OTHER_WAYS[way]
    report, gradients = one_step(make_step(tiny, shape, ends, SETTINGS), target, dataset, data_settings())
    settings = SETTINGS.model_copy(update=train)
    other, other_gradients = one_step(make_step(tiny, shape, ends, settings), target, dataset, data_settings(**data))
    assert other.loss == pytest.approx(report.loss, rel=1e-9)
    assert other.accepted_K == report.accepted_K
    assert other.available_K == report.available_K
    for ours, theirs in zip(other_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_update_is_clipped_adamw_on_the_weighted_mean(tiny, shape, target, ends, dataset) -> None:
    settings = SETTINGS.model_copy(update={"clip": 0.05, "weight_decay": 0.1})
    step = make_step(tiny, shape, ends, settings)
    reference = Drafter(shape, tiny.hidden_size).initialise(0).double()
    decayed = [p for p in reference.parameters() if p.ndim > 1]
    plain = [p for p in reference.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.95)
    )
    for _ in range(3):
        report, _ = one_step(step, target, dataset, data_settings())
        step.update(1e-3)
        norm = step.norm
        total, weight_sum, _ = plain_loop(reference, ends, target, dataset, settings)
        optimizer.zero_grad()
        (total / weight_sum).backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        optimizer.step()
        assert report.loss == pytest.approx(total.item() / weight_sum, rel=1e-7)
        assert float(norm) == pytest.approx(float(expected_norm), rel=1e-6)
        assert float(norm) > 0.05
    for ours, theirs in zip(step.drafter.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_empty_buffers_give_no_loss_and_no_gradient(tiny, shape, ends) -> None:
    step = make_step(tiny, shape, ends, SETTINGS)
    before = [p.clone() for p in step.drafter.parameters()]
    step.micro()
    assert step.sums.tolist() == [0, 0]
    assert all(float(p.grad.abs().max()) == 0 for p in step.drafter.parameters())
    step.warm()
    assert all(torch.equal(p, b) for p, b in zip(step.drafter.parameters(), before, strict=True))
    assert all(float(state["step"]) == 0 for state in step.optimizer.adamw.state.values())


def test_nothing_of_an_earlier_step_is_in_what_ranks_sum(tiny, shape, target, ends, dataset) -> None:
    """Gradients are not cleared but overwritten; a rank may have no micro-batch to do so."""
    step = make_step(tiny, shape, ends, SETTINGS)
    _, expected = one_step(step, target, dataset, data_settings())
    for parameter in step.drafter.parameters():
        parameter.grad.fill_(math.nan)
    _, again = one_step(step, target, dataset, data_settings())
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    assert step.gradients.any()
    step.clear()
    assert not any(shared.any() for shared in step.shared())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_built_while_a_target_loads_is_the_same(tiny, shape, ends, default, optimizer) -> None:
    """transformers switches the process-wide default dtype while it loads a target, in another thread."""
    settings = SETTINGS.model_copy(update={"optimizer": optimizer})

    def rates_and_weights() -> list[torch.Tensor]:
        step = make_step(tiny, shape, ends, settings)
        step.gradients.fill_(0.5)
        step.sums.fill_(3.0)
        step.update(1e-2)
        own = step.optimizer
        return [own.lr, own.skip, own.divisor, step.apply, *(p.detach().clone() for p in step.drafter.parameters())]

    expected = rates_and_weights()
    torch.set_default_dtype(default)
    try:
        found = rates_and_weights()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


def test_tokens_after_an_anchor_do_not_reach_its_block(tiny, shape, target, ends, write_dataset, random_rows) -> None:
    """The whole way: rows, loader, target, buffers, drafter. Labels aside, a block knows its past and its anchor."""

    def hidden(rows: list) -> tuple[torch.Tensor, torch.Tensor]:
        step = make_step(tiny, shape, ends, SETTINGS)
        dataset = open_dataset(write_dataset(rows, name=f"leak{len(list(Path(target_dir).iterdir()))}"))
        tokens = next(loader.micro_batches(Mixture([dataset]), data_settings(max_batch=1), SETTINGS, shape.block_size))
        step.load(features_of(target, tokens))
        hidden_AKH = step._hidden(step._dense(), step._turns()).detach().unflatten(0, (-1, shape.block_size - 1))
        return hidden_AKH[: len(tokens.blocks.anchor_K)], tokens.blocks.position_K

    ids, prompt = random_rows[0]
    target_dir = write_dataset([(ids, prompt)], name="first").parent
    before, anchors = hidden([(ids, prompt)])
    middle = len(anchors) // 2
    anchor = int(anchors[middle])
    later = [*ids[: anchor + 1], *((token - 4 + 7) % 124 + 4 for token in ids[anchor + 1 :])]
    after, _ = hidden([(later, prompt)])
    assert torch.equal(after[: middle + 1], before[: middle + 1])
    assert not torch.allclose(after[middle + 1 :], before[middle + 1 :])
    other_anchor = [*ids[:anchor], ids[anchor] % 120 + 5, *ids[anchor + 1 :]]
    changed, _ = hidden([(other_anchor, prompt)])
    assert torch.equal(changed[:middle], before[:middle])
    assert not torch.allclose(changed[middle], before[middle])


def test_the_loop_steps_at_the_rate_of_the_schedule_which_stands_still_at_a_rejected_step(
    tiny, shape, target, ends, dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.model_copy(update={"batches_per_step": 2, "epochs": 2, "lr": 1e-3})
    step = make_step(tiny, shape, ends, settings)
    rates: list[float] = []
    update = DrafterStep.update

    def recorded(self: DrafterStep, lr: float) -> None:
        rates.append(lr)
        update(self, lr)

    monkeypatch.setattr(DrafterStep, "update", recorded)
    batches = [
        features_of(target, tokens)
        for tokens in loader.micro_batches(Mixture([dataset]), data_settings(), settings, shape.block_size)
    ]
    steps = batches[-1].tokens.step + 1
    reports: list[StepReport] = []
    train_loop(step, alone(batches), total_steps=steps, on_step=reports.append)
    assert rates == [learning_rate(at, steps, settings) for at in range(steps)]
    assert [report.lr for report in reports] == rates

    broken = batches[1].features_TD.clone()
    broken[0] = float("nan")
    batches[1] = FeatureBatch(batches[1].tokens, broken, batches[1].positions_T)
    assert [batch.tokens.step for batch in batches[:3]] == [0, 0, 1]
    weights: list[list[torch.Tensor]] = []
    rejections: list[Rejection] = []
    rates.clear()
    reports.clear()

    def on_step(report: StepReport) -> None:
        reports.append(report)
        weights.append([p.detach().clone() for p in step.drafter.parameters()])

    before = [p.detach().clone() for p in step.drafter.parameters()]
    train_loop(step, alone(batches), total_steps=steps, on_step=on_step, on_rejected=rejections.append)
    assert rates == [learning_rate(max(0, at - 1), steps, settings) for at in range(steps)]
    assert [report.applied for report in reports] == [False] + [True] * (steps - 1)
    assert all(torch.equal(p, w) for p, w in zip(weights[0], before, strict=True))
    assert not any(torch.equal(p, w) for p, w in zip(weights[1], before, strict=True))
    assert all(p.isfinite().all() for p in weights[-1])
    (rejection,) = rejections
    assert (rejection.step, rejection.rule, rejection.why) == (0, "loss", "loss nan is not finite")
    assert [suspect.samples for suspect in rejection.suspects] == [batch.tokens.samples for batch in batches[:2]]
    assert [math.isfinite(suspect.loss_sum) for suspect in rejection.suspects] == [True, False]
    for suspect, batch in zip(rejection.suspects, batches, strict=False):
        words = batch.features_TD.numpy().tobytes()
        expected = sum(int.from_bytes(words[at : at + 8], "little") for at in range(0, len(words), 8)) % 2**64
        assert suspect.features_sum == expected


def test_a_step_that_is_not_to_apply_changes_nothing(tiny, shape, target, ends, dataset) -> None:
    for optimizer in ("adamw", "muon"):
        step = make_step(tiny, shape, ends, SETTINGS.model_copy(update={"optimizer": optimizer}))
        one_step(step, target, dataset, data_settings())
        step.update(1e-3)
        kept = [p.detach().clone() for p in step.drafter.parameters()]
        moments = [t.clone() for state in step.optimizer.adamw.state.values() for t in state.values()]
        one_step(step, target, dataset, data_settings())
        step.apply.zero_()
        step.update(1e-3)
        assert all(torch.equal(p, k) for p, k in zip(step.drafter.parameters(), kept, strict=True))
        now = [t for state in step.optimizer.adamw.state.values() for t in state.values()]
        assert all(torch.equal(a, b) for a, b in zip(now, moments, strict=True))
        step.apply.fill_(1)
        one_step(step, target, dataset, data_settings())
        step.update(1e-3)
        assert not any(torch.equal(p, k) for p, k in zip(step.drafter.parameters(), kept, strict=True))


def everything(step: DrafterStep) -> list[torch.Tensor]:
    """Copies of weights, working copy, moments and counts."""
    kept = [tensor for group in step.state().values() for tensor in group.values()]
    return [tensor.detach().clone() for tensor in (*kept, *step._leaves)]


LIMITS: dict[str, tuple[float, float]] = {  # as factors of what the step has
    "loss": (1 - 1e-12, math.inf),
    "norm": (math.inf, 1 - 1e-12),
    "both": (0.5, 0.5),
}


@pytest.mark.parametrize("limited", [*LIMITS, "loss is nan", "gradients are inf"])
@pytest.mark.parametrize(("optimizer", "dtype"), [("adamw", "float32"), ("muon", "bfloat16")])
def test_a_rejected_step_leaves_everything_bit_for_bit_and_what_is_at_its_limit_is_applied(
    tiny, shape, target, dataset, optimizer: str, limited: str, dtype: str
) -> None:
    def made() -> DrafterStep:
        settings = SETTINGS.model_copy(update={"optimizer": optimizer, "dtype": dtype, "weight_decay": 0.1})
        step = DrafterStep(Drafter(shape, tiny.hidden_size).initialise(0), load_ends(tiny), settings)
        step.warm()
        for _ in range(2):
            one_step(step, target, dataset, data_settings())
            step.update(1e-3)
        return step

    free, step = made(), made()
    told, _ = one_step(free, target, dataset, data_settings())
    free.update(1e-3)
    norm = float(free.norm)

    kept = everything(step)
    one_step(step, target, dataset, data_settings())
    if limited in LIMITS:
        factors = LIMITS[limited]
        step.limit(told.loss * factors[0], norm * factors[1])
    elif limited == "loss is nan":
        step.sums[0] = math.nan
    else:
        step.gradients[5] = math.inf
    step.update(1e-3)
    assert all(torch.equal(now, before) for now, before in zip(everything(step), kept, strict=True))
    closing = next(loader.micro_batches(Mixture([dataset]), data_settings(), SETTINGS, shape.block_size))
    assert not step.report(closing, 1e-3).applied

    one_step(step, target, dataset, data_settings())
    step.limit(told.loss, norm)
    step.update(1e-3)
    assert step.report(closing, 1e-3).applied
    assert all(torch.equal(now, other) for now, other in zip(everything(step), everything(free), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("width", [4, 3])
def test_the_checksum_is_exact_in_any_order_and_tells_one_bit(dtype: torch.dtype, width: int) -> None:
    features = torch.randn(501, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    features[7, 1] = float("nan")
    size = next(size for size in (8, 4, 2) if width * features.element_size() % size == 0)
    data = features.view(torch.uint8).numpy().tobytes()
    expected = sum(int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size))

    def read(features: torch.Tensor) -> int:
        return Look((), checksum(features), torch.zeros(2)).read().features_sum

    assert read(features) == expected % 2 ** (8 * size)
    assert read(features.flip(0)) == read(features)
    changed = features.clone()
    changed.view(torch.uint8)[3, 1] ^= 1
    assert read(changed) != read(features)


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_compiled_equals_eager(tiny, shape, dataset, target, monkeypatch, dtype: str) -> None:
    """Same losses and weights over some steps, and nothing is compiled again for another micro-batch.

    What was compiled is checked as it is warmed up, which compiles nothing more and refuses what is wrong: here too,
    since compiling takes most of the time.
    """
    settings = SETTINGS.model_copy(
        update={"dtype": dtype, "batches_per_step": 3, "epochs": 2, "context_slots": 60, "anchor_slots": 12}
    )
    ends = load_ends(tiny)
    shape = shape.model_copy(update={"layers": 2 if dtype == "float32" else 1})  # the fewer, the less to compile
    checked: list[dict[str, tuple[float, float]]] = []
    hold = check.hold
    monkeypatch.setattr(check, "hold", lambda found, **rest: (checked.append(dict(found)), hold(found, **rest)))

    def train(policy: str) -> tuple[DrafterStep, list[StepReport]]:
        step = DrafterStep(Drafter(shape, tiny.hidden_size).initialise(0), ends, settings, policy=policy)
        step.warm()
        assert not any(bool(tensor.any()) for tensor in (*step.buffers.tensors(), *step.shared()))
        reports: list[StepReport] = []
        batches = (
            features_of(target, tokens)
            for tokens in loader.micro_batches(Mixture([dataset]), data_settings(), settings, shape.block_size)
        )
        with forbid_recompiles() if policy == "compiled" else nullcontext():
            train_loop(step, alone(batches), total_steps=50, on_step=reports.append)
        return step, reports

    plain, eager = train("eager")
    step, compiled = train("compiled")
    tolerance = 1e-4 if dtype == "float32" else 3e-2
    assert [r.loss for r in compiled] == pytest.approx([r.loss for r in eager], rel=tolerance)
    assert len(compiled) > 3
    if dtype == "float32":  # AdamW makes a whole step of a gradient's rounding where it is near zero
        for ours, theirs in zip(step.drafter.parameters(), plain.drafter.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2 * settings.lr)
    assert len(checked) == 1
    assert all(error <= bound / 2 for error, bound in checked[0].values())
    with forbid_recompiles():
        step._check()
    assert step.recompiles == 0
    step._forward = lambda *args: DrafterStep._hidden(step, *args) * 1.2
    with pytest.raises(RunError, match=r"on cpu .* differs by .* Set train\.policy to eager\."):
        step.warm()


def test_weights_and_moments_are_float32_beside_bfloat16_products(tiny, shape) -> None:
    step = DrafterStep(
        Drafter(shape, tiny.hidden_size).initialise(0),
        load_ends(tiny),
        SETTINGS.model_copy(update={"dtype": "bfloat16"}),
    )
    step.warm()
    assert {p.dtype for p in step.drafter.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in step.drafter.parameters()} == {torch.float32}
    assert {t.dtype for state in step.optimizer.adamw.state.values() for t in state.values()} == {torch.float32}
    leaves = dict(zip(step._flat.leaves(step.gradients), step._leaves, strict=True))
    assert {p.dtype for p in step._leaves if p.ndim > 1} == {torch.bfloat16}
    assert {p.dtype for p in step._leaves if p.ndim == 1} == {torch.float32}
    before = [p.clone() for p in step._leaves]
    for parameter in step.drafter.parameters():
        parameter.grad.fill_(1e-3)
    step.sums[1] = 1
    step.update(0.1)
    weights = dict(step.drafter.named_parameters())
    for (name, working), old in zip(leaves.items(), before, strict=True):
        joined = torch.cat([weights[member] for member in leaf_names(weights)[name]])
        assert torch.equal(working, joined.to(working.dtype)), name
        assert not torch.equal(working, old)


def test_what_blocks_see_is_counted(
    tiny: TargetFacts, shape: DrafterSettings, ends: FrozenEnds, target: FeatureTarget, dataset: CompletionDataset
) -> None:
    """Against the mask that attention gets: its context part, once a block, of all micro-batches of a step."""
    step, seen = make_step(tiny, shape, ends, SETTINGS), 0
    step.clear()
    for tokens in loader.micro_batches(Mixture([dataset]), data_settings(), step.settings, shape.block_size):
        step.load(features_of(target, tokens))
        mask_1QK = step._dense().mask_GQK
        context = mask_1QK.view(-1, mask_1QK.shape[-1])[:: shape.block_size, : SETTINGS.context_slots]
        seen += int(context.sum())
    assert step.report(tokens, 0.0).visible == seen > 0
