"""`paceline generate` killed twenty times at random moments gives what it gives unkilled, byte for byte."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.data.completions import load_ledger, shard_files

pytestmark = pytest.mark.faults

KILLS = 20
SEED = 2026
PROMPTS = 240

# Imports once and forks a process for every command: importing torch takes longer than all of the rest.
SERVER = """
import os, sys, traceback
from pathlib import Path
from paceline.observe.console import Console
from paceline.recipes.generate import generate_completions
from paceline.recipes.generate_asked import Asked

prompts, model = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if not child:
        status = 1
        try:
            asked = Asked(model, dtype="float32", max_new_tokens=32, rows=8)
            generate_completions(prompts, Path(line.strip()), asked, console=Console(json=True), shard_lines=16)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
def server(tmp_path: Path, tiny_folder: Path) -> Iterator[subprocess.Popen[str]]:
    rng = random.Random(SEED)
    words = [
        [" ".join(f"w{rng.randrange(4, 128)}" for _ in range(rng.randrange(1, 6))) for _ in range(3)]
        for _ in range(PROMPTS)
    ]
    rows: list[dict[str, object]] = [{"prompt": text[0]} for text in words]
    for i in range(0, PROMPTS, 8):
        rows[i] = {"messages": [{"role": "user", "content": text} for text in words[i]], "id": f"talk-{i}"}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [sys.executable, "-c", SERVER, str(tmp_path / "prompts.jsonl"), str(tiny_folder)]
    with (tmp_path / "stderr").open("w") as errors:
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


def size(out: Path) -> int:
    """Bytes of what is finished and of what is under way."""
    total = 0
    for path in [*out.glob("completions-*.jsonl"), *out.glob("open-*.log")]:
        with suppress(FileNotFoundError):  # it became something else
            total += path.stat().st_size
    return total


def begin(server: subprocess.Popen[str], out: Path) -> int:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(f"{out}\n")
    server.stdin.flush()
    return int(server.stdout.readline())


def end(server: subprocess.Popen[str]) -> int:
    assert server.stdout is not None
    return int(server.stdout.readline())


def kill_on_the_way(server: subprocess.Popen[str], out: Path, grown: int, late_s: float) -> str:
    """Kill a command once so many bytes have come, or soon after it began; return what it left."""
    began, before = time.monotonic(), size(out)
    child = begin(server, out)
    while size(out) - before < grown:
        assert time.monotonic() - began < 60
        time.sleep(0.001)
    time.sleep(late_s)
    os.kill(child, signal.SIGKILL)
    assert end(server) == -signal.SIGKILL, "it ended before it was killed"
    seconds = time.monotonic() - began
    logs = sorted(out.glob("open-*.log"))
    torn = sum(not log.read_bytes().endswith(b"\n") for log in logs if log.stat().st_size)
    aside = len(list(out.glob("*.part")))
    ledger = load_ledger(out) if out.is_dir() else None
    return f"{seconds:7.2f} {size(out):10,} {len(ledger.shards) if ledger else 0:8} {len(logs):6} {torn:6} {aside:6}"


def test_twenty_kills(server: subprocess.Popen[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(SEED)
    began = time.monotonic()
    begin(server, tmp_path / "whole")
    assert end(server) == 0, (tmp_path / "stderr").read_text()
    table = [
        f"uninterrupted {time.monotonic() - began:.1f} s, seed {SEED}",
        "kill seconds      bytes  shards   logs   torn  aside",
    ]
    out, step = tmp_path / "killed", size(tmp_path / "whole") // (KILLS + 4)
    for kill in range(1, KILLS + 1):
        # One of four dies while it starts, before anything new is there.
        grown = rng.randrange(1, 2 * step - 2000) if rng.random() < 0.75 else 0
        late_s = rng.random() * (0.003 if grown else 0.5)
        table.append(f"{kill:4} {kill_on_the_way(server, out, grown, late_s)}")
    begin(server, out)
    assert end(server) == 0, (tmp_path / "stderr").read_text()
    with capsys.disabled():
        print("", *table, sep="\n")

    names = [path.name for path in shard_files(tmp_path / "whole")]
    assert len(names) == PROMPTS // 16
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (tmp_path / "whole").iterdir())
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert load_ledger(out) == load_ledger(tmp_path / "whole")
    rows = [json.loads(line) for path in shard_files(out) for line in path.read_bytes().splitlines()]
    ids = [row["id"] for row in rows]
    assert len(set(ids)) == len(ids)
    assert {row["line"] for row in rows} == set(range(1, PROMPTS + 1))
