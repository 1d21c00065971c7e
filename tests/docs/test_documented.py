"""Every command that README and docs show is one: the real parser takes it, and its settings are settings."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from documented import PAGES, ROOT, Command, commands, mentioned

from paceline import cli
from paceline.config import RunSettings
from paceline.config_file import load_settings

GROUP: Any = typer.main.get_command(cli.app)
COMMANDS = list({command.words: command for command in commands()}.values())


def parsed(words: tuple[str, ...]) -> Any:
    """What the parser makes of a command's words; nothing is run."""
    command, name, rest = GROUP, "paceline", list(words[1:])
    while hasattr(command, "commands") and rest and rest[0] in command.commands:
        name, command = rest[0], command.commands[rest[0]]
        rest = rest[1:]
    return command.make_context(name, rest)


def test_commands_are_found() -> None:
    pages = {command.page for command in commands()}
    assert {"README.md", "docs/index.md", "docs/watch.md", "docs/how-to/serve.md"} <= pages
    assert len(COMMANDS) > 40
    assert len(mentioned()) > 50
    assert {command.words[1] for command in COMMANDS} >= set(GROUP.commands) - {"bench"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text)
def test_the_parser_takes_a_documented_command(command: Command, tmp_path: Path) -> None:
    found = parsed(command.words).params
    if overrides := found.get("overrides"):
        load_settings(_some_settings(tmp_path), overrides)


def _some_settings(place: Path) -> Path:
    preset = yaml.safe_load((ROOT / "recipes" / "qwen3-8b.yaml").read_text())
    (place / "RUN.yaml").write_text(yaml.safe_dump(preset))
    return place / "RUN.yaml"


@pytest.mark.parametrize("command", mentioned(), ids=lambda command: " ".join((*command.words, "of", command.page)))
def test_a_verb_has_the_options_that_a_sentence_gives_it(command: Command) -> None:
    verb = command.words[1]
    if verb == "VERB":  # any
        return
    one = GROUP if verb.startswith("-") else GROUP.commands[verb]
    if verb == "bench" and len(command.words) > 2:
        one = one.commands[command.words[2]]
    options = {
        "--help",
        *(option for parameter in one.params for option in (*parameter.opts, *parameter.secondary_opts)),
    }
    assert {word for word in command.words if word.startswith("--")} <= options


def test_settings_that_pages_name_are_settings() -> None:
    """In backticks, `section.key`; files and modules of these names are told apart by what they end in."""
    sections = {name: one.annotation for name, one in RunSettings.model_fields.items() if name != "run_dir"}
    wrong = []
    for page in PAGES:
        for section, key in re.findall(r"`([a-z]+)\.([a-z_]+)[:=`\s]", page.read_text(encoding="utf-8")):
            fields = getattr(sections.get(section), "model_fields", None)
            if fields is not None and key not in fields and key not in ("py", "json", "speculate"):
                wrong.append(f"{page.name}: {section}.{key}")
    assert not wrong


def test_every_page_is_in_the_site() -> None:
    """mkdocs is strict about it too; this needs no environment of its own."""
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]

    def places(node: Any) -> list[str]:
        return [node] if isinstance(node, str) else [place for one in node for place in places(_inside(one))]

    def _inside(one: Any) -> Any:
        return next(iter(one.values())) if isinstance(one, dict) else one

    listed = places(navigation)
    assert {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]} <= set(listed)
    modules = {
        path.stem for path in (ROOT / "src/paceline").iterdir() if not path.name.startswith(("_", "cli", "py.typed"))
    }
    assert {place for place in listed if "python/" in place} == {f"reference/python/{name}.md" for name in modules}
