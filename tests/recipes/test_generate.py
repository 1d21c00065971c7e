"""`paceline generate` with a made-up completer: what is asked, kept, left out, refused, and found after any death."""

import hashlib
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli_options import finish
from paceline.data.completions import load_ledger, save_ledger
from paceline.data.prompt_file import PromptLines
from paceline.decode.requests import Request
from paceline.observe.console import Console
from paceline.recipes import generate as recipe
from paceline.recipes.generate import generate_completions
from paceline.recipes.generate_asked import Asked
from paceline.recipes.prepare import prepare_dataset
from paceline.recipes.texts import generated_text
from paceline.records import Completion, PacelineError, RunError, UserError
from paceline.target.load import TargetFacts, load_tokenizer

EOS = 2


class FakeCompleter:
    """Answers that follow from request and prompt alone, in an order that does not, a few at a time."""

    def __init__(self, seed: int = 0, fails: Callable[[Request], bool] = lambda request: False) -> None:
        self.asked: list[str] = []
        self._random, self._fails = random.Random(seed), fails

    def complete(self, requests: Iterable[Request]) -> Iterator[tuple[Request, Completion | PacelineError]]:
        source = iter(requests)
        waiting = list(islice(source, 5))
        while waiting:
            request = waiting.pop(self._random.randrange(len(waiting)))
            self.asked.append(str(request.key))
            yield request, RunError("the server said 500.") if self._fails(request) else answer(request)
            waiting += islice(source, 5 - len(waiting))

    def note(self, left: int | None) -> str:
        return ""


def answer(request: Request) -> Completion:
    """Up to 12 tokens, cut or stopped; where the prompt holds w9, a loop."""
    draw = random.Random(repr((request.key, list(request.prompt_ids))))
    if 9 in request.prompt_ids:
        return Completion(tuple(request.prompt_ids), (7,) * 70, "length")
    words = [draw.randrange(10, 120) for _ in range(draw.randrange(1, 12))]
    if draw.random() < 0.25:
        return Completion(tuple(request.prompt_ids), tuple(words), "length")
    return Completion(tuple(request.prompt_ids), (*words, EOS), "stop")


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: TargetFacts) -> None:
    """The target is looked at once; messages name files without a path."""
    tokenizer = load_tokenizer(str(tiny.folder))
    monkeypatch.setattr(recipe, "describe", lambda *_: tiny)
    monkeypatch.setattr(recipe, "load_tokenizer", lambda *_: tokenizer)
    monkeypatch.chdir(tmp_path)


