"""Folders appear whole, survive a killed process, and a run folder has one owner."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoint.drafter import DrafterMeta, find_drafter
from paceline.checkpoint.folder import claimed, whole_folder, write_whole
from paceline.config import DrafterSettings
from paceline.records import UserError


def dead_process() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def write(folder: Path, text: str) -> None:
    with whole_folder(folder) as aside:
        (aside / "file").write_text(text)


def test_a_folder_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write(folder, "old")
    with pytest.raises(ValueError, match="stop"), whole_folder(folder) as aside:
        (aside / "file").write_text("new")
        raise ValueError("stop")
    assert (folder / "file").read_text() == "old"
    write(folder, "new")
    assert (folder / "file").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_what_a_killed_process_left_is_removed_and_what_it_moved_away_comes_back(tmp_path: Path) -> None:
    dead = dead_process()
    (tmp_path / f".out.{dead}").mkdir()
    (tmp_path / f".out.old.{dead}").mkdir()
    (tmp_path / f".out.old.{dead}" / "file").write_text("old")
    (tmp_path / f".out.{os.getppid()}").mkdir()  # of a process that lives
    with whole_folder(tmp_path / "out"):
        assert (tmp_path / "out" / "file").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == [f".out.{os.getppid()}", "out"]


def test_two_processes_that_write_one_file_leave_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, own, synced = tmp_path / "evaluation.json", os.getpid(), os.fsync

    def another_writes_meanwhile(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", synced)
        with monkeypatch.context() as as_another:
            as_another.setattr(os, "getpid", os.getppid)  # which lives
            write_whole(path, "theirs, and longer")
        assert path.read_text() == "theirs, and longer"
        synced(handle)

    (tmp_path / f".evaluation.json.{dead_process()}.new").write_text("of a killed one")
    monkeypatch.setattr(os, "fsync", another_writes_meanwhile)
    write_whole(path, "ours")
    assert path.read_text() == "ours"
    assert os.getpid() == own
    assert [entry.name for entry in tmp_path.iterdir()] == ["evaluation.json"]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big")
    write(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "big" / "file").read_text() == "text"


def test_a_run_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with claimed(run), pytest.raises(UserError, match="Another process is training into"), claimed(run):
        pass
    with claimed(run):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"), claimed(tmp_path / "file" / "run"):
        pass


def test_another_process_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    hold = (
        "import sys, pathlib; from paceline.checkpoint.folder import claimed\n"
        "with claimed(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hold, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        sentence = rf"into {run} \(run_dir\): process {process.pid} on {socket.gethostname()}\. Choose another"
        with pytest.raises(UserError, match=sentence), claimed(run):
            pass
    finally:
        process.kill()
        process.communicate()
    told: list[str] = []
    with claimed(run, tell=told.append):
        assert (run / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}"
    assert told == [
        f"  process {process.pid} did not end by itself, so it left its lock on {run}; the lock is taken over"
    ]
    with claimed(run, tell=told.append):
        pass
    assert len(told) == 1, "who ends by itself leaves no lock"


def test_a_lock_of_another_machine_is_explained(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("77 node-b")
    sentence = rf"belongs to process 77 on node-b, which did not let go of it: .* remove {tmp_path}/\.lock; else"
    for _ in range(2):
        with pytest.raises(UserError, match=sentence), claimed(tmp_path):
            pass


def test_a_damaged_run_folder_is_one_sentence(tmp_path: Path, shape: DrafterSettings) -> None:
    (tmp_path / "drafter").mkdir()
    for text in ("{", "[]", json.dumps({"settings": {}})):
        (tmp_path / "drafter" / "drafter.json").write_text(text)
        with pytest.raises(UserError, match="cannot be understood"):
            find_drafter(tmp_path)
    meta = DrafterMeta(shape, "target", "r", 6, 64, 128, 512, 9)
    (tmp_path / "drafter" / "drafter.json").write_text(json.dumps(meta.tree()))
    assert find_drafter(tmp_path).meta == meta
    with pytest.raises(UserError, match="missing or damaged"):
        find_drafter(tmp_path).weights()
    (tmp_path / "drafter" / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(UserError, match="missing or damaged"):
        find_drafter(tmp_path).weights()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot be written to"), claimed(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_lock_that_is_no_text_is_explained(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(b"77 \xff\xfe")
    with pytest.raises(UserError, match=r"belongs to process 77 on .*remove"), claimed(tmp_path):
        pass
