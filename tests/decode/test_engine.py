"""The engine against transformers' own generate, and against itself in other arrangements."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import TopPLogitsWarper

from paceline.decode import engine as engine_module
from paceline.decode.engine import Engine
from paceline.decode.requests import Request, copies
from paceline.decode.sampling import Sampling, noise_key, uniform
from paceline.records import Completion, UserError
from paceline.target.load import TargetFacts
from paceline.target.model import DecodingTarget

DRAWN = Sampling(temperature=1.3, top_k=40, top_p=0.9, seed=5)
Done = dict[tuple[int | str, int], Completion]


@pytest.fixture(params=["tiny", "tied"], scope="module")
def facts(request: pytest.FixtureRequest) -> TargetFacts:
    return request.getfixturevalue(request.param)


def requests(count: int = 11, new: int = 30) -> list[Request]:
    """Prompts of 1 to 70 tokens, so that some cross from one reach to the next, with limits of their own."""
    chance = random.Random(3)
    return [
        Request(
            i, [chance.randrange(4, 128) for _ in range(chance.choice((1, 3, 9, 40, 62, 70)))], chance.randint(1, new)
        )
        for i in range(count)
    ]


def target_of(facts: TargetFacts, dtype: torch.dtype = torch.float64) -> DecodingTarget:
    return DecodingTarget(facts, (), dtype=dtype, device="cpu")


def complete(target: DecodingTarget, asked: list[Request], sampling: Sampling = DRAWN, rows: int = 4) -> Done:
    return {(r.key, r.copy): c for r, c in Engine(target, sampling, rows=rows, slots=120).run(asked)}


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_greedy_completions_are_those_of_transformers(facts: TargetFacts, rows: int) -> None:
    """Mixed lengths, fewer rows than prompts, and several stop tokens that do occur."""
    stock = AutoModelForCausalLM.from_pretrained(facts.folder, dtype=torch.float32)
    target = target_of(facts, torch.float32)
    target.stop_ids = (*facts.eos_ids, 17, 101, 64, 30, 8)
    done = complete(target, requests(), Sampling(), rows)
    assert len(done) == len(requests())
    for request in requests():
        ids = torch.tensor([request.prompt_ids])
        out = stock.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=list(target.stop_ids),
            pad_token_id=0,
        )
        expected = tuple(out[0, ids.shape[1] :].tolist())
        finish = "stop" if expected[-1] in target.stop_ids else "length"
        assert done[request.key, 0] == Completion(tuple(request.prompt_ids), expected, finish)
    assert {c.finish for c in done.values()} == {"stop", "length"}


def test_a_row_ends_at_every_stop_token_and_at_its_limit(tiny: TargetFacts) -> None:
    target = target_of(tiny)
    target.stop_ids = ()
    whole = complete(target, requests(new=40))
    assert all(len(whole[r.key, 0].token_ids) == r.max_new_tokens for r in requests(new=40))
    stops = {whole[0, 0].token_ids[3], whole[1, 0].token_ids[2]}
    target.stop_ids = tuple(stops)
    for place, completion in complete(target, requests(new=40)).items():
        tokens = whole[place].token_ids
        first = next((at for at, token in enumerate(tokens) if token in stops), None)
        assert completion.token_ids == (tokens if first is None else tokens[: first + 1])
        assert completion.finish == ("length" if first is None else "stop")
    for request, completion in Engine(target_of(tiny), DRAWN, rows=2, slots=80).run(requests(new=1)):
        assert len(completion.token_ids) == request.max_new_tokens == 1


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_completions_do_not_depend_on_rows_or_order(facts: TargetFacts, sampling: Sampling) -> None:
    target = target_of(facts)
    expected = complete(target, requests(), sampling)
    shuffled = random.Random(0).sample(requests(), len(requests()))
    assert complete(target, shuffled, sampling) == expected
    for rows in (1, 2, 32):
        assert complete(target, requests(), sampling, rows) == expected
    alone = {}
    for request in requests():
        alone |= complete(target, [request], sampling, rows=1)
    assert alone == expected


def test_another_seed_key_or_copy_draws_anew(tiny: TargetFacts) -> None:
    target, prompt = target_of(tiny), (5, 6, 7)
    asked = [Request(key, prompt, 20) for key in (1, "1", 2)]
    texts = [c.token_ids for c in complete(target, list(copies(asked, 3))).values()]
    texts.append(complete(target, asked[:1], Sampling(1.3, 40, 0.9, seed=6))[1, 0].token_ids)
    assert len(set(texts)) == len(texts) == 10
    assert len({c.token_ids for c in complete(target, list(copies(asked, 3)), Sampling()).values()}) == 1


class FakeGraph:
    """Makes the steps that capturing makes, then replays by calling."""

    made: list["FakeGraph"] = []  # noqa: RUF012

    def __init__(self, work, *, pool) -> None:
        work()
        work()
        self._work, self.calls = work, 0
        self.made.append(self)

    def __call__(self) -> None:
        self.calls += 1
        self._work()


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_looking_seldom_and_fixed_widths_change_nothing(
    facts: TargetFacts, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, with a stand-in for graphs: few widths, steps that a capture makes, rows that ended go on."""
    target = target_of(facts)
    target.stop_ids = (*facts.eos_ids, 17, 101, 64)
    asked = requests(60, new=40)
    expected = complete(target, asked, sampling)
    monkeypatch.setattr(engine_module, "Captured", FakeGraph)
    monkeypatch.setattr(engine_module, "new_pool", lambda device: device)
    monkeypatch.setattr(FakeGraph, "made", [])
    engine = Engine(target, sampling, rows=20, slots=120, captured=True)
    engine._look_every, engine._reach_step = 8, 16
    assert {(r.key, r.copy): c for r, c in engine.run(asked)} == expected
    widths, reaches = ({key[at] for key in engine._units} for at in (0, 1))
    assert widths == {8, 16, 20}
    assert len(reaches) > 2
    assert all(reach % 16 == 0 for reach in reaches)
    assert engine.stats.captured == len(FakeGraph.made) == len(engine._units)
    assert sum(graph.calls for graph in FakeGraph.made) == engine.stats.steps


