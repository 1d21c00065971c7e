"""RUN.yaml: settings read from it, with overrides, and written back in full; errors are one sentence a key.

Free of torch, as config is.
"""

import difflib
import re
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline import __version__
from paceline.config import RunSettings, Section
from paceline.records import UserError

# Of the keys in a file. So far keys have only ever been added, so files without a version, which were written before
# there was one, are read as version 1. Whoever renames or removes a key counts up and translates older files here.
VERSION: Final = 1


def load_settings(path: Path, overrides: list[str] | None = None) -> RunSettings:
    """Return the settings of RUN.yaml with `section.key=value` overrides applied.

    Raises:
        UserError: the file or an override is missing, malformed, unknown or out of range.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise UserError(f"There is no settings file {path}. Write one with `paceline init`.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}. Check the file.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(_malformed(path, error)) from None
    if not isinstance(tree, dict):
        raise UserError(
            f"{path} must hold a mapping of settings, found {type(tree).__name__}. Write one with `paceline init`."
        )
    _check_version(tree.pop("version", VERSION), path)
    origin = {}
    for text in overrides or []:
        origin[_apply_override(tree, text)] = text
    try:
        return RunSettings.model_validate(tree)
    except ValidationError as error:
        raise UserError(explain(error, path, origin)) from None


def dump_settings(settings: RunSettings) -> str:
    """Return RUN.yaml's text: every key, each under a comment that says what it means."""
    lines = [f"version: {VERSION}  # of these keys; a paceline that knows only older ones refuses the file"]
    for name, field in RunSettings.model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, Section):
            lines += ["", f"{name}:  # {(type(value).__doc__ or '').splitlines()[0].rstrip('.')}"]
            lines += [
                f"  {key}: {dump_value(getattr(value, key))}  # {info.description}"
                for key, info in type(value).model_fields.items()
            ]
        else:
            lines.append(f"{name}: {dump_value(value)}  # {field.description}")
    return "\n".join(lines) + "\n"


def _check_version(found: Any, path: Path) -> None:
    """Refuse a file whose keys may mean what this program does not know."""
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise UserError(
            f"version must be a whole number from 1 up, got {repr(found)[:80]} (in {path}). `paceline init` writes "
            f"version: {VERSION}."
        )
    if found > VERSION:
        raise UserError(
            f"version must be at most {VERSION}, which is what paceline {__version__} knows, got {found} (in {path}): "
            "a newer paceline wrote this file. Use that one, or write the file anew with `paceline init`."
        )


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.2's scalars: `off` is a word, 2e-3 a number, a date a text. A repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    problem = f"{key.value} is given twice"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
                names.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what _Loader reads: a text is in quotes where it would be taken for something else."""


for _kind in (_Loader, _Dumper):
    _kind.yaml_implicit_resolvers = {}  # not the parent's, which are YAML 1.1's
    for _tag, _pattern, _first in (
        ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
        ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
        ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def dump_value(value: Any) -> str:
    """Return a value as it is written behind its key, in RUN.yaml or on the command line."""
    plain = list(value) if isinstance(value, tuple) else value
    style = '"' if any("\n" in str(item) for item in (plain if isinstance(plain, list) else [plain])) else None
    text = yaml.dump(plain, Dumper=_Dumper, default_flow_style=True, default_style=style, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _apply_override(tree: dict[str, Any], text: str) -> str:
    key, sep, raw = text.partition("=")
    fields = _fields()
    if not sep or not key:
        raise UserError(f"An override has the form section.key=value, got {text!r}.")
    if key not in fields:
        raise UserError(f"Unknown setting {key} (in override {text!r}).{_suggest(key)}")
    inside = [name for name in fields if name.startswith(f"{key}.")]
    if inside:
        raise UserError(f"An override sets one key, got the section {key} in {text!r}. Write {inside[0]}=value.")
    *sections, leaf = key.split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise UserError(f"Override {text!r} treats {section} as a section, but it is a value.")
        node = child
    is_text = fields[key] in (str, str | None) or (key == "data.dataset" and not raw.startswith("["))
    node[leaf] = _value(text, raw, is_text=is_text)
    return key


def _value(text: str, raw: str, *, is_text: bool) -> Any:
    if is_text and raw not in ("", "~", "null") and raw[0] not in "\"'":
        return raw  # whatever it looks like: revision 12e4567 is no number
    try:
        return yaml.load(raw, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UserError(
            f"The value of override {text[:200]!r} is not valid YAML. Write a number, word or list."
        ) from None


def _malformed(path: Path, error: Exception) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    place = f"{path}:{mark.line + 1}" if mark else str(path)
    reason = error.problem if mark and isinstance(error, yaml.MarkedYAMLError) else error
    return f"{place} is not valid YAML: {' '.join(str(reason).split())}. Correct the file."


def explain(error: ValidationError, path: Path | str, origin: dict[str, str]) -> str:
    """Return what is wrong with settings from `path` and, by key, from the overrides `origin`."""
    sentences: dict[str, str] = {}  # one a key, the first: what follows from it is not told
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"] if not isinstance(part, int))
        sentences.setdefault(key, _sentence(item, key, path, origin))
    return " ".join(sentences.values())


_RULES = {  # pydantic speaks of Python's types
    "missing": "must have more items",
    "string_type": "must be a text, in quotes where it looks like a number",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list such as [a, b]",
    "model_type": "must be a section of keys",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
}


def _sentence(item: ErrorDetails, key: str, path: Path | str, origin: dict[str, str]) -> str:
    where = f"in override {origin[key]!r}" if key in origin else f"in {path}"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return f"Unknown setting {key} ({where}).{_suggest(key)}"
    if item["type"] == "missing" and item["loc"][-1] == key.rpartition(".")[2]:
        return f"Setting {key} is required and missing in {path}. Add it; `paceline init` writes every setting."
    if item["type"] == "value_error":  # a rule about several keys of a section; its message begins with one of them
        named = [repr(text) for name, text in origin.items() if re.search(rf"\b{name.rpartition('.')[2]}\b", message)]
        override = f" with override {', '.join(named)}" if named else ""
        return f"{key}{'.' * bool(key)}{message} ({where}{override})."
    at = "".join(f"[{part}]" for part in item["loc"] if isinstance(part, int) and item["type"] != "missing")
    rule = _RULES.get(item["type"]) or message.replace("Input should be", "must be").replace(
        "Tuple should have", "must have"
    ).replace(" after validation", "")
    return f"{key}{at} {rule}, got {repr(item['input'])[:80]} ({where})."


def _suggest(key: str) -> str:
    known = list(_fields())
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if not near:
        leaf = key.rsplit(".", 1)[-1]
        near = [name for name in known if name.rsplit(".", 1)[-1] == leaf][:1]
    return f" Did you mean {near[0]}?" if near else " `paceline init` writes a file with every setting."


def _fields() -> dict[str, Any]:
    """Return every dotted key of a RUN.yaml, a section's keys before the section, and what its type is."""
    fields: dict[str, Any] = {}
    for name, field in RunSettings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            fields |= {f"{name}.{key}": info.annotation for key, info in section.model_fields.items()}
        fields[name] = section
    return fields
