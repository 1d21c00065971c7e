"""torch.compile as roles use it: one shape, no named mode, no CUDA graphs inside, and a recompile is an alarm.

Since torch 2.12 the settings of dynamo and inductor are context variables that a new thread does not inherit, so
everything is passed to `torch.compile` itself. The stance after warm-up is process-wide; see `forbid_recompiles`.
"""

import inspect
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any, Literal

import torch

from paceline.records import UserError
from paceline.runtime.profile import cache_folder

Policy = Literal["eager", "compiled", "captured"]
# Never a named mode: modes switch cudagraphs on behind `triton.cudagraphs`, and cannot be combined with options.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"triton.cudagraphs": False}
_STANCE = "fail_on_recompile"
_VARIANTS = 64  # of one function: each device, and each shape that is warmed up, is one; torch's default is 8
_LIMIT_IS_PASSED = "recompile_limit" in inspect.signature(torch.compile).parameters  # since torch 2.12


class OneShape:
    """A function compiled for the one shape it is called with; anything else runs `instead` and sounds an alarm.

    `recompiles` counts calls that torch would have compiled again after `forbid_recompiles`; `alarm` gets the guard
    that failed, in torch's words. `instead` must not need a compiler either.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        instead: Callable[..., Any],
        alarm: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.recompiles = 0
        self._instead, self._alarm = instead, alarm
        limit: dict[str, Any] = {"recompile_limit": _VARIANTS} if _LIMIT_IS_PASSED else {}  # else see warm_compiler
        self._compiled = torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS, **limit)

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function."""
        try:
            return self._compiled(*args)
        except RuntimeError as error:
            if _STANCE not in str(error):
                raise
            self.recompiles += 1
            self._alarm(" ".join(str(error).split()))
        return self._instead(*args)


@cache
def own_copy(function: Any, who: str) -> Callable[..., Any]:
    """Return a copy of a function for one thread at a time, `who`: what is compiled of it is not another thread's.

    Guards keep state while they are evaluated, and those on a number that may vary are Python, which lets the next
    thread in: two that share compiled code then see guards fail that hold. Who takes another's place has its name, and
    finds what was compiled.
    """
    code = function.__code__
    copy = FunctionType(
        code.replace(co_name=f"{code.co_name} of {who}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


@contextmanager
def forbid_recompiles() -> Iterator[None]:
    """Let nothing in the process be compiled while the block lasts; every OneShape is warm by then."""
    torch.compiler.set_stance(_STANCE)
    try:
        yield
    finally:
        torch.compiler.set_stance("default")


def check_mode(mode: str) -> None:
    """Refuse a named mode that uses CUDA graphs in a worker thread, whatever the version of torch.

    CUDAGraph Trees keep their state in the thread that imported them (to torch 2.12), free pending outputs of every
    thread at each step mark, and share a compiled callable between threads (to 2.14).

    Raises:
        UserError: the mode is unknown, or its options turn CUDA graphs on and this is not the main thread.
    """
    from torch import _inductor

    known = _inductor.list_mode_options()
    if mode not in known:
        raise UserError(f"There is no compile mode {mode!r}. torch {torch.__version__} knows {', '.join(known)}.")
    on = [name for name, value in known[mode].items() if "cudagraph" in name and value]
    if on and threading.current_thread() is not threading.main_thread():
        raise UserError(
            f"Compile mode {mode!r} turns {on[0]} on, which is not used in worker threads (here "
            f"{threading.current_thread().name}): CUDAGraph Trees keep state by thread. Use policy captured, which "
            "captures the compiled step itself."
        )


def warm_compiler(device: str) -> None:
    """Compile something trivial for the device in the main thread, before roles start.

    The first code generation of inductor traces a module once, which patches nn.Module for every thread.

    Raises:
        UserError: the folder for compiled code cannot be written to.
    """
    keep_compiled_code()
    if not _LIMIT_IS_PASSED:  # settings are the process's there, so what is set here reaches every thread
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
    torch.compile(_trivial, dynamic=False, options=OPTIONS)(torch.ones(8, device=device))


def keep_compiled_code() -> None:
    """Let inductor keep what it compiles in the cache folder, so that a restart finds it; its own place is /tmp.

    A folder that the user names in TORCHINDUCTOR_CACHE_DIR stays.

    Raises:
        UserError: the folder cannot be written to.
    """
    from torch._inductor.runtime.runtime_utils import default_cache_dir  # type: ignore[attr-defined]

    folder = cache_folder() / "inductor"
    # torch itself writes its own place there as soon as some of its modules are imported.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) != default_cache_dir():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"The folder for compiled code, {folder}, cannot be written to ({error.strerror}). Name another cache "
            "folder in PACELINE_CACHE."
        ) from error
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _trivial(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1
