"""A run behind a command: its files come over byte for byte, and what answers in its place is not believed."""

import os
import random
import shlex
import shutil
import socket
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest

from paceline.checkpoint.folder import claim, claimed
from paceline.observe import remote
from paceline.observe.far_side import SCRIPT
from paceline.observe.place import find_place
from paceline.observe.remote import RemoteRun
from paceline.observe.watched import Look
from paceline.records import UserError


def remote_run(run: Path, copy: Path, via: str = "env") -> RemoteRun:
    copy.mkdir(exist_ok=True)
    return RemoteRun(find_place(str(run), via), copy, interval_s=0.01, ask=False)


def look_once(run: Path, copy: Path, via: str = "env") -> Look:
    (look,) = remote_run(run, copy, via).looks(once=True)
    return look


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("events*.jsonl")}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_every_byte_comes_over(run: Path, tmp_path: Path, seed: int) -> None:
    """Files of line feeds and other bytes grow, become full and follow one another, whatever a line is there."""
    draw = random.Random(seed)
    (run / "events.jsonl").touch()
    number = draw.choice([1, 7])
    if number > 1:  # older ones were taken away
        (run / f"events-{number - 1:06d}.jsonl").touch()
    with closing(remote_run(run, tmp_path / "copy").looks()) as looks:
        for _ in range(12):
            with (run / "events.jsonl").open("ab") as file:
                file.write(bytes(draw.choices(b"\n\n\r\0ab\xff", k=draw.choice([0, 1, 2, 5, 70000]))))
            if draw.random() < 0.3:
                (run / "events.jsonl").rename(run / f"events-{number:06d}.jsonl")
                (run / "events.jsonl").touch()
                number += 1
            until = time.monotonic() + 30
            for look in looks:  # several may wait in the pipe that were taken before
                assert look.trouble is None
                if contents(tmp_path / "copy") == contents(run):
                    break
                assert time.monotonic() < until


def test_a_copy_goes_on_where_it_was(run: Path, tmp_path: Path) -> None:
    """Also in the middle of a line, and in a file that has become full since."""
    following = remote_run(run, tmp_path / "copy")
    for number, text in enumerate((b'{"a": 1}\n{"b"', b": 2}\n", b"", b'\n\n{"c": 3}\n{"d"')):
        with (run / "events.jsonl").open("ab") as file:
            file.write(text)
        if number == 2:
            (run / "events.jsonl").rename(run / "events-000001.jsonl")
        (look,) = following.looks(once=True)
        assert look.trouble is None
        if number == 2:  # the next file is not there yet
            (run / "events.jsonl").touch()
        assert contents(tmp_path / "copy") == contents(run)


def test_a_shorter_file_is_another_one(run: Path, tmp_path: Path) -> None:
    following = remote_run(run, tmp_path / "copy")
    (run / "events.jsonl").write_bytes(b"long\n" * 100)
    list(following.looks(once=True))
    (run / "events.jsonl").write_bytes(b"short\n")
    looks = following.looks()
    with closing(looks):
        assert next(looks).trouble is None
        assert contents(tmp_path / "copy") == {"events.jsonl": b""}  # so that its reader begins anew
        next(looks)
    assert contents(tmp_path / "copy") == contents(run)


@pytest.fixture
def no_flock(tmp_path: Path) -> str:
    """A prefix that leaves the far side without util-linux's flock."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "cat", "date", "ls", "sleep", "tail", "uname", "wc"):
        (tools / name).symlink_to(str(shutil.which(name)))
    return f"env PATH={tools}"


def test_who_holds_the_folder(run: Path, tmp_path: Path, no_flock: str) -> None:
    """The far side's answer is that of this machine's own look, with flock and without."""
    (run / "events.jsonl").touch()

    def asked() -> list[tuple[bool | None, str]]:
        mine = claim(run)
        name = f"process {mine.process} on {mine.host}" if mine.host else ""
        looks = [look_once(run, tmp_path / "copy", via) for via in ("env", no_flock)]
        return [(mine.held, name), *((look.held, look.owner) for look in looks)]

    assert asked() == [(False, "")] * 3
    with claimed(run):
        assert asked() == [(True, f"process {os.getpid()} on {socket.gethostname()}")] * 3
    assert asked() == [(False, "")] * 3

    gone = subprocess.Popen(["true"])
    gone.wait()
    (run / ".lock").write_text(f"{gone.pid} {socket.gethostname()}")
    assert asked() == [(False, f"process {gone.pid} on {socket.gethostname()}")] * 3
    (run / ".lock").write_text(f"{os.getpid()} elsewhere")
    assert asked() == [(None, f"process {os.getpid()} on elsewhere")] * 3
    with (run / ".lock").open() as lock:  # the number of a killed process is another one's now: flock knows
        (run / ".lock").write_text(f"{os.getpid()} {socket.gethostname()}")
        assert [held for held, _ in asked()] == [False, False, True]
        assert lock
    (run / ".lock").unlink()
    (run / ".lock").symlink_to("nowhere")
    assert claim(run).held is None


def answer(text: str) -> str:
    """A prefix that answers in the script's place; the mark is the last word it is given."""
    return shlex.join(["sh", "-c", f"for mark; do :; done; {text}", "x"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('echo "This account is not available."', r"ended with status 0, saying: This account is not available\. It"),
        ("exit 3", r"ended with status 3, saying nothing"),
        ('printf "%s hello\\n%s at ../../x\\n" $mark $mark', r"answers what no run has: a file number '\.\./\.\./x'"),
        ('printf "%s full -1\\n" $mark', r"a file number '-1'"),
        ('printf "%s trouble strange {path} {0}\\n" $mark', r"cannot be read: \{path\} \{0\}\.$"),
        ('printf "%s hello\\n" $mark; kill -9 $$', r"ended with status -9"),
        (
            "head -c 3000 /dev/zero; sleep 60",
            r"^The far side sent a line of more than 2,000 bytes: that is no run's\.$",
        ),
    ],
)
def test_what_is_no_answer(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, sentence: str
) -> None:
    monkeypatch.setattr(remote, "_LONGEST_LINE", 2000)
    with pytest.raises(UserError, match=sentence):
        look_once(run, tmp_path / "copy", answer(text))
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["events.jsonl"]


def test_a_look_says_nothing_that_is_not_understood(run: Path, tmp_path: Path) -> None:
    text = 'printf "%s hello\\n\\n%s look maybe 99999999999999999999999\\n%s end\\n" $mark $mark $mark'
    look = look_once(run, tmp_path / "copy", answer(text))
    assert (look.held, look.owner) == (None, "")
    assert look.now < 1e12


def test_silence_ends_a_look(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_SILENCE_S", 0.1)
    with pytest.raises(UserError, match=r"^The connection to the run behind `sh .*` is silent\.$"):
        look_once(run, tmp_path / "copy", "sh -c 'exec sleep 60' x")


def test_the_script_is_one_line_for_any_login_shell() -> None:
    assert "\n" not in SCRIPT
    assert "'" not in SCRIPT
    assert "!" not in SCRIPT.replace("! -e", "").replace(" != ", "")  # which csh leaves alone