def written(*rows: object) -> Path:
    path = Path("p.jsonl")
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def user(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def mixed() -> Path:
    """Four shards of 8 lines: prompts with and without ids, a blank line, conversations, refused ones."""
    rows: list[object] = [{"prompt": f"w{20 + i} w{40 + i}"} for i in range(26)]
    rows[3] = {"prompt": "w30 w31", "id": "mine"}
    rows[5] = ""
    rows[9] = user("w50", "w51 w52", "w53")
    rows[12] = "{nope"
    rows[17] = {"prompt": "w9"}
    rows[20] = {"prompt": "w4 " * 511}
    rows[22] = user("w60", "w61") | {"id": "id77"}
    return written(*rows)


def run(
    out: str = "out", fake: FakeCompleter | None = None, prompts: Path | None = None, **more: Any
) -> dict[str, Any]:
    how = {key: more.pop(key) for key in ("overwrite", "retry_errors", "console") if key in more}
    how.setdefault("console", Console(json=True))
    asked = Asked("tiny", **{"max_quarantined": 0.5, "max_new_tokens": 80, **more})
    made = fake or FakeCompleter()
    return generate_completions(
        prompts or Path("p.jsonl"), Path(out), asked, make=lambda *_: made, shard_lines=8, **how
    )


def rows_of(out: str = "out", kind: str = "completions") -> list[dict[str, Any]]:
    files = sorted(Path(out).glob(f"{kind}-*"))
    return [json.loads(line) for path in files for line in path.read_bytes().splitlines()]


def contents(out: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(out).iterdir() if path.name != "completions.json"}


def test_every_prompt_ends_once_in_the_files_order() -> None:
    mixed()
    summary = run(samples=2, temperature=1.0)
    rows, refused = rows_of(), rows_of(kind="quarantine")
    assert [row["line"] for row in rows] == sorted(row["line"] for row in rows)
    names = [row["id"] for row in rows]
    assert len(set(names)) == len(names)
    assert {"1/0", "1/1", "mine/0", "id77/1"} <= set(names)
    assert [(entry["id"], entry["reason"]) for entry in refused] == [
        (None, "not JSON"),
        (None, "not JSON"),
        (None, "too long"),
        (None, "too long"),
    ]
    assert [(entry["line"], entry["copy"]) for entry in refused] == [(13, 0), (13, 1), (21, 0), (21, 1)]
    assert refused[0]["row"] == "{nope"
    assert refused[2]["detail"].startswith("p.jsonl:21 has 511 tokens and --max-new-tokens is 80, together more than")
    assert (summary["prompts"], summary["conversations"], summary["shards"]) == (25, 50, 4)
    assert summary["quarantined"] == {"not JSON": 2, "too long": 2}
    assert summary["cut_at_max_new_tokens"] == sum(row["finish"] == "length" for row in rows) > 0
    assert summary["stopped"] == sum(row["finish"] == "stop" for row in rows)
    assert summary["tokens_generated"] == sum(len(row["completion_ids"]) for row in rows)
    assert [row["id"] for row in rows if row["loop"]] == ["18/0", "18/1"]
    assert summary["loops"] == 2


def test_answers_are_the_completers_own(tiny: TargetFacts) -> None:
    mixed()
    run()
    for row in rows_of():
        expected = answer(Request(row["id"], row["prompt_ids"], 80))
        assert (tuple(row["completion_ids"]), row["finish"]) == (expected.token_ids, expected.finish)
        words = [f"w{token}" for token in row["completion_ids"] if token != EOS]
        assert row["messages"][-1] == {"role": "assistant", "content": " ".join(words)}


def test_a_conversation_goes_on_with_the_targets_own_answers() -> None:
    written(*[user("w50", "w51 w52", "w53")] * 12)
    fake = FakeCompleter()
    run(fake=fake)
    rows = rows_of()
    by_line: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_line.setdefault(row["line"], []).append(row)
    assert len(by_line) == 12
    lengths = set()
    for line, turns in by_line.items():
        lengths.add(len(turns))
        history: list[int] = []
        for at, (row, said) in enumerate(zip(turns, ([50], [51, 52], [53]), strict=False), 1):
            assert row["id"] == (str(line) if at == 1 else f"{line} turn {at}")
            assert row["prompt_ids"] == history + said
            history = row["prompt_ids"] + [token for token in row["completion_ids"] if token != EOS]
        assert all(row["finish"] == "stop" for row in turns[:-1])
        if turns[-1]["finish"] == "length":
            assert turns[-1].get("turns_left", 0) == 3 - len(turns)
        else:
            assert len(turns) == 3
    assert lengths == {1, 2, 3}
    assert len(fake.asked) == len(set(fake.asked)) == len(rows)


def test_given_answers_are_replaced_or_kept() -> None:
    given = {"role": "assistant", "content": "w99"}
    talk = [user("w50")["messages"][0], given, user("w51")["messages"][0], given]
    written({"messages": talk})
    run("new")
    assert [99 in row["prompt_ids"] for row in rows_of("new")][:1] == [False]
    run("kept", turns="last")
    assert [row["prompt_ids"] for row in rows_of("kept")] == [[50, 99, 51]]


@pytest.mark.parametrize(("setting", "reason"), [("on_length", "cut at max_new_tokens"), ("on_loop", "ends in a loop")])
def test_faulty_answers_are_left_out_where_asked(setting: str, reason: str) -> None:
    mixed()
    kept = run("kept")
    summary = run("dropped", **{setting: "drop"})
    faulty = [row for row in rows_of("kept") if (row["loop"] if setting == "on_loop" else row["finish"] == "length")]
    entries = [entry for entry in rows_of("dropped", "quarantine") if entry["reason"] == reason]
    assert [entry["row"]["completion_ids"] for entry in entries] == [row["completion_ids"] for row in faulty]
    assert [row["id"] for row in rows_of("dropped")] == [row["id"] for row in rows_of("kept") if row not in faulty]
    for count in ("cut_at_max_new_tokens", "loops", "tokens_generated", "stopped"):
        assert summary[count] == kept[count]
    assert summary["quarantined"][reason] == len(faulty)


def test_prompts_are_read_when_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    written(*[{"prompt": f"w{i}"} for i in range(10, 40)])
    read = []
    parse = PromptLines.parse
    monkeypatch.setattr(PromptLines, "parse", lambda self, *line: read.append(1) or parse(self, *line))

    class Watching(FakeCompleter):
        def complete(self, requests: Iterable[Request]) -> Iterator[Any]:
            before = len(read)
            for taken, request in enumerate(requests, 1):
                assert len(read) - before == taken
                yield request, answer(request)

    assert run(fake=Watching())["rows"] == 30


def test_a_finished_folder_is_found() -> None:
    mixed()
    first = run()
    before = {path: path.stat().st_mtime_ns for path in Path("out").glob("*0*")}
    fake = FakeCompleter()
    again = run(fake=fake)
    assert fake.asked == []
    assert again == first | {"found": 25}
    assert {path: path.stat().st_mtime_ns for path in Path("out").glob("*0*")} == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_new_tokens": 70}, "max_new_tokens was 80 and is 70 now."),
        ({"samples": 2, "temperature": 0.5}, "samples was 1 and is 2 now."),
        ({"temperature": 0.5}, "temperature was 0.0 and is 0.5 now."),
        ({"max_length": 500}, "max_length was 512 and is 500 now."),
        ({"turns": "last"}, 'turns was "all" and is "last" now.'),
        ({"on_length": "drop"}, 'on_length was "keep" and is "drop" now.'),
    ],
)
def test_other_settings_are_refused_and_named(change: dict[str, Any], sentence: str) -> None:
    mixed()
    run()
    before = contents("out")
    with pytest.raises(UserError, match="out holds completions of other settings: ") as caught:
        run(**change)
    assert sentence in str(caught.value)
    assert contents("out") == before
    asked = run(**change, overwrite=True)["asked"]
    assert all(asked[key] == value for key, value in change.items())


