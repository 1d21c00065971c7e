"""The whole measurement with small or made-up parts, the table it prints, and how it watches processes."""

import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from paceline.bench import child, data, stream, texts
from paceline.bench.lengths import run_lengths
from paceline.bench.memory import memory_of, own_peak, tree_peak
from paceline.bench.processes import Ran, run_child
from paceline.bench.sparse import write_sparse_dataset
from paceline.data.manifest import load_manifest
from paceline.data.store import CompletionDataset
from paceline.observe.console import Console
from paceline.records import RunError, UserError

PROMISED = {"open_s", "plan_s", "resident_mib", "padding_static", "padding_optimum", "padding_trim", "padding_packed"}
PROMISED |= {"loader_tokens_per_s", "prepare_share_of_tokenizer"}


@pytest.fixture
def console() -> tuple[Console, io.StringIO]:
    made, written = Console(), io.StringIO()
    made.rich = RichConsole(file=written, width=80, highlight=False)
    return made, written


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Children that answer at once; returns the numbers of rows that `prepare` was given."""
    given: list[int] = []
    passes: list[bool] = []
    long_passes: list[float] = []

    def child(job: str, *arguments: object) -> dict[str, Any]:
        if job == "open":
            assert load_manifest(Path(str(arguments[0]))).rows == 3000
            return {"open_s": 0.1, "plan_s": 0.5, "resident_mib": 120.0}
        if job == "load" and len(arguments) == 2:
            assert load_manifest(Path(str(arguments[0]))).rows == 3000
            assert arguments[1] == data.LONG_PASS_ROWS
            long_passes.append(103.0 if len(long_passes) >= data.PASSES else 100.0)
            return {"tokens": 10_000_000, "seconds": 1.0, "held_mib": [99.0, 100.0], "peak_mib": long_passes[-1]}
        if job == "load":
            many = len(given) and given[-1] == 20_000
            passes.append(many)
            held = ([90.0, 96.0, 93.0] if len(passes) % 3 else [90.0, 120.0]) if many else [100.0, 102.0, 101.0]
            peak = (108.0 if len(passes) % 3 else 200.0) if many else 100.0
            return {"tokens": 10_000_000, "seconds": 1.0, "held_mib": held, "peak_mib": peak}
        return {"tokens": 1000, "seconds": 1.0, "cpu_s": 2.0, "backend_seconds": 0.9, "backend_cpu_s": 2.5}

    def prepare(rows: Path, out: Path, target: Path) -> Ran:
        count = len(rows.read_text().splitlines())
        given.append(count)
        return Ran({"tokens": count}, 1 + count / 900, 3 + count / 300, 50.0, 3)

    monkeypatch.setattr(data, "run_child", child)
    monkeypatch.setattr(data, "run_prepare", prepare)
    monkeypatch.setattr(data, "run_lengths", lambda count=3000, seed=0: run_lengths(min(count, 3000), seed))
    monkeypatch.setattr(data, "LOADER_ROWS", 20)
    monkeypatch.setattr(data, "LONG_ROWS", 40)
    return given


def test_figures_and_table(
    console: tuple[Console, io.StringIO], no_processes: list[int], tmp_path: Path, tiny_folder: Path
) -> None:
    result = data.bench_data(console=console[0], rows=20_000, target=str(tiny_folder), work=tmp_path)
    assert result.keys() >= PROMISED
    assert json.loads(json.dumps(result)) == result
    assert result["padding_static"].keys() == result["padding_optimum"].keys() == {"6", "12", "24"}
    assert result["loader_tokens_per_s"] == 1e7
    assert result["tokenizer_tokens_per_s"] == 1000
    assert result["tokenizer_backend_tokens_per_s"] == pytest.approx(1000 / 0.9)
    assert result["prepare_share_of_tokenizer"] == pytest.approx(0.9 * 0.9), "of the faster of the two calls"
    assert result["prepare_share_of_tokenizer_by_cpu_time"] == pytest.approx(0.6)
    assert result["prepare_share_of_tokenizer_whole_command"] == pytest.approx(40 / (1 + 40 / 900) / (1000 / 0.9))
    assert result["loader_memory"]["index_bytes_a_row"] == pytest.approx(-6 * 2**20 / 10_000)
    assert result["prepare_start_s"] == pytest.approx(1)
    assert no_processes == [40, 10] * 3 + [10_000, 20_000]
    met = {bar["name"]: bar["met"] for bar in result["bars"]}
    missed = [name for name, fine in met.items() if fine is False]
    assert missed == ["memory of the loader, short rows", "  its peak by size, short rows"]
    assert len(result["loader_memory"]["held_mib"][1]) == data.PASSES, "and the median counts, not the outlier"
    assert result["loader_memory"]["most_mib"] == [102.0, 96.0]
    assert result["loader_memory"]["ratio_in_a_pass"] == pytest.approx(96 / 90)
    assert result["loader_memory"]["ratio_of_sizes"] == pytest.approx(1.08), "of the peaks, not of the looks"
    long = result["loader_memory_long_rows"]
    assert (long["rows"], long["peak_mib"]) == ([10_000, 20_000], [[100.0] * 3, [103.0] * 3])
    assert long["ratio_of_sizes"] == pytest.approx(1.03)
    printed = console[1].getvalue().splitlines()
    assert max(map(len, printed)) <= 80
    assert any(line.split()[-1] == "NO" and "+8.0%" in line for line in printed)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_at_once(console: tuple[Console, io.StringIO], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"need 1,000,000\.4 GB of disk in .* are free. Choose another folder"):
        data.bench_data(console=console[0], rows=10**12, target="x", work=tmp_path)
    with pytest.raises(UserError, match="cannot be used"):
        data.bench_data(console=console[0], rows=1, target="x", work=tmp_path / "none")


def test_a_target_that_is_none_is_told_at_once(
    console: tuple[Console, io.StringIO], tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(data, "run_child", never)
    monkeypatch.setattr(data, "write_sparse_dataset", never)
    with pytest.raises(UserError, match="nope"):
        data.bench_data(console=console[0], rows=1, target=str(tmp_path / "nope"), work=tmp_path)
    bare = tmp_path / "bare"
    shutil.copytree(tiny_folder, bare)
    for path in bare.glob("chat_template*"):
        path.unlink()
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"must have a chat template, .*bare has none"):
        data.bench_data(console=console[0], rows=1, target=str(bare), work=tmp_path)


def test_opening_in_a_child(tmp_path: Path) -> None:
    write_sparse_dataset(tmp_path / "data", run_lengths(3000))
    found = run_child("open", tmp_path / "data")
    assert 0 < found["open_s"] < 60
    assert 0 < found["plan_s"] < 60
    assert found["batches"] > 100


def test_a_failed_child_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="status 1 and said: .*no manifest.json"):
        run_child("open", tmp_path)


def test_memory_of_a_tree_holds_grandchildren() -> None:
    grandchild = "import time; held = bytearray(64 << 20); time.sleep(1)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    process = subprocess.Popen([sys.executable, "-c", child])
    with tree_peak(process.pid) as peak:
        process.wait()
    assert 64 < peak.mib < 200
    assert peak.processes == 2
    assert memory_of(process.pid)["VmRSS"] == 0
    assert 0 < memory_of()["RssAnon"] <= memory_of()["VmRSS"] <= memory_of()["VmHWM"]


def hold(mib: int) -> None:
    held = bytearray(mib << 20)
    time.sleep(0.05)
    del held


def test_a_peak_is_seen_that_is_gone_at_the_end() -> None:
    before = memory_of()["RssAnon"]
    with own_peak() as peak:
        time.sleep(0.05)
        hold(64)
    assert 64 <= peak.mib - before < 80
    assert memory_of()["RssAnon"] < before + 16


def test_a_pass_of_the_loader_has_its_peak_before_the_first_micro_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_sparse_dataset(tmp_path / "data", run_lengths(64))

    def epoch(folder: str) -> Iterator[tuple[int, ...]]:
        hold(64)  # as if it were planned
        yield from [(5, 6)] * 32

    monkeypatch.setattr(stream, "epoch_of", epoch)
    found = child.load(str(tmp_path / "data"))
    assert (found["rows"], found["tokens"], found["micro_batches"]) == (64, 352, 32)
    assert found["peak_mib"] > max(found["held_mib"]) + 48


def test_a_pass_of_the_loader_in_a_child(make_dataset: Callable[..., CompletionDataset]) -> None:
    lengths = run_lengths(300)
    dataset = make_dataset([([5] * length, length // 2) for length in lengths.tolist()])
    found = run_child("load", dataset.folder)
    assert (found["rows"], found["tokens"]) == (300, int(lengths.sum()))
    assert 10 < min(found["held_mib"]) <= found["peak_mib"] + 1


def test_a_pass_that_is_ended_early(tmp_path: Path) -> None:
    write_sparse_dataset(tmp_path / "data", run_lengths(3000), masks=True)
    found = run_child("load", tmp_path / "data", 1000)
    assert 1000 <= found["rows"] < 1100
    assert len(found["held_mib"]) == child._LOOKS


def test_rows_are_all_different(tmp_path: Path) -> None:
    texts.write_long_rows(tmp_path / "long.jsonl", 30, 4000)
    texts.write_short_rows(tmp_path / "short.jsonl", 30)
    long = [json.loads(line) for line in (tmp_path / "long.jsonl").read_text().splitlines()]
    short = [json.loads(line) for line in (tmp_path / "short.jsonl").read_text().splitlines()]
    assert len({json.dumps(row) for row in long}) == len({row["prompt"] for row in short}) == 30
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] * 2 for row in long)
    assert all(sum(len(m["content"]) for m in row["messages"]) == 4000 for row in long)
    assert all(len(row["completion"].split()) == texts.SHORT_WORDS for row in short)


def test_the_library_is_read_again_from_another_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in (("a.py", "x" * 500), ("b.py", "y" * 2000)):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(texts.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    pieces = texts.library_pieces(1000)
    assert [next(pieces) for _ in range(3)] == ["x" * 500 + "y" * 500, "y" * 1000, "y" * 1000]
    monkeypatch.setattr(texts.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(RunError, match="holds none"):
        next(texts.library_pieces(1000))
