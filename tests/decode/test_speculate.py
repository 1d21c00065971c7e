"""Speculative decoding gives the target's own text, greedy or drawn, whatever the drafter proposes."""

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.config import DrafterSettings
from paceline.decode import draft, steps
from paceline.decode import engine as engine_module
from paceline.decode.engine import Engine
from paceline.decode.generate import generate
from paceline.decode.requests import Request
from paceline.decode.sampling import Sampling
from paceline.decode.speculate import speculate
from paceline.decode.steps import Drafts
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import Completion, UserError
from paceline.target.load import TargetFacts, load_ends
from paceline.target.model import DecodingTarget

NEW = 30
DRAWN = Sampling(temperature=1.3, top_k=40, top_p=0.9, seed=5)
BOTH = pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
Guess = Callable[[int, int], list[int]]


@pytest.fixture(scope="module")
def target(tiny: TargetFacts, shape: DrafterSettings) -> DecodingTarget:
    return DecodingTarget(tiny, shape.taps, dtype=torch.float64, device="cpu")


@pytest.fixture(scope="module")
def drafts(tiny: TargetFacts, shape: DrafterSettings) -> Drafts:
    return Drafts(Drafter(shape, tiny.hidden_size).initialise(0).double(), load_ends(tiny).to("cpu", torch.float64))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 128, (n,), generator=generator).tolist() for n in (5, 2, 9, 3, 7)]


def run(
    target: DecodingTarget,
    drafts: Drafts,
    prompts: list[list[int]],
    rows: int,
    new: int = NEW,
    sampling: Sampling = DRAWN,
) -> dict[int, Completion]:
    asked = {"max_new_tokens": new, "rows": rows, "sampling": sampling}
    return dict(speculate(target, drafts.drafter, drafts.ends, prompts, **asked))


def put_in_place(monkeypatch: pytest.MonkeyPatch, guess: Guess) -> None:
    """Let a function of an anchor's token and place propose the drafts."""

    def propose(self, anchor_ids_R, anchors_R, sizes_R, reach):  # type: ignore[no-untyped-def]
        return torch.tensor([guess(*row) for row in zip(anchor_ids_R.tolist(), anchors_R.tolist(), strict=True)])

    monkeypatch.setattr(draft.DraftSession, "propose", propose)


def mostly(texts: list[list[int]], slots: int = 3) -> Guess:
    """Guess what known texts say, each token with a chance of a fifth to be another; the same guess every time."""

    def guess(token: int, anchor: int) -> list[int]:
        future = next((text[anchor + 1 :] for text in texts if text[anchor : anchor + 1] == [token]), [])[:slots]
        future += [9] * (slots - len(future))
        chance = random.Random(token * 1000 + anchor)
        return [token if chance.random() < 0.8 else 11 for token in future]

    return guess


@pytest.fixture
def half_right(
    monkeypatch: pytest.MonkeyPatch, target: DecodingTarget, prompts: list[list[int]], request: pytest.FixtureRequest
) -> dict[int, Completion]:
    """Replace the drafter's proposals by the target's own continuation with mistakes; return that continuation."""
    sampling = request.node.callspec.params.get("sampling", DRAWN) if hasattr(request.node, "callspec") else DRAWN
    plain = dict(generate(target, prompts, max_new_tokens=NEW + 8, rows=8, sampling=sampling))
    put_in_place(monkeypatch, mostly([[*c.prompt_ids, *c.token_ids] for c in plain.values()]))
    return plain


# ------------------------------------------------------------------------------------------------- the same text


@BOTH
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_an_untrained_drafter_loses_nothing(target, drafts, prompts, rows: int, sampling: Sampling) -> None:
    plain = dict(generate(target, prompts, max_new_tokens=NEW, rows=rows, sampling=sampling))
    for index, completion in run(target, drafts, prompts, rows, sampling=sampling).items():
        assert (completion.token_ids, completion.finish) == (plain[index].token_ids, plain[index].finish)
        assert sum(completion.acceptance_lengths) == len(completion.token_ids) - 1


@BOTH
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("new", [NEW, 2, 1])
def test_partly_right_drafts_lose_nothing_and_save_cycles(
    shape, target, drafts, prompts, half_right: dict[int, Completion], rows: int, new: int, sampling: Sampling
) -> None:
    done = run(target, drafts, prompts, rows, new, sampling)
    for index, completion in done.items():
        assert completion.token_ids == half_right[index].token_ids[:new]
        assert sum(completion.acceptance_lengths) == len(completion.token_ids) - 1
        assert all(1 <= length <= shape.block_size for length in completion.acceptance_lengths)
    if new == NEW:
        assert max(max(c.acceptance_lengths) for c in done.values()) == shape.block_size