def test_another_prompt_file_is_refused() -> None:
    mixed()
    run()
    with Path("p.jsonl").open("a") as file:
        file.write('{"prompt": "w5"}\n')
    with pytest.raises(UserError, match='prompts was "'):
        run()


def test_errors_are_retried_alone() -> None:
    mixed()
    run("straight")
    first = run(fake=FakeCompleter(fails=lambda request: str(request.key) in ("2", "mine", "id77 turn 2")))
    assert first["quarantined"] == {"no completion": 3, "not JSON": 1, "too long": 1}
    entries = [entry for entry in rows_of(kind="quarantine") if entry["reason"] == "no completion"]
    assert [(entry["id"], entry["line"], entry["detail"]) for entry in entries] == [
        (own, line, "the server said 500.") for own, line in ((None, 2), ("mine", 4), ("id77", 23))
    ]
    assert entries[1]["row"] == {"prompt": "w30 w31", "id": "mine"}
    assert run()["quarantined"] == first["quarantined"], "not unless it is asked for"
    fake = FakeCompleter()
    summary = run(fake=fake, retry_errors=True)
    assert sorted(fake.asked) == ["2", "id77 turn 2", "mine"]
    assert (summary["retried"], summary["quarantined"]) == (5, {"not JSON": 1, "too long": 1})
    assert contents("out") == contents("straight")
    assert load_ledger(Path("out")) == load_ledger(Path("straight"))


def test_too_many_refused_prompts_are_known_before_anything_is_generated() -> None:
    mixed()
    fake = FakeCompleter()
    with pytest.raises(UserError) as caught:
        run(fake=fake, max_quarantined=0.04)
    assert str(caught.value) == (
        "p.jsonl:13 is not JSON: Expecting property name enclosed in double quotes at column 2. Correct the line. "
        "At most 1 of 25 prompts may be refused (--max-quarantined), 2 are."
    )
    assert fake.asked == []


def test_a_completer_that_fails_again_and_again_is_given_up() -> None:
    mixed()
    fake = FakeCompleter(fails=lambda request: str(request.key) != "1")
    with pytest.raises(UserError, match="At most 5 of 25 prompts may be refused .--max-quarantined., 6 are"):
        run(fake=fake, max_quarantined=0.2)
    assert len(fake.asked) < 10


