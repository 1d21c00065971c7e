"""The recipe `prepare` from files to a dataset, with a stand-in for the target's folder."""

import fcntl
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import datasets
import pytest

from paceline.data import pieces, sources
from paceline.data import prepare as making
from paceline.data.chat import ChatOptions
from paceline.data.manifest import check_fits, tokenizer_fingerprint
from paceline.data.store import open_dataset
from paceline.recipes.prepare import prepare_dataset
from paceline.records import RunError, UserError
from paceline.target import load

GOOD = {"prompt": "what is it?", "completion": "the sum of two numbers"}


@pytest.fixture
def run(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return prepare_dataset() with a target that has the test tokenizer; its rows come from `rows`."""
    facts = SimpleNamespace(name="tiny", revision="r1", vocab_size=400)
    monkeypatch.setattr(load, "describe", lambda model, revision: facts)
    monkeypatch.setattr(load, "load_tokenizer", lambda model, revision: tokenizer)

    def call(rows: list[Any], **options: Any) -> dict[str, Any]:
        """A row that is text is a line as it stands."""
        source = tmp_path / "in.jsonl"
        source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        defaults = {"target": "tiny", "revision": None, "max_length": 100, "max_quarantined": 1.0}
        return prepare_dataset([source], tmp_path / "out", **{**defaults, **options})

    return call


def test_every_row_is_accounted_for(run: Callable[..., dict[str, Any]], tmp_path: Path, tokenizer: Any) -> None:
    seen: list[tuple[int, int | None]] = []
    summary = run([GOOD, [1], GOOD, {"x": 1}], on_progress=lambda *counts: seen.append(counts), mask_token_id=2)
    assert (summary["rows_read"], summary["rows"]) == (4, 2)
    assert summary["quarantined"] == {"not an object": 1, "unknown form": 1}
    assert len(Path(summary["quarantine"]).read_text().splitlines()) == 2
    assert seen[-1] == (4, 4)
    dataset = open_dataset(tmp_path / "out")
    origin = dataset.manifest.origin
    assert (len(dataset), origin.mask_rule, origin.mask_token_id) == (2, "turn prefixes", 2)
    assert origin.quarantined == summary["quarantined"]
    assert origin.sources[0]["rows"] == 4
    assert dataset.fingerprint == summary["fingerprint"]
    check_fits(dataset.manifest, tokenizer_fingerprint(tokenizer), "tiny")
    json.dumps(summary)


def test_no_row_left_is_an_error_with_reasons(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No row of .*in\.jsonl .*not an object: 2.*out\.partial/quarantine\.jsonl"):
        run([[1], [2]])
    assert not (tmp_path / "out").exists()
    assert len((tmp_path / "out.partial" / "quarantine.jsonl").read_text().splitlines()) == 2
    for nothing in ([], ["", " "]):
        with pytest.raises(UserError, match="holds no rows"):
            run(nothing)


def test_blank_lines_are_not_counted_but_number_rows(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    summary = run([GOOD, "", GOOD, " ", [1]], on_progress=lambda *counts: seen.append(counts))
    assert (summary["rows_read"], summary["rows"]) == (3, 2)
    assert open_dataset(tmp_path / "out").manifest.origin.sources[0]["rows"] == 3
    assert datasets.load_from_disk(tmp_path / "out")["line"][:] == [1, 3]
    assert json.loads(Path(summary["quarantine"]).read_text())["line"] == 5
    assert seen[-1] == (5, 5), "progress counts lines"


def test_stop_leaves_no_dataset(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"in\.jsonl:2:"):
        run([GOOD, [1]], on_bad="stop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_dataset_is_replaced_only_when_asked(run: Callable[..., dict[str, Any]]) -> None:
    first = run([GOOD, [1]])
    with pytest.raises(UserError, match="There is a dataset"):
        run([GOOD, GOOD])
    assert Path(first["quarantine"]).exists(), "a refused command touches nothing"
    again = run([GOOD, GOOD], overwrite=True)
    assert (again["rows"], again["quarantine"]) == (2, None)
    assert not Path(first["quarantine"]).exists()


def test_long_rows_are_refused_or_cut(run: Callable[..., dict[str, Any]]) -> None:
    long = {"prompt": "x", "completion": "y" * 200}
    assert run([GOOD, long])["quarantined"] == {"too long": 1}
    cut = run([GOOD, long], on_long="truncate", overwrite=True)
    assert (cut["truncated"], cut["longest"], cut["quarantined"]) == (1, 100, {})


def lines(count: int) -> list[Any]:
    """Good rows with a bad one now and then."""
    return [[i] if i % 10 == 9 else {**GOOD, "completion": f"the sum is {i}"} for i in range(count)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_SMALLEST", 500)
    monkeypatch.setattr(sources, "_LARGEST", 500)


def contents(place: Path) -> dict[str, bytes]:
    files = [*place.iterdir(), place.with_name(f"{place.name}.quarantine.jsonl")]
    return {path.name: path.read_bytes() for path in files if path.exists()}


@pytest.mark.usefixtures("small_pieces")
def test_processes_make_what_one_makes(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    one = run(lines(60))
    want = contents(tmp_path / "out")
    assert one["shards"] > 3
    two = run(lines(60), workers=2, overwrite=True)
    assert contents(tmp_path / "out") == want
    assert one == two
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.usefixtures("small_pieces")
def test_what_a_killed_command_finished_is_used_again(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lines(60))
    want = contents(tmp_path / "out")
    made: list[int] = []
    real = pieces.encode_rows

    def dies(rows: Any, *rest: Any) -> Any:
        made.append(rows[0][0])
        if len(made) == 3:
            raise KeyboardInterrupt
        return real(rows, *rest)

    monkeypatch.setattr(pieces, "encode_rows", dies)
    with pytest.raises(KeyboardInterrupt):
        run(lines(60), overwrite=True)
    assert contents(tmp_path / "out") == want, "the old dataset is still there"
    left = sorted(path.suffix for path in (tmp_path / "out.partial").iterdir())
    assert left.count(".json") == 2
    summary = run(lines(60), overwrite=True)
    assert contents(tmp_path / "out") == want
    assert len(made) == len(set(made)) + 1, "only the piece that was under way is made twice"
    assert re.search(r"out\.partial holds 2 of \d+ pieces \([\d,]+ rows, made \d+ s ago\)", summary["notes"][0])
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.usefixtures("small_pieces")
def test_a_damaged_piece_is_made_again(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lines(60))
    want = contents(tmp_path / "out")
    with pytest.raises(UserError, match=r"At most 1\.00%.*6 of 60 are \(not an object: 6\).*--max-quarantined 0\.1\."):
        run(lines(60), overwrite=True, max_quarantined=0.01)
    workshop = tmp_path / "out.partial"
    shards = sorted(workshop.glob("*.arrow"))
    shards[1].write_bytes(shards[1].read_bytes()[:-9])
    data = bytearray(shards[3].read_bytes())
    data[len(data) // 2] ^= 1
    shards[3].write_bytes(data)
    facts = [path for path in sorted(workshop.glob("[0-9a-f]*.json")) if path.with_suffix(".arrow") not in shards[1:4]]
    facts[0].write_text("{")
    facts[1].with_suffix(".refused").unlink()
    with facts[2].with_suffix(".refused").open("a") as refused:
        refused.write("{}")
    monkeypatch.setattr(pieces, "ShardWriter", watched := Mock(wraps=pieces.ShardWriter))
    run(lines(60), overwrite=True)
    assert contents(tmp_path / "out") == want
    assert watched.call_count == 5, "the damaged ones and no other"


def test_too_many_bad_rows_fail_and_a_second_try_is_quick(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"3 of 30 are .*out\.partial/quarantine\.jsonl"):
        run(lines(30), max_quarantined=0.099)
    assert not (tmp_path / "out").exists()
    assert len((tmp_path / "out.partial" / "quarantine.jsonl").read_text().splitlines()) == 3
    summary = run(lines(30), max_quarantined=0.1)
    assert len((tmp_path / "out.quarantine.jsonl").read_text().splitlines()) == 3
    assert not (tmp_path / "out.partial").exists()
    assert (summary["rows"], summary["quarantined"]) == (27, {"not an object": 3})
    assert "1 of 1 piece (30 rows," in summary["notes"][0]


def test_the_same_command_again_finds_its_dataset(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    first = run(lines(30))
    before = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    again = run(lines(30))
    assert again == {**first, "found": True, "notes": again["notes"]}
    assert re.fullmatch(r".*out holds this very dataset already \(made \d+ s ago: .*\)\.", again["notes"][0])
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="At most 5"):
        run(lines(30), max_quarantined=0.05)
    for change in ({"max_length": 99}, {"mask_token_id": 2}, {"options": ChatOptions(turns="last")}):
        with pytest.raises(UserError, match="There is a dataset"):
            run(lines(30), **change)


def test_a_damaged_dataset_is_not_found(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    run(lines(30))
    shard = tmp_path / "out" / "data-00000-of-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow must have.*With --overwrite it is made anew"):
        run(lines(30))


def test_two_commands_do_not_share_a_place(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with (tmp_path / "out.partial" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="Another process is preparing"):
            run(lines(3))


def test_rows_lead_back_to_their_lines(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    run(lines(30))
    table = datasets.load_from_disk(tmp_path / "out")
    assert table["line"][:] == [i + 1 for i in range(30) if i % 10 != 9]
    assert set(table["source"][:]) == {0}


def test_rows_left_out_as_asked_are_no_bad_rows(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"prompt": "What is it"}\n{"prompt": "?!"}\n')
    options: dict[str, Any] = {"exclude_sets": [tmp_path / "eval.jsonl"], "on_bad": "stop", "max_quarantined": 0.0}
    other = {**GOOD, "prompt": "what else?"}
    first, again = run([GOOD, other], **options), run([GOOD, other], **options)
    said = "Rows are compared with 1 of 2 evaluation prompts; left out, without words: 1."
    for summary in (first, again):
        assert (summary["rows"], summary["quarantined"]) == (1, {"contains an evaluation prompt": 1})
        assert summary["eval_prompts"] == {"compared": 1, "wordless": 1}
        assert summary["notes"][-1] == said
    assert again["found"]
    run([GOOD, other, [1]], **{**options, "on_bad": "quarantine", "overwrite": True, "max_quarantined": 1.0})
    for more in ({}, {"overwrite": True}):
        with pytest.raises(UserError, match=r"in\.jsonl:3: A row must be an object"):
            run([GOOD, other, [1]], **options, **more)


@pytest.mark.parametrize("out", ["in/out", "in/deeper/out", "link/out"])
def test_no_dataset_is_made_in_a_folder_that_is_read(tmp_path: Path, out: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / "link").symlink_to("in")
    with pytest.raises(
        UserError, match=r"must not lie in a folder that is read, got --out .* in input .*Choose another"
    ):
        prepare_dataset([tmp_path / "in"], tmp_path / out, target="tiny", revision=None, max_length=100)


def test_a_mask_that_covers_everything_is_told(run: Callable[..., dict[str, Any]]) -> None:
    whole = {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}
    assert re.search(r"100 % of the tokens are supervised.*; the first row begins '.+'\.", run([whole])["notes"][0])
    again = run([whole])
    assert again["found"]
    assert re.search(r"100 % of the tokens are supervised.*the chat template\.$", again["notes"][1])
    assert run([whole, GOOD], overwrite=True)["notes"] == []


def test_a_mask_that_covers_nothing_is_told_where_that_is_the_reason(run: Callable[..., dict[str, Any]]) -> None:
    hint = r"Where 0 % of the tokens are supervised.*; the first such row begins '%&'\."  # ids 7 and 8
    nothing = {"input_ids": [7, 8], "loss_mask": [0, 0]}
    with pytest.raises(UserError, match=r"3 of 4 are .*" + hint):
        run([GOOD, [1], nothing, nothing], max_quarantined=0.5)
    with pytest.raises(UserError, match="3 of 4 are") as error:
        run([GOOD, [1], [2], nothing], max_quarantined=0.5)
    assert "0 %" not in str(error.value)


@pytest.mark.parametrize("allowed", [0.01, 1.0])
def test_a_mask_that_covers_nothing_is_a_warning_before_the_error(
    run: Callable[..., dict[str, Any]], tmp_path: Path, allowed: float
) -> None:
    notes: list[str] = []
    nothing = {"input_ids": [7, 8], "loss_mask": [0, 0]}
    options: dict[str, Any] = {"max_quarantined": allowed, "on_note": notes.append}
    for rows in ([[1], nothing, {**nothing, "input_ids": [9, 9]}], [[1], nothing, [2]]):
        with pytest.raises(UserError, match=r"No row of .* See .*quarantine\.jsonl for each of them\.$") as error:
            run(rows, **options)
        assert "%&" not in str(error.value), "the example is shown once"
        assert len((tmp_path / "out.partial" / "quarantine.jsonl").read_text().splitlines()) == 3
        assert not (tmp_path / "out").exists()
    start = r"Warning: 0 % of the tokens are supervised.* in "
    end = r" encoded and checked, .*Compare the loss mask with the chat template; the first row begins '%&'\.$"
    assert len(notes) == 2
    assert re.match(start + "any of the 2 rows that were" + end, notes[0])
    assert re.match(start + "the one row that was" + end, notes[1])
    with pytest.raises(UserError, match="No row of"):
        run([[1], [2]], **options)
    run([GOOD, nothing], max_quarantined=1.0, on_note=notes.append)
    assert len(notes) == 2, "no row was encoded, or one is learnt from"


@pytest.mark.parametrize("place", ["out/a.jsonl", "out.partial/a.jsonl", "out.quarantine.jsonl"])
def test_what_would_be_replaced_is_not_read(run: Callable[..., dict[str, Any]], tmp_path: Path, place: str) -> None:
    run([GOOD])
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(json.dumps(GOOD) + "\n")
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / place)
    before = contents(tmp_path / "out")
    options: dict[str, Any] = {"target": "tiny", "revision": None, "max_length": 99, "overwrite": True}
    for path in (tmp_path / place, link):
        with pytest.raises(UserError, match=rf"Input {path} (is|lies in) .*choose another --out\."):
            prepare_dataset([path], tmp_path / "out", **options)
        with pytest.raises(UserError, match=rf"Evaluation set {path} (is|lies in) .*choose another --out\."):
            run([GOOD, GOOD], exclude_sets=[path], overwrite=True)
    assert contents(tmp_path / "out") == before
    assert (tmp_path / place).read_text() == json.dumps(GOOD) + "\n"


@pytest.mark.parametrize(
    "name", ["thesis.txt", "0123456789abcdef01234567.arrow/data", "a.json", "quarantine.jsonl.old"]
)
def test_somebodys_folder_is_not_taken_for_a_workshop(
    run: Callable[..., dict[str, Any]], tmp_path: Path, name: str
) -> None:
    mine = tmp_path / "out.partial" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    with pytest.raises(UserError, match=rf"must hold nothing else, got {name.split('/')[0]}\. Move that away"):
        run([GOOD])
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == [name.split("/")[0]]
    assert mine.read_text() == "years of work"


def test_what_somebody_puts_into_the_workshop_stays(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    def put(done: int, total: int | None) -> None:
        (tmp_path / "out.partial" / "thesis.txt").write_text("years of work")

    assert run([GOOD], on_progress=put)["rows"] == 1
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == ["thesis.txt"]


@pytest.mark.usefixtures("small_pieces")
def test_a_left_over_shard_may_be_one_of_a_dataset(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a command leaves it that is killed when its dataset is in place and its workshop is not yet removed."""
    with monkeypatch.context() as patch:
        patch.setattr(making, "clear", lambda folder: None)
        run(lines(60))
    want = contents(tmp_path / "out")
    for facts in (tmp_path / "out.partial").glob("*.json"):
        facts.unlink()
    assert any(shard.stat().st_nlink == 2 for shard in (tmp_path / "out.partial").glob("*.arrow"))
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "encode_rows", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(lines(60), overwrite=True)
    assert contents(tmp_path / "out") == want


def test_pieces_are_on_the_disk_before_they_have_their_names(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    run([GOOD])
    endings = [re.sub("^[0-9a-f]{24}", "", name) for name in synced]
    assert endings == [f"{suffix}.{os.getpid()}" for suffix in (".arrow", ".refused", ".json")]


def test_a_failure_keeps_the_quarantine_that_is_there(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run([GOOD, [1]])
    want = contents(tmp_path / "out")
    with pytest.raises(UserError, match="At most"):
        run([GOOD, [1], [2]], overwrite=True, max_quarantined=0.1)
    assert contents(tmp_path / "out") == want
    with monkeypatch.context() as patch:
        patch.setattr(making, "seal", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(RunError, match="No space left"):
            run([GOOD, [1], [2]], overwrite=True)
    assert contents(tmp_path / "out") == want


def test_a_quarantine_of_another_dataset_is_not_named(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """As it is after a kill between the renaming of the dataset and that of its quarantine."""
    run([GOOD, [1], [2]])
    place = tmp_path / "out.quarantine.jsonl"
    place.write_text(place.read_text().splitlines()[0] + "\n")
    for _ in range(2):
        again = run([GOOD, [1], [2]])
        assert again["quarantine"] is None
        assert again["notes"][1].endswith("does not list the rows that were refused; --overwrite writes it again.")
        with pytest.raises(UserError, match=r"\(not an object: 2\)\. Correct them"):
            run([GOOD, [1], [2]], max_quarantined=0.1)
        with pytest.raises(UserError, match=r"\(--on-bad stop\), but 2 were when .*\(not an object: 2\)\. With --over"):
            run([GOOD, [1], [2]], on_bad="stop")
        place.unlink(missing_ok=True)


def test_stop_stops_at_what_was_refused_before(run: Callable[..., dict[str, Any]]) -> None:
    rows = [GOOD, {"x": 1}, GOOD, [1]]
    run(rows)
    with pytest.raises(UserError, match=r"in\.jsonl:2: A row holds messages or"):
        run(rows, on_bad="stop")
    run([GOOD], overwrite=True)
    assert run([GOOD], on_bad="stop")["found"]


CHANGES = {
    "rules": lambda patch, tokenizer, facts: patch.setattr(making, "RULES", 0),
    "special token": lambda patch, tokenizer, facts: setattr(tokenizer, "bos_token", "<|mask|>"),
    "template": lambda patch, tokenizer, facts: setattr(tokenizer, "chat_template", f"{tokenizer.chat_template} "),
    "template for tools": lambda patch, tokenizer, facts: setattr(
        tokenizer, "chat_template", {"default": tokenizer.chat_template, "tool_use": "x"}
    ),
    "target": lambda patch, tokenizer, facts: setattr(facts, "name", "other"),
    "revision": lambda patch, tokenizer, facts: setattr(facts, "revision", "r2"),
    **{
        name: lambda patch, tokenizer, facts, name=name: patch.setattr(
            making, "version", lambda of: "0" if of == name else version(of)
        )
        for name in ("transformers", "tokenizers", "jinja2")
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_rows_decides_whether_a_dataset_is_found(
    run: Callable[..., dict[str, Any]],
    make_tokenizer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
) -> None:
    tokenizer, facts = make_tokenizer(), SimpleNamespace(name="tiny", revision="r1", vocab_size=400)
    monkeypatch.setattr(load, "describe", lambda model, revision: facts)
    monkeypatch.setattr(load, "load_tokenizer", lambda model, revision: tokenizer)
    run([GOOD])
    assert run([GOOD])["found"]
    CHANGES[change](monkeypatch, tokenizer, facts)
    with pytest.raises(UserError, match="There is a dataset"):
        run([GOOD])


def test_a_process_that_is_killed_loses_only_its_piece(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SMALLEST", 2000)
    monkeypatch.setattr(sources, "_LARGEST", 2000)
    rows = lines(1000)  # 37 pieces
    nobody = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    nobody.start()
    killed: list[int] = []

    def kill(done: int, total: int | None) -> None:
        if done and not killed:
            worker = next(child for child in multiprocessing.active_children() if child.pid != nobody.pid)
            assert worker.pid is not None
            killed.append(worker.pid)
            os.kill(worker.pid, signal.SIGKILL)

    try:
        with pytest.raises(RunError, match=r"A process that tokenizes died, .*finished pieces are kept"):
            run(rows, workers=2, on_progress=kill)
        assert multiprocessing.active_children() == [nobody], "ours have ended, others have not"
    finally:
        nobody.terminate()
        nobody.join()
    left = len(list((tmp_path / "out.partial").glob("*.json")))
    assert left
    summary = run(rows)
    assert summary["rows"] == 900
    assert f"holds {left} of" in summary["notes"][0]


def test_a_dataset_made_of_a_dataset_is_the_same(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    first = run(lines(30))
    again = prepare_dataset([tmp_path / "out"], tmp_path / "copy", target="tiny", revision=None, max_length=100)
    assert {key: again[key] for key in ("rows", "tokens", "supervised_tokens", "fingerprint")} == {
        key: first[key] for key in ("rows", "tokens", "supervised_tokens", "fingerprint")
    }


def test_a_disk_that_may_be_too_small_is_told_early(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    run([GOOD] * 20, on_note=notes.append)
    assert notes == []
    monkeypatch.setattr("paceline.recipes.prepare.free_bytes", lambda place: 100)
    run([GOOD] * 20, on_note=notes.append)
    assert notes == [], "it is found finished"
    run([GOOD] * 20, on_note=notes.append, overwrite=True)
    assert len(notes) == 1
    assert notes[0].startswith(f"Warning: the disk of {tmp_path / 'out'} has 0 MiB free, and the inputs have 0: a ")
