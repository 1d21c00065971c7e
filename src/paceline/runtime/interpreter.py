"""How long a thread that wants the interpreter waits for one that does not let go of it by itself."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

# A tenth of Python's own. What that does for a step beside a busy thread is in benchmarks/log.md.
_HANDOVER_S = 0.0005


@contextmanager
def quick_handovers() -> Iterator[None]:
    """Let no role wait long for the interpreter, of this whole process, while the block lasts.

    torch lets go of it in every operation. Where another thread computes in Python alone, the role has it back only
    when that is asked to let go, by default after 5 ms: at every operation.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_HANDOVER_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