def test_too_many_refused_without_an_answer_are_given_up() -> None:
    """The last line is refused when it is wanted, and no answer comes after it."""
    written(*[{"prompt": f"w{i}"} for i in range(10, 19)], "{nope")

    class Failing(FakeCompleter):
        def complete(self, requests: Iterable[Request]) -> Iterator[Any]:
            for request in islice(requests, 9):
                yield request, RunError("500.") if request.key in ("2", "3") else answer(request)
            raise RunError("stop")

    with pytest.raises(RunError, match="stop"):
        run(fake=Failing())
    with pytest.raises(UserError, match="See out. At most 1 of 10 prompts may be refused .--max-quarantined., 3 are"):
        run(max_quarantined=0.1)


def test_refused_lines_have_their_own_ids() -> None:
    """A line's number would be another prompt's id."""
    written({"prompt": "", "id": "a"}, {"prompt": "w5", "id": "3"}, "{nope", {"prompt": "w4 " * 511, "id": 7})
    run(samples=2, temperature=1.0, max_quarantined=0.8)
    entries = [(entry["id"], entry["line"]) for entry in rows_of(kind="quarantine")]
    assert entries == [("a/0", 1), ("a/1", 1), (None, 3), (None, 3), ("7/0", 4), ("7/1", 4)]


def test_what_is_said_counts_rows() -> None:
    written({"prompt": "w9"}, {"prompt": "w9 w9"})
    assert generated_text(run("kept")).startswith("Finished 2 conversations in kept.\n2 rows, 140 tokens; ")
    first, again = (generated_text(run(on_loop="drop")) for _ in range(2))
    assert first.startswith("Finished 2 conversations in out.\n0 rows, 140 tokens; ")
    assert again.startswith("Finished 2 conversations in out; 2 of them earlier.\n0 rows, ")


@pytest.mark.parametrize(("name", "json_too"), [("output", False), ("error", True)])
def test_an_output_that_is_full_is_named(monkeypatch: pytest.MonkeyPatch, name: str, json_too: bool) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stderr" if json_too else "sys.stdout", full)
        with pytest.raises(RunError) as caught:
            Console(json=json_too).line("done")
        assert str(caught.value) == (
            f"Standard {name} cannot be written: No space left on device. Send it somewhere else."
        )
        full.flush()  # as Python does at its end


def test_an_output_without_a_letter_shows_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for errors in ("strict", "surrogateescape"):
        there = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(there, encoding="ascii", errors=errors))
        Console().line("Prompts of caf\u00e9")
        assert there.getvalue() == b"Prompts of caf\\xe9\n"


def test_ids_are_unique() -> None:
    written({"prompt": "w5", "id": "2"}, {"prompt": "w6"})
    with pytest.raises(UserError) as caught:
        run()
    assert str(caught.value).startswith("Prompts must have ids of their own, got '2' in p.jsonl:1 and in p.jsonl:2.")
    assert not list(Path("out").glob("*.json*"))


def test_samples_need_sampling() -> None:
    written({"prompt": "w5"})
    with pytest.raises(UserError, match="got --samples 3 with greedy decoding. Set --temperature above 0."):
        run(samples=3)


def test_thinking_needs_a_template_that_knows_it() -> None:
    written({"prompt": "w5"})
    with pytest.raises(UserError, match="--thinking on needs a chat template that reads enable_thinking, and that of"):
        run(thinking="on")


def test_thinking_reaches_the_template_and_the_ledger(monkeypatch: pytest.MonkeyPatch, tiny: TargetFacts) -> None:
    tokenizer = load_tokenizer(str(tiny.folder))
    tokenizer.chat_template = "{{ messages[0]['content'] }} {{ 'w7' if enable_thinking else 'w8' }}"
    monkeypatch.setattr(recipe, "load_tokenizer", lambda *_: tokenizer)
    written({"prompt": "w5"})
    for thinking, ids in (("on", [5, 7]), ("off", [5, 8])):
        assert run(thinking, thinking=thinking)["asked"]["thinking"] == thinking
        assert rows_of(thinking)[0]["prompt_ids"] == ids
    with pytest.raises(UserError, match="Thinking must be set once"):
        run("both", thinking="on", template_args={"enable_thinking": True})
    with pytest.raises(UserError, match='thinking was "on" and is "off" now'):
        run("on", thinking="off")


# --- deaths


