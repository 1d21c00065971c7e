"""Pages that the site has of the program itself: every command, every setting, every module; and the lab book. A hook
of mkdocs.

Made anew at each build, so they are in no commit. Nothing here loads torch: modules are read, not imported.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LAB_BOOK = ROOT / "benchmarks" / "log.md"
sys.path.insert(0, str(ROOT / "src"))  # what is built is what lies here, not what is installed

import typer.main  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402

from paceline.cli import app  # noqa: E402
from paceline.config import RunSettings, Section  # noqa: E402
from paceline.config_file import VERSION  # noqa: E402


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to those that mkdocs found."""
    pages = {"reference/commands.md": commands(), "reference/settings.md": settings(), **modules()}
    pages["lab-book.md"] = LAB_BOOK.read_text(encoding="utf-8")
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to the lab book, which lies outside of this folder, lead to its page."""
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\((\.\./)+benchmarks/log\.md", f"]({up}lab-book.md", markdown)


def commands() -> str:
    """Return the page of all commands: what each is for, its usage, its arguments and options."""
    group: Any = typer.main.get_command(app)
    parts = ["# Commands\n\nWhat `paceline VERB --help` says, of the version that this site was built from."]
    for name, command in sorted(group.commands.items()):
        inner = sorted(getattr(command, "commands", {}).items())
        parts += [_command(f"{name} {verb}", one) for verb, one in inner] or [_command(name, command)]
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=f"paceline {name}")
    records = [(one.param_type_name, *one.get_help_record(context)) for one in command.params]
    lines = [f"## paceline {name}", "", _text(command.help), "", f"    {command.get_usage(context)}"]
    for kind, title in (("argument", "Argument"), ("option", "Option")):
        own = [(left, right) for found, left, right in records if found == kind]
        if own:
            lines += ["", f"| {title} | |", "| --- | --- |"]
            lines += [f"| {_code(left)} | {_cell(right)} |" for left, right in own]
    return "\n".join(lines)


def settings() -> str:
    """Return the page of all settings: key, values, default and meaning, a section each."""
    lines = [
        "# Settings",
        "",
        f"The keys of a RUN.yaml, version {VERSION}. `paceline init` writes them all; those with a",
    ]
    lines += ["default may be left out, and `paceline train RUN.yaml section.key=value` changes one for a run.", ""]
    schema = RunSettings.model_json_schema()
    for name, field in RunSettings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            lines += [f"## {name}", "", (section.__doc__ or "").splitlines()[0], ""]
            lines += ["| key | values | default | what it is |", "| --- | --- | --- | --- |"]
            lines += [_setting(key, one) for key, one in schema["$defs"][section.__name__]["properties"].items()]
            lines.append("")
        else:
            lines += ["| key | values | default | what it is |", "| --- | --- | --- | --- |"]
            lines += [_setting(name, schema["properties"][name]), ""]
    return "\n".join(lines)


def _setting(name: str, one: dict[str, Any]) -> str:
    default = _code(_plain(one["default"])) if "default" in one else "required"
    return f"| `{name}` | {_cell(', or '.join(_values(one)))} | {default} | {_cell(one['description'])} |"


_TYPES = {"string": "text", "integer": "whole number", "number": "number", "null": "null", "array": "list"}
_BOUNDS = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "exclusiveMaximum": "below {}"}


def _values(one: dict[str, Any]) -> Iterator[str]:
    """Yield what a setting may be, out of its JSON schema."""
    if "anyOf" in one:
        for other in one["anyOf"]:
            yield from _values(other)
    elif "enum" in one or "const" in one:
        yield ", ".join(f"`{value}`" for value in one.get("enum", [one.get("const")]))
    elif one["type"] == "array":
        inner = one.get("items") or one.get("prefixItems", [{}])[0]
        yield "list of " + ", or ".join(_values(inner)) if inner else "list"
    else:
        bounds = [text.format(_number(one[key])) for key, text in _BOUNDS.items() if key in one]
        yield " ".join([_TYPES[one["type"]], *bounds])


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    return f"2^{power}" if value == 2**power and power > 15 else f"{value:,.6g}" if value < 1e6 else f"{value:,.0f}"


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).replace("'", "")


def modules() -> dict[str, str]:
    """Return a page for each package and module right below paceline, which mkdocstrings fills with docstrings."""
    found = {}
    for path in sorted((ROOT / "src" / "paceline").iterdir()):
        name = path.stem
        if not name.startswith(("_", "cli")) and (path.suffix == ".py" or (path / "__init__.py").is_file()):
            found[f"reference/python/{name}.md"] = f"# paceline.{name}\n\n::: paceline.{name}\n"
    return found


def _text(said: str) -> str:
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", said.strip())


def _cell(said: str) -> str:
    """Return text for a cell of a table: on one line, its bars and angles no syntax."""
    return " ".join(said.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def _code(said: str) -> str:
    return f"`{' '.join(said.split())}`".replace("|", "\\|")
