"""The probes that look at the machine, and the pieces that others are made of; nothing here compiles with inductor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.probe import capture, machine
from paceline.probe.finding import Bench
from paceline.probe.nets import CLOSE, Run, difference, forward_of, make_input, make_net, run, same_bits
from paceline.probe.runner import Call, run_probes
from paceline.probe.threads import in_worker

CPU = torch.device("cpu")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "scratch").mkdir()
    return Bench(
        devices=0, cache=str(tmp_path / "cache"), runs=str(tmp_path / "a" / "b"), scratch=str(tmp_path / "scratch")
    )


def test_the_disk_is_tried_where_it_is_and_stays_clean(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "DISK_BYTES", 16 << 20)
    finding = machine.disk(bench)
    (one,) = finding.numbers["disks"]  # three folders of one file system, two of which are not there yet
    assert one["for"] == ["cache", "runs", "temporary"]
    assert one["folder"] == str(tmp_path)
    assert one["write_mb_s"] > 0
    assert one["read_mb_s"] > 0
    assert [path.name for path in tmp_path.rglob("*")] == ["scratch"]


def test_a_full_disk_is_not_written_to(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DISK_BYTES", 1 << 60)
    finding = machine.disk(bench)
    assert finding.verdict == "refused"
    assert "too little room" in finding.observed


def test_no_compiler(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.compiler(bench).observed.startswith("there is no C++ compiler")


def test_a_compiler_that_fails(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\necho 'Python.h: no such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    finding = machine.compiler(bench)
    assert finding.verdict == "refused"
    assert finding.observed.endswith("says: Python.h: no such file")


@pytest.mark.parametrize(
    ("variables", "verdict", "said"),
    [
        ({}, "ok", "Python keeps what it has compiled of torch"),
        ({"PYTHONDONTWRITEBYTECODE": "1"}, "degraded", "PYTHONDONTWRITEBYTECODE is set: every process compiles"),
        ({"PYTHONPYCACHEPREFIX": "/proc/none"}, "degraded", "/torch is not written: every process"),
    ],
)
def test_whether_python_keeps_what_it_compiles(
    variables: dict[str, str], verdict: str, said: str, tmp_path: Path
) -> None:
    package = tmp_path / "torch"  # takes the place of torch, which takes seconds to compile
    for name in ("", *machine.STARTED):
        (package / name).mkdir()
        (package / name / "__init__.py").write_text("ONE = 1\n")
    ours = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | variables
    environment["PYTHONPATH"] = f"{tmp_path}:{Path(machine.__file__).parents[2]}"
    code = "import sys, torch, paceline.probe.machine as m; from paceline.probe.finding import Bench; "
    code += "f = m.python_modules(Bench(0, *sys.argv[1:] * 3)); print(f.verdict, f.observed)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{verdict} ")
    assert said in done.stdout
    assert ("the 4 modules of torch's compiler" in done.stdout) == (verdict == "degraded")


def test_ports(bench: Bench) -> None:
    assert machine.ports(bench).verdict == "ok"


def test_a_port_that_nobody_reaches(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.socket.socket, "accept", lambda server: (_ for _ in ()).throw(TimeoutError()))
    monkeypatch.setattr(machine.sys, "executable", "/bin/false")
    finding = machine.ports(bench)
    assert finding.verdict == "refused"
    assert "no process could connect" in finding.observed


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"/sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({}, None),
    ],
)
def test_the_containers_cores(files: dict[str, str], cores: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))
    assert machine._cpu_quota() == cores


def test_memory_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: "max" if path.endswith("memory.max") else "1024")
    assert machine._memory_limit() == 1024


def test_two_runs_are_compared_by_value_and_by_bits() -> None:
    net, x_ND = make_net(CPU, 8), make_input(CPU, 8)
    one, compiled = run(net, forward_of(net), x_ND)
    assert not compiled
    assert same_bits(one, run(net, forward_of(net), x_ND)[0])
    off = Run(one.loss * (1 + 1e-2), one.grads)
    assert not same_bits(one, off)
    assert difference(off, one) == pytest.approx(1e-2, rel=1e-3)
    assert difference(off, one) > CLOSE
    assert difference(Run(one.loss * float("nan"), one.grads), one) == float("inf")
    assert difference(Run(one.loss, one.grads[1:]), one) == float("inf")


def test_every_forward_has_its_own_code() -> None:
    net = make_net(CPU, 8)
    first, second = forward_of(net), forward_of(net)
    assert first.__code__ is not second.__code__  # type: ignore[attr-defined]


def test_a_worker_raises_in_its_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        in_worker(lambda: 1 // 0)
    assert in_worker(lambda: 7) == 7


def test_the_other_thread_of_a_capture() -> None:
    noise = capture._Noise(CPU, lambda: None)
    noise.wait_for(3)
    assert noise.end() == ""
    assert noise.rounds >= 3
    broken = capture._Noise(CPU, lambda: 1 // 0)
    broken.wait_for(3)
    assert broken.failed
    assert broken.end().startswith("ZeroDivisionError: ")


@pytest.mark.parametrize(
    ("same", "apart", "eager", "verdict"),
    [(True, 0.0, 1e-6, "ok"), (False, 1e-6, 1e-6, "degraded"), (False, 1.0, 1.0, "refused"),
     (True, 0.0, 1.0, "refused"), (False, float("inf"), 0.0, "refused")],
)  # fmt: skip
def test_replays_are_judged(same: bool, apart: float, eager: float, verdict: str) -> None:
    one = {"device": "cuda:0", "same_bits": same, "difference": apart, "difference_eager": eager, "ms": {"eager": 1.0}}
    assert capture._told([one]).verdict == verdict


def test_eager_code_does_not_pass_for_compiled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    ((finding, _),) = run_probes([Call("paceline.probe.compile:in_worker_thread", 200.0)], bench)
    assert finding.verdict == "refused"
    assert "ran eager code" in finding.observed


def test_what_threads_do_to_one_another(bench: Bench) -> None:
    names = ("graph_trees_state", "settings_in_threads", "is_compiling_elsewhere", "modules_while_tracing")
    found = [finding for finding, _ in run_probes([Call(f"paceline.probe.hazards:{n}", 200.0) for n in names], bench)]
    assert [finding.verdict for finding in found] == ["ok"] * 4, found
    assert found[1].numbers["copied"] == found[1].numbers["set"]