class Killed(BaseException):
    """As good as SIGKILL: no handler of the code under test catches it."""


class Deadly:
    """Counts what changes the disk and dies at one of these moments; of a write it does the first half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], BaseException] = Killed) -> None:
        self.count, self._at, self._error = 0, at, error
        for owner, name in ((os, "fsync"), (os, "ftruncate"), (Path, "rename"), (Path, "unlink"), (Path, "write_text")):
            monkeypatch.setattr(owner, name, self._before(getattr(owner, name)))
        pwrite = os.pwrite

        def write(file: int, data: bytes, place: int) -> int:
            if self._due():
                pwrite(file, data[: len(data) // 2], place)
                raise self._error()
            return pwrite(file, data, place)

        monkeypatch.setattr(os, "pwrite", write)

    def _due(self) -> bool:
        self.count += 1
        return self.count == self._at

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            if self._due():
                raise self._error()
            return call(*args, **more)

        return counted


def test_a_death_at_any_moment_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation on the disk is the last one once; then once more with other answers' order."""
    mixed()
    with monkeypatch.context() as patch:
        whole = Deadly(patch, at=-1)
        run("whole", on_length="drop")
    expected = contents("whole")
    assert whole.count > 50
    for at in range(1, whole.count + 1):
        out = f"killed-{at}"
        with monkeypatch.context() as patch, pytest.raises(Killed):
            Deadly(patch, at)
            run(out, FakeCompleter(at), on_length="drop")
        run(out, FakeCompleter(at + 1), on_length="drop")
        assert contents(out) == expected, at
        assert load_ledger(Path(out)) == load_ledger(Path("whole")), at


def test_a_death_while_errors_are_retried_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written(*[{"prompt": f"w{i}"} for i in range(20, 28)], user("w60", "w61") | {"id": "id77"}, "{nope")
    run("straight")
    run("failed", FakeCompleter(fails=lambda request: str(request.key) in ("2", "id77 turn 2")))
    assert len(rows_of("failed", "quarantine")) == 3
    shutil.copytree("failed", "whole")
    with monkeypatch.context() as patch:
        whole = Deadly(patch, at=-1)
        run("whole", retry_errors=True)
    assert whole.count > 20
    for at in range(1, whole.count + 1):
        out = f"killed-{at}"
        shutil.copytree("failed", out)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            Deadly(patch, at)
            run(out, retry_errors=True)
        run(out, retry_errors=True)
        assert contents(out) == contents("straight"), at


def test_a_disk_that_fills_up(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed()
    run("whole")

    def full() -> OSError:
        return OSError(28, "No space left on device")

    for at in range(1, 60, 7):
        with monkeypatch.context() as patch:
            Deadly(patch, at, full)
            with pytest.raises(RunError) as caught:
                run(f"full-{at}")
        assert str(caught.value) == (
            f"full-{at} (--out) cannot be written: No space left on device. What was finished is kept: make room and "
            "run the same command again."
        )
        run(f"full-{at}")
        assert contents(f"full-{at}") == contents("whole")


def test_short_writes_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed()
    run("whole")
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: pwrite(file, data[:7], place))
    run()
    assert contents("out") == contents("whole")


# --- damage


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_a_finished_shard_is_named(tiny_folder: Path) -> None:
    mixed()
    run()
    expected = contents("out")
    flip(Path("out/completions-00001.jsonl"), 100)
    with pytest.raises(UserError, match="^out/completions-00001.jsonl is damaged: its checksum is not the one in"):
        run()
    with pytest.raises(UserError, match="^out/completions-00001.jsonl is damaged"):
        prepare_dataset([Path("out")], Path("dataset"), target=str(tiny_folder), revision=None, max_length=512)
    Path("out/completions-00001.jsonl").unlink()
    run()
    assert contents("out") == expected


def test_a_flipped_bit_in_a_log_costs_one_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    mixed()
    run("whole")

    class Stopped(FakeCompleter):
        def complete(self, requests: Iterable[Request]) -> Iterator[Any]:
            yield from islice(super().complete(requests), 6)
            raise RunError("stop")

    with pytest.raises(RunError, match="stop"):
        run(fake=Stopped())
    log = min(Path("out").glob("*.log"))
    first_line = log.read_bytes().index(b"\n")
    for at in (3, 50, first_line):  # checksum, record, line end: which spoils the next one too
        flip(log, at)
        fake = FakeCompleter()
        with pytest.raises(RunError, match="stop"):
            run(fake=Stopped())
        assert "; what stood there is made again" in capsys.readouterr().err
    run(fake=fake)
    assert contents("out") == contents("whole")


