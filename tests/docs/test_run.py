"""The commands of README and docs do what their page says, on a tiny target: each is run as it stands there.

`docs/index.md` is followed from top to bottom first. Every other command is then run in a copy of what that left,
without what it is to write. Only RUN.yaml is another than a reader's: shapes are small. What cannot be run here has a
reason.
"""

import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from documented import ROOT, Command, commands
from safetensors.torch import load_file, save_file

from paceline import cli

pytestmark = pytest.mark.docs

START = "docs/index.md"
NOT_HERE = {  # what keeps a command from being run by these tests → where else it is
    r"paceline demo": "CI runs `make demo`",
    r"paceline doctor": "takes minutes; `make test-wheel` runs its probes",
    r"ssh://|--via ": "another machine; tests/system has one",
    r" --web": "serves until Ctrl-C; tests/observe has it",
    r" --server ": "a server; tests/decode and tests/recipes imitate one",
    r"cuda:": "GPUs",
    r"Qwen/Qwen3-8B ": "a hub",
    r"bench (step|target|pipeline) .*qwen3-8b": "a GPU; tests/bench measures small shapes",
    r"gsm8k": "a package of prompts, which tests/data imitates",
    r"observe\.trackers": "trackers; `make test-trackers` has them",
    r"train recipes/": "a target of its size",
    r" --memory ": "sizes that fit tiles; tests/recipes has them",
}
SMALL = {
    "layers": 1,
    "block_size": 4,
    "context_slots": 600,
    "anchor_slots": 32,
    "anchors_per_sample": 8,
    "epochs": 2,
    "align": 8,
    "dtype": "float32",
    "held_out": "held-out",
}
TEMPLATE = (  # with a switch for thinking, and a token that ends a turn
    "{% if enable_thinking is defined and enable_thinking %}w5 {% endif %}{% for m in messages %}{{ m['content'] }}"
    "{{ ' <eos> ' if m['role'] == 'assistant' else ' ' }}{% endfor %}"
)
GROUP: Any = typer.main.get_command(cli.app)
ALL = list({command.words: command for command in commands()}.values())
OTHERS = [command for command in ALL if command.page != START]


def why_not(command: Command) -> str | None:
    return next((reason for pattern, reason in NOT_HERE.items() if re.search(pattern, f"{command.text} ")), None)


def run(words: tuple[str, ...] | list[str]) -> str:
    """Run a command in this process and return what it printed; it must end well."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", [str(word) for word in words])
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
    assert status == 0, (words, out.getvalue(), err.getvalue())
    return out.getvalue()


def made_small(path: Path) -> None:
    """Rewrite the lines of a RUN.yaml whose keys are in SMALL."""
    text = path.read_text()
    for key, value in SMALL.items():
        text, count = re.subn(rf"(?m)^  {key}: \S+  #", f"  {key}: {value}  #", text)
        assert count, key
    path.write_text(text)


def write_prompts(path: str, first: int, count: int, **more: Any) -> None:
    rows = [{"prompt": f"w{at} w{at + 1} w{at + 3}", **more} for at in range(first, first + count)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The folder of somebody who followed the start page, with what other pages' commands take beside it."""
    place = tmp_path_factory.mktemp("docs")
    shutil.copytree(tiny_folder, place / "my-model")
    config = json.loads((place / "my-model" / "config.json").read_text())
    config["max_position_embeddings"] = 600  # so that completions are short
    (place / "my-model" / "config.json").write_text(json.dumps(config))
    (place / "my-model" / "chat_template.jinja").write_text(TEMPLATE)
    weights = load_file(place / "my-model" / "model.safetensors")
    weights["lm_head.weight"][2:4] = 0  # no text of it ends at once or holds the mask token
    save_file(weights, place / "my-model" / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(ROOT / "recipes", place / "recipes")
    with contextlib.chdir(place):
        write_prompts("prompts.jsonl", 10, 16)
        write_prompts("held-out.jsonl", 70, 1)  # decoding takes most of the time
        write_prompts("conversations.jsonl", 90, 8, completion=" ".join(f"w{at}" for at in range(30, 50)))
        _prepared("held-out.jsonl", "held-out-completions", "held-out")
        _follow(START)
        for name in ("code", "chat"):
            run(["paceline", "prepare", "conversations.jsonl", "--out", name, "--settings", "RUN.yaml"])
        for name in ("runs/second", "OTHER_RUN", "RUN"):
            shutil.copytree("runs/first", name)
        shutil.copytree("drafter", "their-drafter")
        shutil.copy("held-out.jsonl", "PROMPTS")
    return place


def _prepared(prompts: str, completions: str, dataset: str) -> None:
    target = ["--target", "my-model"]
    run(["paceline", "generate", prompts, "--out", completions, *target])
    run(["paceline", "prepare", completions, "--out", dataset, *target, "--mask-token-id", "3"])


def _follow(page: str) -> None:
    for command in commands():
        if command.page != page or why_not(command):
            continue
        words = list(command.words)
        if "--resume" in words:
            shutil.rmtree("runs/first/drafter")  # as if it had been killed before its end
        run(words)
        if words[1] == "init":
            made_small(Path("RUN.yaml"))


@pytest.fixture
def here(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it."""
    shutil.copytree(finished, tmp_path / "copy")
    with contextlib.chdir(tmp_path / "copy"):
        yield tmp_path / "copy"


def test_the_start_page_can_be_followed(finished: Path) -> None:
    for made in ("RUN.yaml", "completions", "dataset", "runs/first/drafter", "runs/first/report.html", "drafter"):
        assert (finished / made).exists(), made
    evaluation = json.loads((finished / "runs/first/evaluation.json").read_text())
    assert evaluation["lossless"] is True


def _outputs(command: Command) -> list[Path]:
    """What a command will write, by its own options."""
    name, words = command.words[1], list(command.words[2:])
    found = GROUP.commands[name].make_context(name, words).params
    wanted = [found.get("out"), found.get("output")]
    if name == "init" or (name == "prepare" and found.get("settings")):
        wanted += [Path("RUN.yaml") if name == "init" else Path("dataset")]
    if name == "export":
        wanted += [Path("runs/first/export"), Path("runs/first/export-speculators")]
    if name == "train":
        wanted += [Path("runs/first/drafter")] if found["resume"] else [Path("runs/first")]
    return [path for path in wanted if path is not None]


@pytest.mark.parametrize("command", [one for one in OTHERS if not why_not(one)], ids=lambda command: command.text)
def test_a_documented_command_works(command: Command, here: Path) -> None:
    for path in _outputs(command):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    run(command.words)
    for path in _outputs(command):
        assert path.exists() or path.name.startswith("export"), path


def test_every_reason_is_used() -> None:
    """And not so many commands are left out that little is left."""
    left_out = [command for command in ALL if why_not(command)]
    assert len(left_out) < len(ALL) / 2
    for pattern in NOT_HERE:
        assert any(re.search(pattern, f"{command.text} ") for command in left_out), pattern
