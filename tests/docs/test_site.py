"""The built site has every command, setting and module, and loads nothing from elsewhere.

`make docs` builds it first.
"""

import html
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from documented import PAGES, ROOT

from paceline import blocks, cli
from paceline.config import RunSettings, Section

pytestmark = pytest.mark.docs

SITE = ROOT / "site"


def text_of(place: str) -> str:
    """The words of a page, without markup."""
    path = SITE / place
    assert path.is_file(), f"There is no {path}: run `make docs`."
    words = re.sub(r"<(script|style)\b.*?</\1>|<[^>]+>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(words).split())


def plain(said: str | None) -> str:
    """What was written in Markdown, as a page shows it."""
    return " ".join((said or "").replace("`", "").split())


def test_every_page_is_built() -> None:
    for page in PAGES[1:]:
        assert (SITE / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page


def test_every_setting_is_explained() -> None:
    told = text_of("reference/settings.html")
    for name, field in RunSettings.model_fields.items():
        fields = {name: field}
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            fields = field.annotation.model_fields
            assert plain((field.annotation.__doc__ or "").splitlines()[0]) in told
        for key, one in fields.items():
            assert f"{key} " in told
            assert plain(one.description) in told, key


def test_every_command_and_option_is_explained() -> None:
    told, group = text_of("reference/commands.html"), typer.main.get_command(cli.app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        verbs: dict[str, Any] = getattr(command, "commands", {name: command})
        for verb, one in verbs.items():
            assert f"paceline {name} {verb}" in told if verb != name else f"paceline {name}" in told
            for parameter in one.params:
                assert plain(parameter.help) in told, (verb, parameter.name)
                assert all(option in told for option in parameter.opts if option.startswith("--"))


def test_docstrings_are_there() -> None:
    told = text_of("reference/python/blocks.html")
    for name, one in vars(blocks).items():
        if getattr(one, "__module__", "") == blocks.__name__:
            assert name in told
            assert plain(one.__doc__).split(". ")[0] in told, name


def test_nothing_is_loaded_from_elsewhere() -> None:
    for page in SITE.rglob("*.html"):
        for tag in re.findall(r"<(?:script|img|iframe|link)\b[^>]*>", page.read_text(encoding="utf-8")):
            assert not re.search(r"(src|href)=[\"']?(https?:)?//", tag) or "canonical" in tag, (page, tag)


def test_links_between_pages_lead_somewhere() -> None:
    """mkdocs is strict about Markdown's links; these are the built ones, those that the theme adds among them."""
    checked = 0
    for page in SITE.rglob("*.html"):
        for target in re.findall(r"href=\"([^\"#?:]+)(?:#[^\"]*)?\"", page.read_text(encoding="utf-8")):
            path = SITE / target.lstrip("/") if target.startswith("/") else Path(page.parent, html.unescape(target))
            assert path.exists(), (page, target)
            checked += 1
    assert checked > 1000