def test_steps_made_by_capturing_count(tiny: TargetFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Captured", FakeGraph)
    monkeypatch.setattr(engine_module, "new_pool", lambda device: device)
    monkeypatch.setattr(FakeGraph, "made", [])
    target = target_of(tiny)
    target.stop_ids = ()
    engine = Engine(target, Sampling(), rows=8, slots=64, captured=True)
    engine._look_every, engine._reach_step = 8, 16
    asked = Request(0, (5, 6, 7, 8) * 2, 41)  # its first steps read up to the end of the first reach
    assert list(engine.run([asked])) == [(asked, complete(target, [asked], Sampling())[0, 0])]
    assert sum(graph.calls + 2 for graph in FakeGraph.made) == 40


def test_a_model_without_preferences_writes_down_the_noise(tiny: TargetFacts) -> None:
    """Of 128 equally likely tokens the drawn one says what number was drawn: another one at every place."""
    target = target_of(tiny, torch.float32)
    target.stop_ids = ()
    target.model.lm_head.weight.zero_()
    asked = [Request("a", (5,) * 3, 40), Request("b", (6,) * 50, 40)]
    for request, completion in Engine(target, Sampling(1.0, seed=4), rows=2, slots=120).run(asked):
        start = len(request.prompt_ids)
        places = torch.arange(start, start + 40)
        noise = torch.full_like(places, noise_key(4, request.key, 0))
        assert completion.token_ids == tuple((uniform(noise, places) * 128).long().tolist())


def test_requests_are_taken_when_there_are_rows_for_them(tiny: TargetFacts) -> None:
    taken = 0

    def endless() -> Iterator[Request]:
        nonlocal taken
        while True:
            taken += 1
            yield Request(taken, (5, 6), 4)

    results = Engine(target_of(tiny), Sampling(), rows=3, slots=16).run(endless())
    for count in range(1, 20):
        next(results)
        assert taken <= count + 6


def test_a_run_that_was_left_does_not_show_in_the_next(tiny: TargetFacts) -> None:
    target = target_of(tiny)
    engine = Engine(target, DRAWN, rows=4, slots=120)
    left = engine.run(requests())
    next(left)
    left.close()
    again = list(engine.run(requests()))
    assert len(again) == len(requests())
    assert {(r.key, r.copy): c for r, c in again} == complete(target, requests())


def test_stats_count_what_was_done(tiny: TargetFacts) -> None:
    asked = [Request(0, (5,) * 7, 6), Request(1, (6,) * 4, 6)]
    target = target_of(tiny)
    target.stop_ids = ()
    engine = Engine(target, Sampling(), rows=2, slots=16)
    assert sum(len(c.token_ids) for _, c in engine.run(asked)) == 12
    stats = engine.stats
    assert (stats.finished, stats.finished_tokens, stats.tokens) == (2, 12, 12)
    assert (stats.prompt_tokens, stats.padded_tokens) == (11, 14)
    assert (stats.steps, stats.row_steps) == (5, 10)  # the first token comes from the prompt pass
    assert stats.slot_steps == (8 + 9 + 10 + 11 + 12) + (5 + 6 + 7 + 8 + 9)
    assert 0 < stats.decode_s < stats.busy_s


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("a", (), 2), "Prompt 'a' has no tokens"),
        (Request(7, (5, 128), 2), "Prompt 7 holds token id 128; the target has 0..127"),
        (Request(7, (-1,), 2), "Prompt 7 holds token id -1"),
        (Request(7, (5,), 0), "Prompt 7 may have 0 new tokens"),
        (
            Request(7, (5,) * 90, 11),
            "Prompt 7 has 90 tokens and may have 11 new ones, together more than the 100 slots",
        ),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(tiny: TargetFacts, request_: Request, message: str) -> None:
    engine = Engine(target_of(tiny), Sampling(), rows=2, slots=100)
    with pytest.raises(UserError, match=message):
        list(engine.run([Request(1, (5, 6), 3), request_]))
    assert [len(c.token_ids) for _, c in engine.run([Request(1, (5,) * 90, 10)])] == [10]