def test_drawn_text_is_the_same_in_float32(tiny: TargetFacts, shape: DrafterSettings, prompts, monkeypatch) -> None:
    target = DecodingTarget(tiny, shape.taps, dtype=torch.float32, device="cpu")
    drafts = Drafts(Drafter(shape, tiny.hidden_size).initialise(0), load_ends(tiny))
    plain = dict(generate(target, prompts, max_new_tokens=60, rows=2, sampling=DRAWN))
    put_in_place(monkeypatch, mostly([[*c.prompt_ids, *c.token_ids] for c in plain.values()]))
    done = run(target, drafts, prompts, 3, 60)
    assert {i: c.token_ids for i, c in done.items()} == {i: c.token_ids for i, c in plain.items()}
    assert max(max(c.acceptance_lengths) for c in done.values()) == shape.block_size


def test_a_stop_token_inside_an_accepted_block_ends_the_answer_there(
    tiny, target, drafts, prompts, half_right: dict[int, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = (half_right[0].token_ids[5], half_right[1].token_ids[0], half_right[2].token_ids[7])
    monkeypatch.setattr(target, "stop_ids", (*tiny.eos_ids, *stops))
    done = run(target, drafts, prompts, 8)
    for index, completion in done.items():
        whole = half_right[index].token_ids[:NEW]
        cut = next((at + 1 for at, token in enumerate(whole) if token in target.stop_ids), NEW)
        assert completion.token_ids == whole[:cut]
        assert completion.finish == ("stop" if whole[cut - 1 : cut][0] in target.stop_ids else "length")
    assert done[1].acceptance_lengths == ()


def test_a_cycle_yields_its_accepted_drafts_and_the_bonus_unless_the_answer_ends(
    target, drafts, prompts, half_right: dict[int, Completion]
) -> None:
    cut = 0
    for new in range(6, 16):
        for completion in run(target, drafts, prompts, 2, new).values():
            pairs = list(zip(completion.acceptance_lengths, completion.accepted_drafts, strict=True))
            assert all(produced == accepted + 1 for produced, accepted in pairs[:-1])
            produced, accepted = pairs[-1]
            assert produced in (accepted, accepted + 1)
            cut += produced == accepted
    assert cut > 0


# ------------------------------------------------------------------------------------- the reference loop, by hand


def by_hand(model: torch.nn.Module, guess: Guess, request: Request, stops: tuple[int, ...], B: int) -> Completion:
    """One row, no cache, the model run whole for every cycle: the loop as it is described."""
    prompt, limit = list(request.prompt_ids), len(request.prompt_ids) + request.max_new_tokens
    ids = [*prompt, int(model(torch.tensor([prompt])).logits[0, -1].argmax())]
    lengths, accepted = [], []
    while ids[-1] not in stops and len(ids) < limit:
        size = min(B, limit - len(ids) + 1)
        block = [ids[-1], *guess(ids[-1], len(ids) - 1)][:size]
        wanted = model(torch.tensor([[*ids[:-1], *block]])).logits[0, -size:].argmax(-1).tolist()
        right = 0
        while right < size - 1 and block[right + 1] == wanted[right]:
            right += 1
        new = [*block[1 : right + 1], wanted[right]][: limit - len(ids)]
        new = new[: next((at + 1 for at, token in enumerate(new) if token in stops), len(new))]
        ids += new
        lengths.append(len(new))
        accepted.append(right)
    finish = "stop" if ids[-1] in stops else "length"
    return Completion(tuple(prompt), tuple(ids[len(prompt) :]), finish, tuple(lengths), tuple(accepted))


def asked(count: int = 40) -> list[Request]:
    """Prompts of 1 to 70 tokens with limits of their own, so that blocks shrink and rows cross from reach to reach."""
    chance = random.Random(7)
    lengths = [chance.choice((1, 2, 5, 20, 62, 70)) for _ in range(count)]
    return [
        Request(i, [chance.randrange(4, 128) for _ in range(n)], chance.randint(1, 40)) for i, n in enumerate(lengths)
    ]


STOPS = (17, 101)  # beside the target's own


@pytest.fixture(scope="module")
def looped(
    tiny: TargetFacts, shape: DrafterSettings, target: DecodingTarget
) -> tuple[Guess, dict[int | str, Completion]]:
    """Mostly right drafts, and what the loop by hand makes of all requests with them and several stop tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float64).requires_grad_(False)
    longer = [replace(request, max_new_tokens=request.max_new_tokens + 8) for request in asked()]
    plain = [c for _, c in Engine(target, Sampling(), rows=16, slots=120).run(longer)]  # right behind the limits too
    guess = mostly([[*c.prompt_ids, *c.token_ids] for c in plain])
    stops = (*tiny.eos_ids, *STOPS)
    return guess, {r.key: by_hand(model, guess, r, stops, shape.block_size) for r in asked()}


@pytest.fixture
def loop(
    looped: tuple[Guess, dict[int | str, Completion]],
    tiny: TargetFacts,
    target: DecodingTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[int | str, Completion]:
    """What the loop by hand makes of all requests, with its drafts and stop tokens in place."""
    guess, completions = looped
    monkeypatch.setattr(target, "stop_ids", (*tiny.eos_ids, *STOPS))
    put_in_place(monkeypatch, guess)
    return dict(completions)


def complete(engine: Engine, requests: list[Request]) -> dict[int | str, Completion]:
    return {r.key: c for r, c in engine.run(requests)}


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_tokens_and_cycles_are_those_of_the_loop_by_hand(loop, target, drafts, rows: int) -> None:
    """Limits and stop tokens of all kinds; rows leave and enter while others go on."""
    engine = Engine(target, Sampling(), rows=rows, slots=120, drafts=drafts)
    assert complete(engine, asked()) == loop
    lengths = [length for c in loop.values() for length in c.acceptance_lengths]
    assert set(lengths) == {1, 2, 3, 4}
    assert {c.finish for c in loop.values()} == {"stop", "length"}
    assert engine.stats.tokens == engine.stats.finished_tokens == sum(len(c.token_ids) for c in loop.values())
    if rows == 1:  # the host sees only after a cycle that an answer ended with its first token
        unseen = sum(not loop[r.key].acceptance_lengths for r in asked() if r.max_new_tokens > 1)
        assert engine.stats.steps == len(lengths) + unseen


def test_prompts_enter_rows_that_became_free_beside_a_long_answer(target, drafts, monkeypatch) -> None:
    """The short answers are decoded while the long one is: no cycle is made for them alone."""
    monkeypatch.setattr(target, "stop_ids", ())
    long, *short = [Request("long", (5, 6, 7), 63), *(Request(i, (8 + i, 9), 7) for i in range(10))]
    plain = complete(Engine(target, Sampling(), rows=2, slots=80), [long, *short])
    wrong = min(set(range(128)) - {token for c in plain.values() for token in c.token_ids})
    put_in_place(monkeypatch, lambda token, anchor: [wrong] * 3)  # so a cycle gives a token
    engine = Engine(target, Sampling(), rows=2, slots=80, drafts=drafts)
    order = [r.key for r, _ in engine.run([long, *short])]
    assert order == [*range(10), "long"]
    assert engine.stats.steps == 62


class FakeGraph:
    """Makes the steps that capturing makes, then replays by calling."""

    def __init__(self, work: Callable[[], None], *, pool: object) -> None:
        work()
        work()
        self._work = work

    def __call__(self) -> None:
        self._work()


def test_looking_seldom_and_fixed_widths_change_nothing(loop, target, drafts, monkeypatch) -> None:
    """What a GPU does, with a stand-in for graphs: few widths, cycles that a capture makes, rows that ended go on."""
    monkeypatch.setattr(engine_module, "Captured", FakeGraph)
    monkeypatch.setattr(engine_module, "new_pool", lambda device: device)
    engine = Engine(target, Sampling(), rows=20, slots=120, drafts=drafts, captured=True)
    engine._look_every, engine._reach_step = 4, 16
    assert complete(engine, asked()) == loop
    assert {width for width, _ in engine._units} <= {8, 16, 20}
    assert len({reach for _, reach in engine._units}) > 2
    assert engine.stats.captured == len(engine._units)


def test_what_is_prepared_is_all_that_is_ever_asked_for(loop, target, drafts, monkeypatch) -> None:
    """So nothing is captured later, and what preparing wrote into free rows disturbs nobody."""
    monkeypatch.setattr(engine_module, "Captured", FakeGraph)
    monkeypatch.setattr(engine_module, "new_pool", lambda device: device)
    engine = Engine(target, Sampling(), rows=20, slots=120, drafts=drafts, captured=True)
    engine._look_every, engine._reach_step = 4, 16
    complete(engine, asked()[:1])
    engine.prepare()
    captured = engine.stats.captured
    assert captured == len(engine.shapes()) == len({*engine.shapes()}) == len(engine._units)
    assert {*engine.shapes()} == {(width, reach) for width in (8, 16, 20) for reach in range(16, 129, 16)}
    assert complete(engine, asked()) == loop
    assert engine.stats.captured == captured
    assert Engine(target, Sampling(), rows=20, slots=120, drafts=drafts).shapes() == []


@pytest.mark.parametrize("rows", [4, 12])  # rows are used again, rows move
def test_a_drafter_reads_the_features_of_its_own_row(target, drafts, monkeypatch, rows: int) -> None:
    """What is drafted for a row does not depend on its company."""
    drafter = copy.deepcopy(drafts.drafter)
    for matrix in (p for p in drafter.parameters() if p.ndim == 2):
        matrix.data.mul_(10)  # so that what is drafted depends on the context
    drafts = Drafts(drafter, drafts.ends)
    right = {}
    proposed = draft.DraftSession.propose

    def spied(self, anchor_ids_R, anchors_R, sizes_R, reach):  # type: ignore[no-untyped-def]
        drafted_RK = proposed(self, anchor_ids_R, anchors_R, sizes_R, reach)
        for token, anchor, size, row in zip(
            *(x.tolist() for x in (anchor_ids_R, anchors_R, sizes_R, drafted_RK)), strict=True
        ):
            right.setdefault((token, anchor, size), set()).add(tuple(row[: size - 1]))
        return drafted_RK

    monkeypatch.setattr(draft.DraftSession, "propose", spied)
    requests = asked(12)
    expected = {}
    for request in requests:
        expected |= complete(Engine(target, DRAWN, rows=1, slots=120, drafts=drafts), [request])
    alone = {key: set(found) for key, found in right.items()}
    right.clear()
    assert complete(Engine(target, DRAWN, rows=rows, slots=120, drafts=drafts), requests) == expected
    seen = {key: found for key, found in right.items() if key in alone}  # a row that has ended drafts for nobody
    assert len(seen) > 50
    assert all(alone[key] <= found for key, found in seen.items())


# ------------------------------------------------------------------------------------------------ the same chances

CHANCES = Sampling(temperature=2.0, top_k=6, top_p=0.95, seed=1)
PROMPT, DRAWS, LENGTH = (9, 33, 50), 6000, 4


@pytest.fixture(scope="module")
def expected(tied: TargetFacts) -> dict[tuple[int, ...], float]:
    """The chance of every continuation of four tokens, by transformers' model and warpers."""
    stock = AutoModelForCausalLM.from_pretrained(tied.folder, dtype=torch.float32).requires_grad_(False)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(2.0), TopKLogitsWarper(6), TopPLogitsWarper(0.95)])
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        ids = torch.tensor([[*PROMPT, *text] for text in chances])
        shares = warpers(ids, stock(ids).logits[:, -1]).softmax(-1)
        chances = {
            (*text, token): chance * row[token].item()
            for (text, chance), row in zip(chances.items(), shares, strict=True)
            for token in row.nonzero().flatten().tolist()
        }
    return chances


