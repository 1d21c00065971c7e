"""The commands in README and docs, as they stand there."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A `paceline` command of a page, in words as a shell would split it."""

    page: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The command as it could be typed."""
        return shlex.join(self.words)


def commands() -> list[Command]:
    """Return every command in a block of a page, fenced or indented; a line that goes on is one."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        blocks = [block for _, block in _FENCE.findall(text)]
        blocks.append("\n".join(line for line in _FENCE.sub("", text).splitlines() if line.startswith("    ")))
        for block in blocks:
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip().startswith("paceline "):
                    words = shlex.split(line.strip(), comments=True)
                    found.append(Command(str(page.relative_to(ROOT)), tuple(words)))
    return found


def mentioned() -> list[Command]:
    """Return what the pages' sentences name in backticks, from `paceline` on; often a verb and an option alone."""
    found = []
    for page in PAGES:
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        for inside in re.findall(r"`(paceline [^`]+)`", text):
            found.append(Command(str(page.relative_to(ROOT)), tuple(inside.split())))
    return found
