"""What a version of torch should show, from its sources and from measurements.

A version is (major, minor). None: nobody has established what that version does.
"""

import re

Version = tuple[int, int]


def parse(text: str) -> Version | None:
    """Return (major, minor) of a version such as 2.13.0+cpu."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def nothing(version: Version, gpu: bool) -> str | None:
    """Return that nothing is known."""
    return None


def graph_trees(version: Version, gpu: bool) -> str | None:
    """Graph trees keep their state in the thread that imported them up to 2.12; each thread gets its own from 2.13."""
    return "works" if version >= (2, 13) else "fails"


def mode_with_graphs(version: Version, gpu: bool) -> str | None:
    """A mode with CUDA graphs needs that state; on a CPU it leaves the graphs out."""
    return graph_trees(version, gpu) if gpu else "works"


def mode_without_graphs(version: Version, gpu: bool) -> str | None:
    """A mode without CUDA graphs is an ordinary compile."""
    return "works"


def settings(version: Version, gpu: bool) -> str | None:
    """Settings of dynamo and inductor are context variables from 2.12."""
    return "not inherited" if version >= (2, 12) else "inherited"


def is_compiling(version: Version, gpu: bool) -> str | None:
    """A flag of the process says that some thread compiles, from 2.13."""
    return "leaks" if version >= (2, 13) else "does not leak"


def modules(version: Version, gpu: bool) -> str | None:
    """Symbolic tracing patches nn.Module for the whole process, at least up to 2.14."""
    return "fails" if version <= (2, 14) else None


def flex_attention(version: Version, gpu: bool) -> str | None:
    """The CPU has no backward, at least up to 2.14."""
    if gpu:
        return "forward and backward"
    return "forward only" if version <= (2, 14) else None
