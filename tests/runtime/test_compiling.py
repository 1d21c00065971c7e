"""Compiling in threads: what reaches them, what is refused, and what the gate is for."""

import contextvars
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.records import UserError
from paceline.runtime.compiling import (
    OPTIONS,
    OneShape,
    check_mode,
    forbid_recompiles,
    keep_compiled_code,
    own_copy,
    warm_compiler,
)

pytestmark = pytest.mark.usefixtures("traceable")


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1, thread_name_prefix="drafter rank 0") as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_with_cuda_graphs_are_refused_in_worker_threads(mode: str) -> None:
    with pytest.raises(UserError, match=rf"'{mode}' turns triton\.cudagraphs on.*drafter rank 0.*captured"):
        in_thread(lambda: check_mode(mode))
    check_mode(mode)  # the main thread may


def test_other_modes_pass_and_unknown_ones_are_named() -> None:
    in_thread(lambda: check_mode("max-autotune-no-cudagraphs"))
    with pytest.raises(UserError, match="no compile mode 'fast'.*reduce-overhead"):
        check_mode("fast")


def test_a_copy_has_compiled_code_of_its_own_which_its_name_finds_again() -> None:
    compiled: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append("once")
        return graph.forward

    factor = 3.0

    def function(x: torch.Tensor, *, shift: float = 1.0) -> torch.Tensor:
        return x * factor + shift

    names = ("replica 0", "replica 1", "replica 0")
    copies = [own_copy(function, name) for name in names]
    assert copies[0] is copies[2]
    for copy, so_far in zip(copies, (1, 2, 2), strict=True):
        assert torch.compile(copy, backend=backend)(torch.ones(2)).tolist() == [4.0, 4.0]
        assert len(compiled) == so_far


def test_one_shape_runs_compiled_and_sounds_an_alarm_on_another() -> None:
    calls: list[str] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            calls.append("eager")
        return (x * 3).sin()

    def instead(x: torch.Tensor) -> torch.Tensor:
        calls.append("instead")
        return (x * 3).sin()

    reasons: list[str] = []
    one = OneShape(function, instead=instead, alarm=reasons.append)

    def run() -> None:
        warm_compiler("cpu")
        x = torch.arange(6.0)
        torch.testing.assert_close(one(x), (x * 3).sin())
        with forbid_recompiles():
            one(x)
            assert (one.recompiles, calls) == (0, [])
            y = torch.arange(8.0)
            torch.testing.assert_close(one(y), (y * 3).sin())
        assert (one.recompiles, calls) == (1, ["instead"])

    in_thread(run)
    assert "size" in reasons[0], "the guard is named"
    assert "function" in reasons[0]


def test_many_devices_and_shapes_are_variants_of_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch stops at eight unless it is told otherwise, and in a worker it must be told by argument."""
    real = torch.compile
    without_inductor = lambda function, options, **more: real(function, backend="eager", **more)  # noqa: E731
    monkeypatch.setattr(torch, "compile", without_inductor)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 3 + 1

    def run() -> None:
        for size in range(2, 14):
            one = OneShape(function, instead=function)
            torch.testing.assert_close(one(torch.ones(size)), torch.full((size,), 4.0))
            assert one.recompiles == 0

    in_thread(run)


def test_errors_of_the_function_are_not_taken_for_recompiles() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(7, 2)

    one = OneShape(function, instead=function)
    with pytest.raises(Exception, match="size|shape|mat"):
        one(torch.ones(3, 3))
    assert one.recompiles == 0


def test_settings_reach_a_thread_only_by_its_context() -> None:
    """Why options go to torch.compile itself and roles run in a copy of the context."""
    import torch._inductor.config as inductor

    def read() -> str:
        return str(inductor.comment_origin)

    with inductor.patch(comment_origin=not inductor.comment_origin):
        here = read()
        context = contextvars.copy_context()
        assert in_thread(lambda: context.run(read)) == here
        if in_thread(read) == here:
            pytest.skip("this torch keeps settings for the process")


def test_options_reach_inductor_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.compile_fx as compile_fx

    seen: list[Any] = []
    real = compile_fx.compile_fx

    def watched(*args: Any, **more: Any) -> Any:
        seen.append((more.get("config_patches") or {}).get("triton.cudagraphs"))
        return real(*args, **more)

    monkeypatch.setattr(compile_fx, "compile_fx", watched)
    assert OPTIONS == {"triton.cudagraphs": False}
    one = OneShape(lambda x: x.cos() + 1, instead=lambda x: x)
    torch.testing.assert_close(in_thread(lambda: one(torch.ones(5))), torch.ones(5).cos() + 1)
    assert seen[0] is False


def test_compiled_code_is_kept_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/named/by/the/user")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/named/by/the/user"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    assert (tmp_path / "cache" / "inductor").is_dir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        UserError, match=r"folder for compiled code, .*file/inductor, cannot be written to .*PACELINE_CACHE"
    ):
        keep_compiled_code()


RESTART = """
import torch
from concurrent.futures import ThreadPoolExecutor
from torch._dynamo.utils import counters
from paceline.bench.shapes import SHAPES
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.runtime.compiling import warm_compiler
from paceline.train.step import DrafterStep

