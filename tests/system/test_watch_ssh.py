"""`paceline watch` through a real sshd: what it reads, what it says when it cannot, and that no name runs anything."""

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_sshd import Sshd

from paceline.observe import remote
from paceline.observe.events import EventLog
from paceline.observe.place import find_place
from paceline.observe.reading import EventTail, read_events
from paceline.observe.remote import Look, RemoteRun
from paceline.records import UserError

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    sshd = Sshd(tmp_path_factory.mktemp("sshd"))
    yield sshd
    sshd.close()


@pytest.fixture
def sshd(daemon: Sshd, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    daemon.know("host_key")
    daemon.identify("user_key")
    monkeypatch.setenv("PATH", f"{daemon.folder / 'bin'}:{os.environ['PATH']}")
    return daemon


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of three steps."""
    folder = tmp_path / "run"
    write(folder, 3)
    with EventLog(folder) as events:
        events.write("trained", run="run", drafter="run/drafter", train_steps=3, loss=1.5, train_s=2.0)
    return folder


def write(folder: Path, steps: int, first: int = 0) -> None:
    with EventLog(folder) as events:
        if first == 0:
            events.write("started", settings={"run_dir": "run"})
        for step in range(first, first + steps):
            events.write("step", step=step, total_steps=100, epoch=0, loss=2.0 - step / 100, acceptance=1.5, lr=1e-3)


class Following:
    """Follows a run that is elsewhere, into a folder of this machine."""

    def __init__(self, text: str, folder: Path, via: str | None = None) -> None:
        folder.mkdir()
        self.run = RemoteRun(find_place(text, via), folder, interval_s=0.05, ask=False)
        self.tail = EventTail(folder)
        self.looks = self.run.looks()
        self.steps: list[int] = []
        self.troubles: list[str] = []

    def until(self, wanted: Callable[[Look], bool]) -> Look:
        began = time.monotonic()
        for look in self.looks:
            self.steps += [event["step"] for event in self.tail.poll() if event["event"] == "step"]
            self.troubles += [look.trouble] if look.trouble else []
            if wanted(look):
                return look
            assert time.monotonic() - began < 60
        raise AssertionError("it stopped looking")


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[..., Following]]:
    made: list[Following] = []

    def begin(text: str, via: str | None = None) -> Following:
        made.append(Following(text, tmp_path / f"copy-{len(made)}", via))
        return made[-1]

    yield begin
    for following in made:
        following.looks.close()


def look_once(text: str, folder: Path, via: str | None = None) -> Look:
    folder.mkdir()
    (look,) = RemoteRun(find_place(text, via), folder, interval_s=1.0, ask=False).looks(once=True)
    return look


def test_a_finished_run(sshd: Sshd, run: Path, tmp_path: Path) -> None:
    look = look_once(sshd.url(run), tmp_path / "copy")
    assert look.held is False
    assert abs(look.now - time.time()) < 60
    assert list(read_events(tmp_path / "copy")) == list(read_events(run))


def test_a_run_under_way(sshd: Sshd, tmp_path: Path, follow: Callable[..., Following]) -> None:
    """Another process writes, holds the folder, and is killed in the middle of a line."""
    run = tmp_path / "run"
    code = (
        "import sys\nfrom pathlib import Path\nfrom paceline.checkpoint.folder import claimed\n"
        "from paceline.observe.events import EventLog\nrun = Path(sys.argv[1])\n"
        "with claimed(run), EventLog(run) as events:\n"
        "    for step, _ in enumerate(sys.stdin):\n        events.write('step', step=step)\n"
        "        print(step, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, run], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        writer.stdin.write(b"\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == b"0\n"
        following = follow(sshd.url(run))
        for step in range(1, 5):
            writer.stdin.write(b"\n")
            writer.stdin.flush()
            assert int(writer.stdout.readline()) == step
            look = following.until(lambda _, step=step: following.steps == list(range(step + 1)))
            assert look.held is True
            assert look.owner == f"process {writer.pid} on {os.uname().nodename}"
        writer.kill()
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"schema": 1, "t": 5, "event": "st')
    assert following.until(lambda look: look.held is False).owner.startswith(f"process {writer.pid} ")
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'ep", "step": 5}\n')
    following.until(lambda _: following.steps == [*range(6)])
    assert (following.run.folder / "events.jsonl").read_bytes() == (run / "events.jsonl").read_bytes()
    assert following.troubles == []


def test_a_connection_that_breaks_is_made_again(
    sshd: Sshd, tmp_path: Path, follow: Callable[..., Following], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_BACK_OFF_S", (0.1, 0.2))
    run, before = tmp_path / "run", len(sshd.connections)
    write(run, 3)
    following = follow(sshd.url(run))
    following.until(lambda _: following.steps == [0, 1, 2])
    write(run, 3, first=3)
    sshd.kill_connection(before)
    following.until(lambda look: look.trouble is not None)
    assert following.troubles[0].startswith("The connection to 127.0.0.1 broke: ")
    assert following.troubles[0].endswith(" Trying again in 0.1 s.")
    following.until(lambda _: following.steps == [*range(6)])
    assert len(following.troubles) == 1

    # While nobody listens it goes on trying, later and later.
    port = sshd.port
    sshd.refuse()
    sshd.kill_connection(before + 1)
    following.until(lambda _: len(following.troubles) == 4)
    assert "Connection refused" in following.troubles[-1]
    assert following.troubles[-1].endswith(" Trying again in 0.2 s.")
    write(run, 1, first=6)
    sshd.listen(port)
    following.until(lambda _: following.steps == [*range(7)])
    assert (following.run.folder / "events.jsonl").read_bytes() == (run / "events.jsonl").read_bytes()


def test_a_silent_connection_is_given_up(
    sshd: Sshd, run: Path, follow: Callable[..., Following], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The far side is stopped: nothing ends, and nothing comes."""
    monkeypatch.setattr(remote, "_BACK_OFF_S", (0.1,))
    before = len(sshd.connections)
    following = follow(sshd.url(run))
    following.until(lambda _: following.steps == [0, 1, 2])
    monkeypatch.setattr(remote, "_SILENCE_S", 1.0)
    following.run._interval_s = 0.05
    sshd.kill_connection(before)  # the next one looks with the short limit
    following.until(lambda look: look.trouble is None and len(following.troubles) == 1)
    os.killpg(sshd.connections[before + 1].pid, signal.SIGSTOP)
    following.until(lambda look: look.trouble is not None)
    assert following.troubles[-1].startswith("The connection to the run on 127.0.0.1 is silent.")
    following.until(lambda look: look.trouble is None)


def test_full_files_while_it_is_watched(sshd: Sshd, tmp_path: Path, follow: Callable[..., Following]) -> None:
    run = tmp_path / "run"
    write(run, 2)
    (run / "events.jsonl").rename(run / "events-000001.jsonl")
    write(run, 2, first=2)
    following = follow(sshd.url(run))
    following.until(lambda _: following.steps == [0, 1, 2, 3])
    write(run, 1, first=4)
    (run / "events.jsonl").rename(run / "events-000002.jsonl")
    following.until(lambda look: look.trouble is None)  # between the two names there is no events.jsonl
    write(run, 2, first=5)
    (run / "events.jsonl").rename(run / "events-000003.jsonl")
    write(run, 1, first=7)
    following.until(lambda _: following.steps == [*range(8)])
    names = sorted(path.name for path in run.iterdir())
    assert names == ["events-000001.jsonl", "events-000002.jsonl", "events-000003.jsonl", "events.jsonl"]
    for name in names:
        assert (following.run.folder / name).read_bytes() == (run / name).read_bytes()


def test_a_run_begun_anew_in_its_folder(sshd: Sshd, tmp_path: Path, follow: Callable[..., Following]) -> None:
    run = tmp_path / "run"
    write(run, 3)
    following = follow(sshd.url(run))
    following.until(lambda _: following.steps == [0, 1, 2])
    aside = tmp_path / "aside"
    write(aside, 5)
    (aside / "events.jsonl").replace(run / "events.jsonl")  # with more in it than had been read
    following.until(lambda _: len(following.steps) >= 8)
    assert following.steps == [0, 1, 2, 0, 1, 2, 3, 4]


NAMES = [
    "it's", 'so "called"', "a  b", "$(touch TOUCHED)", "`touch TOUCHED`", "; touch TOUCHED; #", "two\nlines", "-rf",
    "*", "\\n\\'", "~", "${IFS}", "%41?x#y", "ünï", "a' 'b", "&& touch TOUCHED", "\x1b[31mred",
]  # fmt: skip


def test_no_name_runs_anything(sshd: Sshd, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a path's nor a prefix's words reach the far shell as anything but words."""
    monkeypatch.chdir(tmp_path)
    wrapper = tmp_path / "enter a 'box'"
    wrapper.write_text('#!/bin/sh\necho noise of the login\n[ "$1" = "$EXPECTED" ] || exit 9\nshift\nexec "$@"\n')
    wrapper.chmod(0o755)
    for number, name in enumerate(NAMES):
        there = tmp_path / "runs" / name
        shutil.copytree(run, there)
        for kind, text, via in (
            ("ssh", sshd.url(there), None),
            ("ssh-via", sshd.url(there), shlex.join(["env", f"EXPECTED={name}", str(wrapper), name])),
            ("via", str(there.relative_to(tmp_path)), shlex.join(["env", f"EXPECTED={name}", str(wrapper), name])),
        ):
            copy = tmp_path / f"{kind}-{number}"
            look_once(text, copy, via)
            assert list(read_events(copy)) == list(read_events(run)), (kind, name)
    assert not list(tmp_path.rglob("TOUCHED"))
    assert not Path("TOUCHED").exists()


def test_a_path_from_the_home_folder(sshd: Sshd, run: Path, tmp_path: Path) -> None:
    home = Path(os.path.expanduser(f"~{sshd.user}"))
    look_once(sshd.url(f"/~/{os.path.relpath(run, home)}"), tmp_path / "copy")
    assert list(read_events(tmp_path / "copy")) == list(read_events(run))


def refused(text: str, tmp_path: Path, via: str | None = None) -> str:
    with pytest.raises(UserError) as error:
        look_once(text, tmp_path / "copy", via)
    return str(error.value)


def test_a_wrong_key(sshd: Sshd, run: Path, tmp_path: Path) -> None:
    sshd.identify("strange_key")
    assert refused(sshd.url(run), tmp_path) == (
        f"127.0.0.1 does not let {sshd.user} in: {sshd.user}@127.0.0.1: Permission denied (publickey). Try "
        f"`ssh -p {sshd.port} {sshd.user}@127.0.0.1`; check user and key."
    )


def test_a_wrong_key_later_is_final(
    sshd: Sshd, run: Path, follow: Callable[..., Following], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_BACK_OFF_S", (0.1,))
    before = len(sshd.connections)
    following = follow(sshd.url(run))
    following.until(lambda _: following.steps == [0, 1, 2])
    sshd.identify("strange_key")
    sshd.kill_connection(before)
    with pytest.raises(UserError, match=r"does not let .* in"):
        following.until(lambda _: False)


def test_host_keys_are_checked(sshd: Sshd, run: Path, tmp_path: Path) -> None:
    sshd.know()
    by_hand = f"`ssh -p {sshd.port} {sshd.user}@127.0.0.1`"
    assert refused(sshd.url(run), tmp_path) == (
        f"The host key of 127.0.0.1 is not known yet: connect once with {by_hand} and compare it."
    )
    assert (sshd.folder / "known_hosts").read_text() == ""
    sshd.know("other_host_key")
    shutil.rmtree(tmp_path / "copy")
    assert refused(sshd.url(run), tmp_path).startswith(
        "The host key of 127.0.0.1 is not the one that is known: somebody may be in between, or the host was set up "
        "anew."
    )


def test_a_port_where_nobody_listens(sshd: Sshd, run: Path, tmp_path: Path) -> None:
    port = sshd.port
    sshd.refuse()
    try:
        assert refused(sshd.url(run), tmp_path) == (
            f"127.0.0.1 cannot be reached: ssh: connect to host 127.0.0.1 port {port}: Connection refused. Check the "
            "name, the port and the network."
        )
    finally:
        sshd.listen(port)


def test_what_is_there_is_no_run(sshd: Sshd, run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (run / "events.jsonl").rename(run / "events-000003.jsonl")
    (run / "events-000003.jsonl").with_name("events-000001.jsonl").touch()
    for path, sentence in (
        (tmp_path / "nowhere", "There is no folder {} on 127.0.0.1. Check the path."),
        (run / "events-000003.jsonl", "A run is a folder, but {} on 127.0.0.1 is a file."),
        (tmp_path / "empty", "{} on 127.0.0.1 is not a run's folder: it has neither events.jsonl nor settings.yaml."),
    ):
        assert refused(sshd.url(path), tmp_path).startswith(sentence.format(path))
        shutil.rmtree(tmp_path / "copy")
    write(run, 1)
    assert refused(sshd.url(run), tmp_path) == (
        f"Of the events in {run} on 127.0.0.1 a file is missing, events-000002.jsonl."
    )


@pytest.mark.parametrize("closed", ["run", "run/events.jsonl"])
def test_without_permission(sshd: Sshd, run: Path, tmp_path: Path, closed: str) -> None:
    (tmp_path / closed).chmod(0)
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.name.startswith("pytest") or folder == tmp_path:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)
    nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups" if os.geteuid() == 0 else None
    try:
        behind = f" behind `{nobody}`" if nobody else ""
        assert refused(sshd.url(run), tmp_path, nobody) == (
            f"{tmp_path / closed} on 127.0.0.1{behind} may not be read by the user who looks. Choose another user, or "
            "permit it there."
        )
    finally:
        (tmp_path / closed).chmod(0o700)


def test_a_host_without_the_tools(sshd: Sshd, run: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "cat", "date", "ls", "sleep", "uname", "wc"):
        (tools / name).symlink_to(str(shutil.which(name)))
    assert refused(sshd.url(run), tmp_path, f"env PATH={tools}") == (
        f"The shell on 127.0.0.1 behind `env PATH={tools}` has no command tail, without which a run is not read there: "
        "install it, or watch through another host or container (--via)."
    )
    shutil.rmtree(tmp_path / "copy")
    (tools / "sh").unlink()
    assert refused(sshd.url(run), tmp_path, f"env PATH={tools}") == (
        f"No POSIX shell answered on 127.0.0.1 behind `env PATH={tools}`: `env PATH={tools}` ended with status 127, "
        "saying: env: 'sh': No such file or directory. It must run what is put behind it; try it by hand."
    )


def test_without_ssh(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert refused(f"ssh://127.0.0.1{run}", tmp_path) == (
        "There is no command ssh on this machine. Install it (Debian, Ubuntu: apt-get install openssh-client)."
    )


def paceline(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paceline", *map(str, arguments)]


def test_the_command_says_the_same_here_and_there(sshd: Sshd, run: Path) -> None:
    said = []
    for place in (str(run), sshd.url(run)):
        done = subprocess.run(paceline("watch", place, "--once", "--json"), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        said.append(json.loads(done.stdout))
    assert abs(said[0].pop("now") - said[1].pop("now")) < 60
    assert said[0] == said[1]
    assert (said[0]["outcome"], said[0]["step"]) == ("finished", 3)


@pytest.fixture
def locked_key(sshd: Sshd) -> Iterator[None]:
    """The client's key needs a passphrase."""
    change = ["ssh-keygen", "-q", "-p", "-f", str(sshd.folder / "user_key")]
    subprocess.run([*change, "-P", "", "-N", "sesame"], check=True)
    yield
    subprocess.run([*change, "-P", "sesame", "-N", ""], check=True)


def test_ssh_may_ask_where_somebody_sits(locked_key: None, sshd: Sshd, run: Path) -> None:
    command = ["script", "-qec", shlex.join(paceline("watch", sshd.url(run))), "/dev/null"]  # on a terminal of its own
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        killer = threading.Timer(60, process.kill)
        killer.start()
        said = b""
        while b"Enter passphrase" not in said:
            chunk = os.read(process.stdout.fileno(), 1000)
            assert chunk, said
            said += chunk
        process.stdin.write(b"sesame\n")
        process.stdin.flush()
        said = process.stdout.read()
        assert process.wait() == 0, said
        killer.cancel()
    assert b"finished" in said


@pytest.mark.parametrize("how", ["--once", "--json"])
def test_ssh_asks_no_script(locked_key: None, sshd: Sshd, run: Path, how: str) -> None:
    command = ["script", "-qec", shlex.join(paceline("watch", sshd.url(run), how)), "/dev/null"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "passphrase" not in done.stdout
    assert f"error: 127.0.0.1 does not let {sshd.user} in" in done.stdout


def test_nothing_stays_behind_on_the_far_side(sshd: Sshd, run: Path, follow: Callable[..., Following]) -> None:
    following = follow(sshd.url(run))
    following.until(lambda _: True)
    connection = sshd.connections[-1]
    there = processes_with(str(run))
    assert there
    following.looks.close()
    assert connection.wait(20) is not None
    until = time.monotonic() + 20
    while processes_with(str(run)):
        assert time.monotonic() < until, "the script goes on"
        time.sleep(0.05)


def processes_with(word: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and word.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