def test_what_is_not_ours_is_not_touched() -> None:
    mixed()
    Path("out").mkdir()
    Path("out/thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="must hold nothing else, got thesis.txt in out"):
            run(overwrite=overwrite)
    Path("file").write_text("")
    with pytest.raises(UserError, match="^file is a file, and completions go to a folder. Choose another --out.$"):
        run("file")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("ledger", "sentence"),
    [
        (None, "^mine .--out. holds completions-00000.jsonl, but no completions.json .* remove the folder by hand.$"),
        ("{", "^mine/completions.json cannot be understood .* another --out, or remove the folder by hand.$"),
        ("{}", "^mine/completions.json cannot be understood .* another --out, or remove the folder by hand.$"),
        ('{"version": 77}', "^mine/completions.json has version 77.* another --out, or remove the folder by hand"),
    ],
)
def test_names_alone_do_not_make_it_ours(ledger: str | None, sentence: str, overwrite: bool) -> None:
    mixed()
    run("mine")
    Path("mine/completions.json").unlink()
    if ledger:
        Path("mine/completions.json").write_text(ledger)
    before = {path.name: path.read_bytes() for path in Path("mine").iterdir()}
    with pytest.raises(UserError, match=sentence):
        run("mine", overwrite=overwrite)
    assert {path.name: path.read_bytes() for path in Path("mine").iterdir()} == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_lock_that_is_not_ours_is_not_touched(overwrite: bool) -> None:
    mixed()
    Path("thesis.txt").write_text("years of work")
    for name in ("link", "text", "folder", "pipe"):
        Path(name).mkdir()
    Path("link/.lock").symlink_to("../thesis.txt")
    Path("text/.lock").write_text("pid 7")
    Path("folder/.lock").mkdir()
    os.mkfifo("pipe/.lock")
    for name in ("link", "folder", "pipe"):
        with pytest.raises(UserError, match=f"^{name}/.lock must be a regular file, got a link or something else. Ch"):
            run(name, overwrite=overwrite)
    with pytest.raises(UserError, match="^text .--out. holds a .lock of something else. Choose another --out.$"):
        run("text", overwrite=overwrite)
    Path("part").mkdir()
    Path("part/completions.json.part").symlink_to("../thesis.txt")
    with pytest.raises(UserError, match="^part .--out. holds completions.json.part, but no completions.json"):
        run("part", overwrite=overwrite)
    assert Path("thesis.txt").read_text() == "years of work"
    assert Path("text/.lock").read_text() == "pid 7"


@pytest.mark.parametrize("lock", [False, True])
def test_a_folder_that_stayed_empty_is_as_it_was(lock: bool) -> None:
    """Refused before anything was written into it."""
    written({"prompt": ""}, {"prompt": ""})
    Path("out").mkdir()
    if lock:
        Path("out/.lock").touch()
    with pytest.raises(UserError):
        run(max_quarantined=0.0)
    assert [path.name for path in Path("out").iterdir()] == [".lock"] * lock


def test_a_result_that_cannot_be_written_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(RunError, match=r"^Standard output cannot be written: No space left on device\. Send it"):
            finish(Console(json=True), True, {"rows": 3}, "3 rows")
        full.flush()  # as Python does at its end


def test_an_interrupt_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    written({"prompt": "w5"})
    monkeypatch.setattr(recipe, "generate_completions", interrupted)
    done = CliRunner().invoke(
        app, ["generate", "p.jsonl", "--target", str(tiny_folder), "--out", "out", "--device", "cpu"]
    )
    assert done.exit_code == 130
    assert "what was finished is kept in out: run the same command again to go on" in done.output


def test_two_commands_do_not_share_a_folder() -> None:
    written({"prompt": "w5"})

    class Nested(FakeCompleter):
        def complete(self, requests: Iterable[Request]) -> Iterator[Any]:
            with pytest.raises(UserError, match="^Another process is generating into out. Wait for it or choose"):
                run()
            return super().complete(requests)

    assert run(fake=Nested())["rows"] == 1