def warm():
    tiny = SHAPES["tiny"]
    embed = torch.ones(tiny.vocab_size, tiny.hidden_size)
    drafter = Drafter(tiny.drafter, tiny.hidden_size).initialise(0)
    DrafterStep(drafter, FrozenEnds(embed, embed), tiny.train_settings("bfloat16"), policy="compiled").warm()

warm_compiler("cpu")
with ThreadPoolExecutor(1) as pool:
    pool.submit(warm).result()
found = counters["aot_autograd"]
print(found["autograd_cache_hit"], found["autograd_cache_miss"], found["autograd_cache_bypass"])
"""


@pytest.mark.slow
def test_a_restart_finds_everything_compiled(tmp_path: Path) -> None:
    """Of the trivial one, drafter, head's loss and the updates of matrices and norms nothing is traced again."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment["PACELINE_CACHE"] = str(tmp_path)
    said = []
    for _ in range(2):
        call = [sys.executable, "-c", RESTART]
        done = subprocess.run(call, capture_output=True, text=True, timeout=280, env=environment)
        assert done.returncode == 0, done.stderr[-800:]
        said.append(done.stdout.split())
    assert said == [["0", "5", "0"], ["5", "0", "0"]]


CHILD = """
import threading, time, torch
from paceline.runtime.gate import Gate
from paceline.runtime.compiling import OneShape, warm_compiler

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])

gate, stop, errors = Gate(), threading.Event(), []
USE_GATE = {gated}
from contextlib import nullcontext
work = gate.work if USE_GATE else nullcontext
alone = gate.alone if USE_GATE else nullcontext

def train():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.ones(4, 16)
    while not stop.is_set():
        try:
            with work():
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        except BaseException as error:
            errors.append(f"{{type(error).__name__}}: {{error}}")

threads = [threading.Thread(target=train, daemon=True) for _ in range(2)]
"""


def child(code: str, *, gated: bool = True) -> subprocess.CompletedProcess[str]:
    text = textwrap.dedent(CHILD).format(gated=gated) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(("backend", "times"), [("aot_eager", 30), pytest.param("inductor", 6, marks=pytest.mark.slow)])
def test_threads_train_while_another_compiles_again_and_again_under_the_gate(backend: str, times: int) -> None:
    done = child(f"""
        torch._inductor.config.fx_graph_cache = False  # what is found again is not compiled
        warm_compiler("cpu")
        for t in threads: t.start()
        for n in range({times}):
            with alone():
                one = torch.compile(lambda x: (x * n).sin().sum(), backend="{backend}", dynamic=False)
                one(torch.ones(n + 2, requires_grad=True)).backward()
        stop.set()
        for t in threads: t.join()
        print("errors", len(errors), errors[:1])
    """)
    assert done.returncode == 0, done.stderr[-800:]
    assert "errors 0 []" in done.stdout


def test_without_the_gate_modules_die_while_another_thread_traces() -> None:
    """The hazard itself, forced: tracing patches nn.Module for the whole process."""
    done = child(
        """
        import torch.fx
        for t in threads: t.start()
        model = net()
        until = time.monotonic() + 200
        while not errors and time.monotonic() < until:
            with alone():
                torch.fx.symbolic_trace(model)
        stop.set()
        print("errors", bool(errors), errors[:1])
        """,
        gated=False,
    )
    assert "errors True" in done.stdout, done.stdout + done.stderr[-800:]


def test_with_the_gate_modules_live_while_another_thread_traces() -> None:
    done = child("""
        import torch.fx
        for t in threads: t.start()
        model = net()
        for _ in range(200):
            with alone():
                torch.fx.symbolic_trace(model)
        stop.set()
        for t in threads: t.join()
        print("errors", bool(errors), errors[:1])
    """)
    assert "errors False" in done.stdout, done.stdout + done.stderr[-800:]


RESET = """
    one = torch.compile(lambda x: (x * 2).sin(), backend="eager", dynamic=False)
    def warm():
        x = torch.ones(8)
        while not stop.is_set():
            with work():
                for _ in range(20):
                    one(x)
    threads = [threading.Thread(target=warm, daemon=True) for _ in range(4)]
    one(torch.ones(8))
    for t in threads: t.start()
    until = time.monotonic() + (5 if USE_GATE else 100)
    while time.monotonic() < until:
        with alone():
            torch._dynamo.reset()
    stop.set()
    for t in threads: t.join()
    print("survived")
"""


def test_a_reset_under_warm_code_kills_the_process() -> None:
    done = child(RESET, gated=False)
    assert done.returncode < 0, "this torch survives it: the gate need not forbid it any more"


def test_a_reset_under_the_gate_is_safe() -> None:
    done = child(RESET)
    assert done.returncode == 0, done.stderr[-800:]
    assert "survived" in done.stdout