def excess(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Return by how many standard deviations chi-square is above what it should be; rare texts are one class."""
    total = counts.total()
    often = {text: chance * total for text, chance in expected.items() if chance * total >= 5}
    rest = total - sum(often.values()), total - sum(counts[text] for text in often)
    classes = [*((often[text], counts[text]) for text in often), *([rest] if rest[0] >= 5 else [])]
    chi = sum((seen - wanted) ** 2 / wanted for wanted, seen in classes)
    freedom = len(classes) - 1
    assert freedom >= 20
    return (chi - freedom) / (2 * freedom) ** 0.5


@pytest.fixture
def drawn(
    tied: TargetFacts, shape: DrafterSettings, expected: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Counter[tuple[int, ...]]]:
    """Return a function that draws many continuations with drafts that are the likeliest ones."""
    taps = (0, 1, 3)
    target = DecodingTarget(tied, taps, dtype=torch.float32, device="cpu")
    target.stop_ids = ()
    drafter = Drafter(shape.model_copy(update={"taps": taps}), tied.hidden_size).initialise(0)
    drafts = Drafts(drafter, load_ends(tied))

    def guess(token: int, anchor: int) -> list[int]:
        place = anchor - len(PROMPT)
        best = max((text for text in expected if text[place] == token), key=expected.__getitem__, default=())
        return [*best[place + 1 :], 9, 9, 9][:3]

    put_in_place(monkeypatch, guess)

    def draw() -> Counter[tuple[int, ...]]:
        engine = Engine(target, CHANCES, rows=1000, slots=8, drafts=drafts)
        done = [c for _, c in engine.run(Request(i, PROMPT, LENGTH) for i in range(DRAWS))]
        lengths = Counter(length for c in done for length in c.acceptance_lengths)
        assert all(lengths[length] > DRAWS / 50 for length in (1, 2, 3))
        return Counter(c.token_ids for c in done)

    return draw


def test_texts_are_drawn_as_often_as_the_target_says(drawn, expected) -> None:
    counts = drawn()
    assert set(counts) <= set(expected)
    assert abs(excess(counts, expected)) < 4


def test_a_wrong_rule_of_acceptance_shows_in_how_often_texts_are_drawn(drawn, expected, monkeypatch) -> None:
    right = steps._accepted
    B = 4

    def one_too_many(drafted_WK, choice_WB, size_W):  # type: ignore[no-untyped-def]
        return torch.minimum(right(drafted_WK, choice_WB, size_W) + 1, size_W - 1).clamp(max=B - 1)

    monkeypatch.setattr(steps, "_accepted", one_too_many)
    assert excess(drawn(), expected) > 20


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 4, "There must be at least one prompt to decode, got none"),
        ([[5], []], 4, "Prompt 2 of 2 has no tokens"),
        ([[5], [128]], 4, "Prompt 1 holds token id 128; the target has 0..127"),
        ([[5] * 510], 3, "Prompt 0 has 510 tokens and may have 3 new ones, together more than the 512 positions"),
        ([[5]], 0, "Prompt 0 may have 0 new tokens"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused_before_anything_is_decoded(
    target, drafts, prompts: list[list[int]], new: int, message: str, monkeypatch
) -> None:
    monkeypatch.setattr("paceline.decode.generate.Engine", None)
    with pytest.raises(UserError, match=message):
        next(speculate(target, drafts.drafter, drafts.ends, prompts, max_new_tokens=new, rows=1))


def test_an_answer_may_end_at_the_last_position_of_the_context(target, drafts) -> None:
    """The last block stands across the end of the target's context."""
    prompts = [[5, 6] * 250]
    plain = dict(generate(target, prompts, max_new_tokens=12, rows=1))
    assert run(target, drafts, prompts, 1, 12, Sampling())[0].token_ids == plain[0].token_ids


def test_a_drafter_that_cannot_draft_for_the_target_is_refused(tiny, shape, target, drafts) -> None:
    def attempt(drafter: Drafter, ends: FrozenEnds = drafts.ends, target: DecodingTarget = target) -> None:
        next(speculate(target, drafter, ends, [[5, 6]], max_new_tokens=4, rows=1))

    def of(width: int = tiny.hidden_size, **changes: object) -> Drafter:
        return Drafter(shape.model_copy(update=changes), width).initialise(0).double()

    with pytest.raises(UserError, match="block_size must be at least 2, an anchor and a draft, got 1"):
        attempt(of(block_size=1))
    with pytest.raises(UserError, match="got hidden_size 32 where the target has 64"):
        attempt(of(width=32))
    with pytest.raises(UserError, match="mask_token_id must be a row of the target's embedding, got 128 of 128"):
        attempt(of(mask_token_id=128))
    with pytest.raises(UserError, match=f"features of width {64 * len(shape.taps)} where 64 are read"):
        attempt(of(taps=(1,)))
    with pytest.raises(UserError, match="features of width 0"):
        attempt(of(), target=DecodingTarget(tiny, (), dtype=torch.float64, device="cpu"))


def test_the_given_drafter_can_still_be_trained(tiny, shape, target) -> None:
    """What decoding does to be quick is done to a copy."""
    drafter = Drafter(shape, tiny.hidden_size).initialise(0)
    next(
        speculate(
            DecodingTarget(tiny, shape.taps, dtype=torch.float32, device="cpu"),
            drafter,
            load_ends(tiny),
            [[5]],
            max_new_tokens=3,
            rows=1,
        )
    )
    context = drafter.context(torch.ones(1, 2, drafter.fc.in_features), torch.arange(2)[None])
    context[0][0].sum().backward()
    assert drafter.fc.weight.grad is not None
