"""The built wheel in an empty environment: what it holds, that it works alone, and that errors name what it lacks.

`make test-wheel` builds it, installs it with nothing but what it asks for, and names that environment's Python in
PACELINE_WHEEL_PYTHON. Commands run there, outside the repository.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import __version__
from paceline.config_file import load_settings
from paceline.observe.reading import read_events

pytestmark = pytest.mark.wheel

ROOT = Path(__file__).parents[2]
EXTRAS = {"demo", "quantized", "sets", "tensorboard", "wandb", "mlflow", "trackio", "web", "report"}
PROBES = ("torch", "cores-and-memory", "limits")
DOCTOR = f"""
import json
from paceline.probe.entries import BY_NAME
from paceline.probe.examine import examine
from paceline.probe.finding import Bench
bench = Bench(devices=0, cache="cache", runs="runs", scratch=".")
entries = [BY_NAME[name] for name in {PROBES!r}]
print(json.dumps({{one.name: one.verdict for one in examine(bench, lambda entry: None, entries)}}))
"""
METADATA = """
import json, paceline
from importlib.metadata import distribution, distributions
found = distribution("paceline")
print(json.dumps({
    "place": paceline.__file__,
    "files": sorted(str(file) for file in found.files),
    "extras": found.metadata.get_all("Provides-Extra"),
    "installed": sorted({one.metadata["Name"].lower() for one in distributions()}),
}))
"""
Ran = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python of the environment with the wheel."""
    named = os.environ.get("PACELINE_WHEEL_PYTHON")
    assert named, "PACELINE_WHEEL_PYTHON names no Python: run `make test-wheel`."
    return Path(named)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder far from the repository."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def call(python: Path, place: Path) -> Callable[..., Ran]:
    """Return a function that runs a program of the environment there, as a person without our variables would."""

    def run(program: str, *arguments: object) -> Ran:
        told = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACELINE"))}
        told |= {"PACELINE_CACHE": str(place / "cache"), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
        command = [str(python.with_name(program)), *map(str, arguments)]
        return subprocess.run(command, cwd=place, env=told, capture_output=True, text=True, timeout=240)

    return run


@pytest.fixture(scope="module")
def paceline(call: Callable[..., Ran]) -> Callable[..., Ran]:
    """Return a function that runs a verb and gives what came of it, which must be good."""

    def run(*arguments: object) -> Ran:
        done = call("paceline", *arguments)
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def metadata(call: Callable[..., Ran]) -> dict[str, Any]:
    done = call("python", "-c", METADATA)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_holds_the_package_and_nothing_else(metadata: dict[str, Any], python: Path) -> None:
    assert Path(metadata["place"]).is_relative_to(python.parents[1])  # not the repository's
    tracked = subprocess.run(["git", "ls-files", "src/paceline"], cwd=ROOT, capture_output=True, text=True, check=True)
    package = {file for file in metadata["files"] if file.startswith("paceline/") and not file.endswith(".pyc")}
    assert package == {line.removeprefix("src/") for line in tracked.stdout.splitlines()}
    others = {file for file in metadata["files"] if not file.startswith("paceline/")}
    assert "../../../bin/paceline" in others
    assert any(file.endswith("licenses/LICENSE") for file in others)
    assert all(".dist-info/" in file for file in others - {"../../../bin/paceline"})


def test_its_environment_has_no_extra(metadata: dict[str, Any]) -> None:
    assert set(metadata["extras"]) == EXTRAS | {"dev"}
    assert not {"plotly", "starlette", "gguf", "pytest", "mkdocs", "accelerate"} & set(metadata["installed"])


def test_it_answers(paceline: Callable[..., Ran]) -> None:
    assert paceline("--version").stdout == f"paceline {__version__}\n"
    assert "Usage: paceline" in paceline("--help").stdout


def test_the_doctor_s_probes_run(call: Callable[..., Ran]) -> None:
    """Each in a process of its own that the environment's Python starts; all of them take minutes."""
    done = call("python", "-c", DOCTOR)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    assert set(verdicts) == set(PROBES)
    assert verdicts["torch"] == "ok"


@pytest.fixture(scope="module")
def trained(paceline: Callable[..., Ran], place: Path, tiny_folder: Path) -> Path:
    """A run of two steps, from prompts on."""
    rows = [{"prompt": f"w{10 + at} w{40 + at} w9"} for at in range(8)]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = ("--target", tiny_folder)
    paceline("generate", "prompts.jsonl", "--out", "done", *target, "--max-new-tokens", "24", "--device", "cpu")
    paceline("prepare", "done", "--out", "dataset", *target, "--mask-token-id", "3", "--max-quarantined", "0.9")
    paceline("init", *target, "--run-dir", "run")
    shape = ["drafter.layers=1", "drafter.block_size=4", "train.context_slots=128", "train.anchor_slots=32"]
    shape += ["train.anchors_per_sample=8", "train.max_steps=2", "target.dtype=float32", "pipeline.targets=[cpu]"]
    paceline("train", "RUN.yaml", *shape, "pipeline.drafters=[cpu]", "train.policy=eager")
    config = json.loads((shutil.copytree(tiny_folder, place / "four-bits") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (place / "four-bits" / "config.json").write_text(json.dumps(config))
    return place / "run"


def test_it_trains_and_exports(paceline: Callable[..., Ran], trained: Path, place: Path) -> None:
    assert load_settings(place / "RUN.yaml").drafter.mask_token_id == 3
    (done,) = (event for event in read_events(trained) if event["event"] == "trained")
    assert done["train_steps"] == 2
    paceline("export", "run", "--out", "export", "--format", "all")
    assert (place / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("report", ["report", "run"]),
        ("web", ["watch", "run", "--web"]),
        ("demo", ["demo"]),
        ("quantized", ["init", "--target", "four-bits", "--out", "other"]),
        ("sets", ["evaluate", "run", "humaneval"]),
        *(
            (name, ["train", "RUN.yaml", "run_dir=other", f"observe.trackers=[{name}]"])
            for name in ("tensorboard", "wandb", "mlflow", "trackio")
        ),
    ],
)
def test_what_needs_an_extra_names_it(
    call: Callable[..., Ran], trained: Path, place: Path, extra: str, arguments: list[str]
) -> None:
    done = call("paceline", *arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"pip install 'paceline[{extra}]'" in done.stderr
    assert not (place / "cache" / "smollm2").exists()  # nothing was fetched first
    assert not (place / "other").exists()


def test_every_extra_is_named_by_an_error() -> None:
    (mark,) = (mark for mark in test_what_needs_an_extra_names_it.pytestmark if mark.name == "parametrize")
    assert {extra for extra, _ in mark.args[1]} == EXTRAS