def test_a_request_longer_than_the_targets_context_is_refused(tiny: TargetFacts) -> None:
    engine = Engine(target_of(tiny), Sampling(), rows=1, slots=1000)
    with pytest.raises(UserError, match="together more than the 512 positions the target has"):
        list(engine.run([Request(1, (5,) * 510, 3)]))
    assert len(next(engine.run([Request(1, (5,) * 510, 2)]))[1].token_ids) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("traceable")
def test_compiled_steps_give_the_same_completions_however_many_there_are() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    target = DecodingTarget.around(LlamaForCausalLM(config).eval().requires_grad_(False), ())
    asked = [Request(i, (5 + i,) * (i + 1), 75) for i in range(6)]
    expected = complete(target, asked)
    engine = Engine(target, DRAWN, rows=4, slots=120, compiled=True)
    engine._reach_step = 8
    assert {(r.key, r.copy): c for r, c in engine.run(asked)} == expected
    assert len(engine._units) > 8  # more than dynamo compiles by itself
    assert {width for width, _ in engine._units} == {4}


def test_tokens_are_drawn_as_often_as_transformers_says(tied: TargetFacts) -> None:
    """The first token comes from the prompt pass, the second from a step."""
    stock = AutoModelForCausalLM.from_pretrained(tied.folder, dtype=torch.float32)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.3), TopKLogitsWarper(40), TopPLogitsWarper(0.9)])
    prompt, count = (9, 33, 50), 6000
    engine = Engine(target_of(tied, torch.float32), DRAWN, rows=1000, slots=8)
    pairs = [c.token_ids for _, c in engine.run(Request(i, prompt, 2) for i in range(count))]

    def check(drawn: list[int], before: tuple[int, ...]) -> None:
        ids = torch.tensor([before])
        with torch.no_grad():
            expected = warpers(ids, stock(ids).logits[:, -1]).softmax(-1)[0] * len(drawn)
        counts = torch.zeros(128)
        for token, seen in Counter(drawn).items():
            counts[token] = seen
        assert set(counts.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())
        often = expected >= 5
        chi = ((counts - expected)[often] ** 2 / expected[often]).sum().item()
        freedom = int(often.sum()) - 1
        assert freedom >= 5
        assert abs(chi - freedom) < 4 * (2 * freedom) ** 0.5

    firsts = [pair[0] for pair in pairs]
    check(firsts, prompt)
    common = Counter(firsts).most_common(1)[0][0]
    check([pair[1] for pair in pairs if pair[0] == common], (*prompt, common))