# --- the built-in engine


@pytest.mark.slow
def test_replicas_and_rounds_give_what_one_replica_gives(tiny: TargetFacts, capsys: pytest.CaptureFixture[str]) -> None:
    written(
        *[{"prompt": f"w{i} w{2 * i}"} for i in range(10, 16)], *[user("w50", f"w{i}", "w53") for i in range(40, 52)]
    )
    one, two = (
        generate_completions(
            Path("p.jsonl"),
            Path(f"made-{len(devices)}"),
            Asked("tiny", dtype="float32", temperature=0.8, samples=2, max_new_tokens=64, rows=8, devices=devices),
            console=Console(json=True),
        )
        for devices in (["cpu"], ["cpu", "cpu"])
    )
    assert one | {"completions": ""} == two | {"completions": ""}
    assert contents("made-1") == contents("made-2")
    assert {row["turns"] for row in rows_of("made-1")} == {1}
    assert any(row["id"].endswith(" turn 3") for row in rows_of("made-1")), "there was a third round"
    assert re.search(r"generate 36/36 100% [\d,]+ tokens/s, mean length \d+, eta 0:00, busy", capsys.readouterr().err)


# --- what prepare makes of it


def test_prepare_takes_the_folder(tiny_folder: Path) -> None:
    mixed()
    run()
    done = prepare_dataset([Path("out")], Path("dataset"), target=str(tiny_folder), revision=None, max_length=512)
    rows = [row for row in rows_of() if len(row["completion_ids"]) > 1]
    assert done["rows_read"] == len(rows_of())
    assert done["supervised_tokens"] == sum(len(row["completion_ids"]) for row in rows)


def test_prepare_names_a_folder_without_rows(tiny_folder: Path) -> None:
    written({"prompt": "w9"}, {"prompt": "w9 w9"}, "{nope")
    run(on_loop="drop")
    with pytest.raises(UserError) as caught:
        prepare_dataset([Path("out")], Path("dataset"), target=str(tiny_folder), revision=None, max_length=512)
    assert str(caught.value) == (
        "out holds no rows: none of its 3 conversations was kept (ends in a loop: 2, not JSON: 1). "
        "Generate again with other settings, or leave the folder out."
    )


def test_an_edited_ledger_is_refused(tiny_folder: Path) -> None:
    mixed()
    run()
    path = Path("out/completions.json")
    text = path.read_text()
    tree = json.loads(text)
    changed = json.loads(text)
    changed["shards"]["0"]["tally"]["tokens"] += 1
    unsigned = {key: value for key, value in tree.items() if key != "sha256"}
    for bad in (changed, unsigned, tree | {"sha256": None}):
        path.write_text(json.dumps(bad))
        for overwrite in (False, True):
            with pytest.raises(UserError, match="^out/completions.json was edited or damaged: .* by hand.$"):
                run(overwrite=overwrite)
        with pytest.raises(UserError, match="^out/completions.json was edited or damaged"):
            prepare_dataset([Path("out")], Path("dataset"), target=str(tiny_folder), revision=None, max_length=512)
    path.write_text(json.dumps(tree))  # set out in another way
    assert run()["found"] == 25


def test_prepare_refuses_what_is_not_finished(tiny_folder: Path) -> None:
    mixed()

    class Stopped(FakeCompleter):
        def complete(self, requests: Iterable[Request]) -> Iterator[Any]:
            yield from islice(super().complete(requests), 18)
            raise RunError("stop")

    with pytest.raises(RunError, match="stop"):
        run(fake=Stopped())
    with pytest.raises(UserError, match="Completions must be finished before they are read, and out has 15 of 25 in"):
        prepare_dataset([Path("out")], Path("dataset"), target=str(tiny_folder), revision=None, max_length=512)


def test_prepare_refuses_another_tokenizers_ids(tiny_folder: Path, tmp_path: Path) -> None:
    mixed()
    run()
    ledger = load_ledger(Path("out"))
    assert ledger
    ledger.asked["tokenizer"] = hashlib.sha256(b"other").hexdigest()
    save_ledger(Path("out"), ledger)
    with pytest.raises(UserError, match="^out holds ids of the tokenizer of .*Generate with --target"):
        prepare_dataset([Path("out")], Path("dataset"), target=str(tiny_folder), revision=None, max_length=512)
