"""What CONTRIBUTING.md says of the sizes of source files and functions."""

import ast
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_stay_under_400_lines_and_recipes_under_200() -> None:
    assert len(FILES) > 100
    most = {path: 200 if path.parent.name == "recipes" else 400 for path in FILES}
    assert {str(path): lines(path) for path in FILES if lines(path) > most[path]} == {}


def test_functions_stay_under_100_lines() -> None:
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{path.name}: {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert {name: size for name, size in found.items() if size > 100} == {}
