"""The verbs as a person types them: what they print, their exit status, and that a refusal changes nothing on disk."""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer.main
from safetensors.torch import load_file
from transformers import PreTrainedModel

from paceline import __version__, cli
from paceline.cli_options import finish, read_template_arg
from paceline.config import DrafterSettings, RunSettings
from paceline.config_file import dump_settings, load_settings
from paceline.data.completions import shard_files
from paceline.data.store import open_dataset
from paceline.observe.console import Console
from paceline.observe.reading import read_events
from paceline.records import PacelineError, RunError, UserError

GROUP = typer.main.get_command(cli.app)
VERBS = sorted(GROUP.commands)  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class Ended:
    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What standard output holds, which must be JSON and nothing else."""
        assert self.status == 0, self.stderr
        return json.loads(self.stdout)


def paceline(*arguments: object) -> Ended:
    """Run the command line in this process."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        patch.setenv("COLUMNS", "80")
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
    return Ended(status, out.getvalue(), err.getvalue())


def on_disk(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, so that messages name files without a path."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(here: Path) -> Callable[..., str]:
    """Return a runner that gives the one sentence of a refusal: status 2, no result on stdout, nothing changed."""

    def run(*arguments: object) -> str:
        before = on_disk(here)
        ended = paceline(*arguments)
        assert ended.status == 2, ended
        assert re.fullmatch(r"(  (dataset opened|planned) \(\d+\.\d s\)\n)*", ended.stdout), ended  # what went well
        assert on_disk(here) == before
        (line,) = ended.stderr.splitlines()
        assert line.startswith("error: ")
        assert line.endswith((".", "?"))
        return line.removeprefix("error: ")

    return run


def lines(path: str, *rows: object) -> Path:
    """Write a file of JSON lines; a row that is text is written as it is."""
    file = Path(path)
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def settings_for(folder: Path, shape: DrafterSettings, **changes: Any) -> RunSettings:
    """A run of the tiny target that takes a second. In float32 throughout, so that decoding is lossless."""
    tree = {
        "run_dir": "run",
        "target": {"model": str(folder), "dtype": "float32"},
        "drafter": shape.model_dump(),
        "data": {"dataset": "dataset", "align": 8, "max_batch": 4},
        "train": {"context_slots": 128, "anchor_slots": 32, "anchors_per_sample": 8, "dtype": "float32"},
    }
    return RunSettings.model_validate(tree | changes)


@pytest.fixture
def run_yaml(here: Path, tiny_folder: Path, shape: DrafterSettings) -> Path:
    Path("RUN.yaml").write_text(dump_settings(settings_for(tiny_folder, shape)))
    return Path("RUN.yaml")


# --- what every verb has


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_fits_80_columns(verb: str | None) -> None:
    ended = paceline(*([verb] if verb else []), "--help")
    assert (ended.status, ended.stderr) == (0, "")
    text = re.sub(r"\x1b\[[0-9;]*m", "", ended.stdout)
    assert max(map(len, text.splitlines())) <= 80
    if verb:
        assert f"Usage: paceline {verb} " in text
        assert "--json" in text or verb == "bench"  # whose commands have it
    else:
        assert all(f"│ {name} " in text for name in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_option_says_what_it_is(verb: str) -> None:
    command = GROUP.commands[verb]  # type: ignore[attr-defined]
    assert command.help.endswith(".")
    for parameter in command.params:
        assert getattr(parameter, "help", "help"), f"{verb} {parameter.name} has no help"


NO_REVISION = (
    "There is no folder Qwen/Qwen3-8B here. Give the target's folder, or with a hub id its commit (target.revision, "
    "--revision)."
)
ROOT = Path(__file__).parent.parent


def test_the_readme_opens_with_the_commands_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    ci = (ROOT / ".ci/run").read_text()
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", readme, flags=re.DOTALL)
    commands = [line.split("#")[0].strip() for line in blocks[0].splitlines() if line.strip()]
    assert commands == ["make demo", "make test"]
    shares = re.findall(r"^share \w+ \d+ (make [\w-]+)", ci, flags=re.MULTILINE)
    assert set(commands) <= set(shares)
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`", readme))
    assert named
    assert named <= targets
    assert set(re.findall(r"paceline ([a-z]+)", "\n".join(blocks))) <= set(VERBS)
    assert all(f"`paceline {verb}`" in readme for verb in VERBS)


def test_version() -> None:
    assert paceline("--version") == Ended(0, f"paceline {__version__}\n", "")


def test_without_a_verb_it_shows_help() -> None:
    ended = paceline()
    assert ended.status == 2
    assert "Usage: paceline" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["plam", "x"], "Did you mean 'plan'"),
        (["plan", "x", "--fast"], "No such option: --fast"),
        (["--fast"], "No such option: --fast"),
        (["plan"], "Missing argument"),
        (["train"], "Missing argument 'RUN.yaml'"),
        (["generate", "p.jsonl", "--out", "o"], "Missing option '--target'"),
        (["prepare", "--out", "o", "--target", "t"], "Missing argument"),
        (["evaluate", "run", "p", "--rows", "0"], "Invalid value for '--rows'"),
        (["evaluate", "run", "p", "--rows", "many"], "Invalid value for '--rows'"),
        (["export", "run", "--dtype", "fp16"], "Invalid value for '--dtype'"),
        (["plan", "x", "--seed", "-1"], "Invalid value for '--seed'"),
        (["plan", "x", "--seed", str(2**64)], "Invalid value for '--seed'"),
        (
            ["prepare", "x", "--out", "o", "--target", "t", "--mask-token-id", "-1"],
            "Invalid value for '--mask-token-id'",
        ),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(here: Path, arguments: list[str], words: str) -> None:
    ended = paceline(*arguments)
    assert (ended.status, ended.stdout) == (2, "")
    text = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─\n]", " ", ended.stderr)
    assert words in " ".join(text.split())
    assert "Traceback" not in ended.stderr
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("one\ntwo"), 2, "error: one two"),
        (RunError("it broke."), 1, "error: it broke."),
        (PacelineError("it broke."), 1, "error: it broke."),
        (OSError(28, "No space left on device", "a/b"), 1, "error: No space left on device: a/b"),
        (PermissionError(13, "Permission denied", "a/b"), 1, "error: Permission denied: a/b"),
        (NotADirectoryError(20, "Not a directory", "a/b"), 2, "error: Not a directory: a/b"),
        (FileExistsError(17, "File exists", "a/b"), 2, "error: File exists: a/b"),
    ],
)
def test_how_errors_end(monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, line: str) -> None:
    def fail(prog_name: str) -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert paceline() == Ended(status, "", line + "\n")


def test_ctrl_c_that_typer_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", app)
    assert paceline() == Ended(130, "", "error: interrupted\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_before_there_is_a_run_ends_as_one_that_stops_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = signal.getsignal(signal.Signals[name])

    def load(*_: object) -> None:
        with contextlib.suppress(Exception):  # as libraries do that try an import
            os.kill(os.getpid(), signal.Signals[name])
        raise AssertionError("goes on")

    monkeypatch.setattr(cli, "load_settings", load)
    line = f"stopped: {name} came while no step was under way, so nothing is lost. Start the same command again, with "
    assert paceline("train", "RUN.yaml") == Ended(75, "", line + "--resume if the run had begun.\n")
    assert signal.getsignal(signal.Signals[name]) is before


def test_a_fault_of_ours_shows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw is not dressed up as bad input."""

    def fail(prog_name: str) -> None:
        raise KeyError("x")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(KeyError):
        paceline()


def test_as_a_process(here: Path, tiny_folder: Path) -> None:
    """Nothing but the sentence: no traceback, and no warning of a library at import."""
    lines("p.jsonl", {"prompt": "w5"}, [1])
    arguments = ["generate", "p.jsonl", "--out", "c", "--target", str(tiny_folder), "--max-new-tokens", "9"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    sentence = 'error: p.jsonl:2 must be a JSON object with "prompt" or "messages", found list. At most 0 of 2 prompts '
    assert (done.returncode, done.stderr) == (2, f"{sentence}may be refused (--max-quarantined), 1 are.\n")
    assert [path.name for path in here.iterdir()] == ["p.jsonl"]


# --- the whole journey


@pytest.fixture(scope="module")
def journey(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, shape: DrafterSettings
) -> dict[str, tuple[Path, Ended]]:
    """Every verb once with --json, in one folder: the verb's name to (that folder, how it ended)."""
    place = tmp_path_factory.mktemp("journey")
    rng = np.random.default_rng(1)
    ended: dict[str, tuple[Path, Ended]] = {}

    def step(verb: str, *arguments: object) -> None:
        ended[verb] = place, paceline(verb, *arguments, "--json")
        assert ended[verb][1].status == 0, ended[verb][1].stderr

    with contextlib.chdir(place):
        rows = [{"prompt": " ".join(f"w{i}" for i in rng.integers(4, 128, 4))} for _ in range(16)]
        lines("prompts.jsonl", *rows)
        step("init", "--target", tiny_folder, "--dataset", "dataset", "--run-dir", "runs/a")
        common = ["--target", tiny_folder, "--overwrite"]
        step("generate", "prompts.jsonl", "--out", "done", *common, "--max-new-tokens", "24", "--device", "cpu")
        step(
            "prepare",
            "done",
            "--out",
            "dataset",
            *common,
            "--max-length",
            "64",
            "--mask-token-id",
            "3",
            "--max-quarantined",
            "0.9",
        )
        small = ["drafter.layers=1", "drafter.block_size=4", "train.context_slots=128", "train.anchor_slots=32"]
        small += ["train.anchors_per_sample=8", "train.max_steps=6", "train.log_every=2", "target.dtype=float32"]
        small += ["pipeline.targets=[cpu, cpu]", "pipeline.drafters=[cpu]", "data.max_batch=4"]
        step("plan", "RUN.yaml", *small)
        step("train", "RUN.yaml", *small)
        limits = ["--max-new-tokens", "12", "--timed-prompts", "1", "--device", "cpu"]
        step("evaluate", "runs/a", "prompts.jsonl", *limits)
        step("export", "runs/a")
    return ended


def test_init_writes_what_it_prints(journey: dict[str, tuple[Path, Ended]], tiny_folder: Path) -> None:
    place, ended = journey["init"]
    settings = load_settings(place / "RUN.yaml")
    told = ended.json
    outlook = told.pop("outlook")
    assert told == {"settings": "RUN.yaml", **settings.model_dump(mode="json")}
    assert (outlook["thinking"], outlook["work"]) == (False, None)
    assert "GPU hours not estimated: there is no dataset in dataset yet" in ended.stderr
    assert (settings.target.model, settings.drafter.mask_token_id) == (str(tiny_folder), 3)


def completions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in shard_files(folder) for line in path.read_bytes().splitlines()]


def test_generate_keeps_order_and_ids(journey: dict[str, tuple[Path, Ended]]) -> None:
    place, ended = journey["generate"]
    rows = completions(place / "done")
    asked = [json.loads(line)["prompt"] for line in (place / "prompts.jsonl").read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == asked
    assert [row["prompt_ids"] for row in rows] == [[int(word[1:]) for word in text.split()] for text in asked]
    summary = ended.json
    said = summary.pop("asked")
    assert (said["thinking"], said["temperature"], said["max_new_tokens"]) == ("default", 0.0, 24)
    assert summary == {
        "completions": "done",
        "prompts": 16,
        "conversations": 16,
        "rows": 16,
        "tokens_generated": sum(len(row["completion_ids"]) for row in rows),
        "stopped": sum(row["finish"] == "stop" for row in rows),
        "cut_at_max_new_tokens": sum(row["finish"] == "length" for row in rows),
        "loops": 0,
        "retokenized": 0,
        "turns_not_asked": 0,
        "quarantined": {},
        "found": 0,
        "retried": 0,
        "shards": 1,
    }
    assert all((row["completion_ids"][-1] == 2) == (row["finish"] == "stop") for row in rows)


def test_prepare_accounts_for_every_completion(journey: dict[str, tuple[Path, Ended]]) -> None:
    place, ended = journey["prepare"]
    dataset = open_dataset(place / "dataset")
    rows = completions(place / "done")
    kept = [row for row in rows if 3 not in row["completion_ids"]]
    assert [dataset.row(i)[0].tolist() for i in range(len(dataset))] == [
        row["prompt_ids"] + row["completion_ids"] for row in kept
    ]
    assert ended.json["rows"] + ended.json["quarantined"].get("contains the mask token", 0) == 16
    assert 0 < ended.json["rows"] < 16, "the quarantine has something to do"


def test_plan_of_the_run(journey: dict[str, tuple[Path, Ended]]) -> None:
    place, ended = journey["plan"]
    report = ended.json
    assert report["samples"] == len(open_dataset(place / "dataset"))
    assert sum(bucket["batches"] for bucket in report["buckets"]) == report["batches"]
    assert report["batch_max"] <= 4
    assert f"{report['samples']} samples loaded lazily" in ended.stderr
    assert report["memory"]["weights"] > 0
    assert "memory of a drafter rank" in ended.stderr


def test_train_leaves_a_whole_run_folder(journey: dict[str, tuple[Path, Ended]]) -> None:
    place, ended = journey["train"]
    run = place / "runs" / "a"
    assert ended.json["train_steps"] == 6
    assert (ended.json["run"], ended.json["drafter"]) == ("runs/a", "runs/a/drafter")
    settings = load_settings(run / "settings.yaml")
    assert (settings.train.max_steps, settings.drafter.layers, settings.pipeline.targets) == (6, 1, ("cpu", "cpu"))
    assert dump_settings(settings) == (run / "settings.yaml").read_text()
    events = list(read_events(run))
    assert [event["step"] for event in events if event["event"] == "step"] == [0, 2, 4, 5]
    assert {"plan", "role", "step"} < {event["event"] for event in events}
    assert events[-1]["event"] == "trained"
    assert json.loads((run / "provenance.json").read_text())["dataset"]["folder"] == "dataset"
    assert {str(tensor.dtype) for tensor in load_file(run / "drafter" / "model.safetensors").values()} == {
        "torch.float32"
    }


def test_training_leaves_the_process_as_it_was(journey: dict[str, tuple[Path, Ended]]) -> None:
    """transformers patches these while it loads a model; roles that load at once would leave the patches behind."""
    assert torch.get_default_dtype() == torch.float32
    assert PreTrainedModel.tie_weights.__qualname__ == "PreTrainedModel.tie_weights"
    assert PreTrainedModel.init_weights.__qualname__ == "PreTrainedModel.init_weights"
    assert torch.nn.init.normal_.__module__ == "torch.nn.init"


def test_evaluate_reports_what_it_writes(journey: dict[str, tuple[Path, Ended]]) -> None:
    place, ended = journey["evaluate"]
    report = ended.json
    saved = json.loads((place / "runs" / "a" / "evaluation.json").read_text())
    assert len(saved.pop("per_prompt")["cycles"]) == 16
    assert report == saved
    assert (report["prompts"], report["lossless"], report["first_difference"]) == (16, True, None)
    shares = report["per_slot_acceptance"]
    assert len(shares) == 4
    assert shares[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert 1 <= report["tau_pooled"] <= 4
    assert report["speedup_vs_autoregressive"] > 0


def test_export_names_its_folder(journey: dict[str, tuple[Path, Ended]]) -> None:
    place, ended = journey["export"]
    assert ended.json["folder"] == "runs/a/export"
    assert sorted(path.name for path in (place / "runs/a/export").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    tensors = load_file(place / "runs/a/export/model.safetensors")
    assert ended.json["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    config = json.loads((place / "runs/a/export/config.json").read_text())
    assert (config["block_size"], config["mask_token_id"], config["num_hidden_layers"]) == (4, 3, 1)


def test_the_exports_card_says_what_was_measured_and_made(journey: dict[str, tuple[Path, Ended]]) -> None:
    place, ended = journey["evaluate"]
    card = (journey["export"][0] / "runs/a/export/README.md").read_text()
    assert f"| acceptance length τ, mean over prompts | {ended.json['tau_trained']:.4g} |" in card
    assert f"| acceptance length τ, pooled over cycles | {ended.json['tau_pooled']:.4g} |" in card
    assert "| `train.max_steps` | 6 |" in card
    dataset = open_dataset(place / "dataset")
    longest = max(len(dataset.row(i)[0]) for i in range(len(dataset)))
    assert f"Trained on samples of at most {longest} tokens" in card
    assert f"| data | `dataset`, rows `{dataset.fingerprint}` |" in card


@pytest.fixture
def finished(journey: dict[str, tuple[Path, Ended]], here: Path) -> Path:
    """A copy of the journey's folder as the working folder, for tests that go on from there."""
    shutil.copytree(journey["export"][0], here, dirs_exist_ok=True)
    return here


def test_a_trained_run_is_never_trained_over(finished: Path) -> None:
    before = on_disk(finished)
    ended = paceline("train", "runs/a/settings.yaml")
    assert ended.status == 2
    sentence = "error: Run folder runs/a (run_dir) already holds a trained drafter. Choose another run_dir.\n"
    assert ended.stderr == sentence
    assert on_disk(finished) == before


def test_a_run_can_be_fed_back(finished: Path) -> None:
    """The saved settings give the same drafter once more, here in bit-equal weights."""
    summary = paceline("train", "runs/a/settings.yaml", "run_dir=runs/b", "--json").json
    assert summary["train_steps"] == 6
    first, second = (load_file(finished / "runs" / name / "drafter" / "model.safetensors") for name in "ab")
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


def test_outputs_are_replaced_only_when_asked(finished: Path, refused: Callable[..., str], tiny_folder: Path) -> None:
    target = ["--target", tiny_folder]
    assert refused("init", *target) == "RUN.yaml exists. Choose another --out or add --overwrite."
    assert refused("generate", "prompts.jsonl", "--out", "done", *target, "--device", "cpu") == (
        "done holds completions of other settings: max_new_tokens was 24 and is 512 now. Give the same settings to go "
        "on with them, choose another --out, or add --overwrite."
    )
    assert (
        refused("prepare", "done", "--out", "dataset", *target)
        == "There is a dataset at dataset already. Choose another place or ask to overwrite it."
    )
    assert (
        refused("export", "runs/a")
        == "Folder runs/a/export exists and is not empty. Choose another --out or add --overwrite."
    )
    assert paceline("export", "runs/a", "--overwrite", "--dtype", "float32", "--json").json["dtype"] == "float32"


def test_without_json_each_verb_ends_with_a_sentence(finished: Path, tiny_folder: Path) -> None:
    target = ["--target", tiny_folder]

    def last_line(*arguments: object) -> str:
        ended = paceline(*arguments)
        assert (ended.status, ended.stderr) == (0, "")
        return ended.stdout.splitlines()[-1]

    assert last_line("init", *target, "--out", "b.yaml") == "Wrote b.yaml."
    assert (
        last_line("generate", "prompts.jsonl", "--out", "c", *target, "--max-new-tokens", "2", "--device", "cpu")
        == "16 rows, 32 tokens; stopped: 0 answers, cut: 16."
    )
    assert last_line("prepare", "c", "--out", "d", *target) == "Wrote 16 rows, 96 tokens (33% supervised) in d."
    planned = paceline("plan", "d").stdout.splitlines()
    assert ["[0,", "65)", "16", "1", "100.0%", "16-16", "81.2%"] in [line.split() for line in planned]
    assert re.fullmatch(
        r"Wrote [\d,]+ parameters \(bfloat16, zlab layout\) to e; read back equal.",
        last_line("export", "runs/a", "--out", "e"),
    )
    few = lines("few.jsonl", {"prompt": "w5 w6"})
    options = ["--timed-prompts", "0", "--max-new-tokens", "8", "--device", "cpu"]
    assert last_line("evaluate", "runs/a", few, *options) == "lossless (float32): yes"


def test_plan_of_a_folder_and_of_its_settings_agree(finished: Path) -> None:
    def planned(*arguments: object) -> dict[str, Any]:
        timed = ("open_s", "plan_s")
        return {key: value for key, value in paceline("plan", *arguments, "--json").json.items() if key not in timed}

    folder = planned("dataset")
    run = planned("RUN.yaml")
    assert run.pop("memory")["total"] > 0  # a dataset has neither drafter
    assert run.pop("target")["total"] > 0  # nor target
    assert run == folder
    assert planned("dataset", "--seed", "0") == folder


# --- bad input of plan and train


def test_plan_refuses_what_it_would_ignore(
    refused: Callable[..., str], run_yaml: Path, write_dataset: Callable[..., Path]
) -> None:
    write_dataset([([5, 6, 7], 1)])
    assert (
        refused("plan", "dataset", "data.buckets=2")
        == "'data.buckets=2' changes a RUN.yaml, but dataset is a folder. Give a RUN.yaml to plan."
    )
    assert (
        refused("plan", "RUN.yaml", "--seed", "0")
        == "--seed is for a dataset folder, got it with RUN.yaml. Add train.seed=0 instead."
    )
    assert refused("plan", "nowhere") == "There is no dataset folder or settings file nowhere. Give one of them."


def test_plan_of_what_is_no_dataset(refused: Callable[..., str], run_yaml: Path) -> None:
    no_dataset = "it has no manifest.json. Write one with `paceline prepare`."
    Path("empty").mkdir()
    assert refused("plan", "empty") == f"empty is no dataset: {no_dataset}"
    assert refused("plan", "RUN.yaml") == f"dataset is no dataset: {no_dataset}"
    lines("rows.jsonl", {"prompt": "x"}, {"prompt": "y"})
    assert (
        refused("plan", "rows.jsonl")
        == "rows.jsonl:2 is not valid YAML: expected '<document start>', but found '{'. Correct the file."
    )


@pytest.mark.parametrize("verb", ["plan", "train"])
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.lrr=1", "Unknown setting train.lrr (in override 'train.lrr=1'). Did you mean train.lr?"),
        ("train.lr", "An override has the form section.key=value, got 'train.lr'."),
        (
            "drafter.block_size=1",
            "drafter.block_size must be greater than or equal to 2, got 1 (in override 'drafter.block_size=1').",
        ),
        ("train.lr=.inf", "train.lr must be a finite number, got inf (in override 'train.lr=.inf')."),
        ("data.dataset=nowhere", "nowhere is no dataset: it has no manifest.json. Write one with `paceline prepare`."),
        (
            "data.edges=[8]",
            "data.edges must reach the longest row, got 8 as the last edge and row 1 of 12 tokens. "
            "Add an edge or set data.edges to null.",
        ),
        ("data.edges=[0, 16]", "data.edges must be lengths from 1 up, got 0. Remove that edge."),
    ],
)
def test_settings_that_are_refused(
    refused: Callable[..., str],
    run_yaml: Path,
    write_dataset: Callable[..., Path],
    verb: str,
    override: str,
    sentence: str,
) -> None:
    write_dataset([([5, 6, 7], 1), ([5] * 12, 1)])
    assert refused(verb, "RUN.yaml", override) == sentence


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_settings_files_that_are_refused(refused: Callable[..., str], run_yaml: Path, verb: str) -> None:
    text = run_yaml.read_text()
    run_yaml.write_text(text.replace("  lr:", "  learning_rat:"))
    assert refused(verb, "RUN.yaml").startswith("Unknown setting train.learning_rat (in RUN.yaml). Did you mean train.")
    run_yaml.write_text("run_dir: [\n")
    assert (
        refused(verb, "RUN.yaml")
        == "RUN.yaml:2 is not valid YAML: expected the node content, but found '<stream end>'. Correct the file."
    )
    run_yaml.write_text("")
    assert (
        refused(verb, "RUN.yaml")
        == "RUN.yaml must hold a mapping of settings, found NoneType. Write one with `paceline init`."
    )


def test_train_without_a_settings_file(refused: Callable[..., str]) -> None:
    assert refused("train", "RUN.yaml") == "There is no settings file RUN.yaml. Write one with `paceline init`."


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("drafter.taps=[0, 5]", "drafter.taps must lie in 0..4 for {tiny} (6 layers), got [5]. Remove or lower them."),
        (
            "drafter.mask_token_id=128",
            "drafter.mask_token_id must be a row of the target's embedding (0..127), got 128.",
        ),
        (
            "drafter.mask_token_id=7",
            "drafter.mask_token_id must never occur in the data, but token 7 is in row 1 of dataset. "
            "Choose another id, or prepare again with --mask-token-id 7, which leaves such rows out.",
        ),
        (
            "train.context_slots=11",
            "A sample must fit train.context_slots (11), got row 1 of dataset (data.dataset) with 12 tokens. "
            "Raise train.context_slots or prepare shorter rows.",
        ),
        (
            "target.model=Qwen/Qwen3-8B",
            NO_REVISION,
        ),
        (
            "target.model=./nowhere",
            "There is no target folder ./nowhere. Give a folder or a hub id such as Qwen/Qwen3-8B.",
        ),
        (
            "target.model=bare",
            "Target folder bare has no *.safetensors file. Convert its weights to safetensors first.",
        ),
        (
            "target.model=other",
            "The dataset was prepared with the tokenizer of {tiny} ({made}), but target other has another one "
            "({other}). Prepare the data again with --target other.",
        ),
    ],
)
def test_runs_that_do_not_fit_their_target_or_data(
    refused: Callable[..., str],
    run_yaml: Path,
    write_dataset: Callable[..., Path],
    tiny_folder: Path,
    override: str,
    sentence: str,
) -> None:
    write_dataset([([5, 6, 8], 1), ([5] * 11 + [7], 1)])
    shutil.copytree(tiny_folder, "bare")
    Path("bare/model.safetensors").unlink()
    shutil.copytree(tiny_folder, "other")
    tokenizer = Path("other/tokenizer.json")
    tokenizer.write_text(tokenizer.read_text().replace('"w127"', '"x127"'))
    message = refused("train", "RUN.yaml", override)
    prints = re.findall(r"\(([0-9a-f]{12})\)", message) or ["", ""]
    assert message == sentence.format(tiny=tiny_folder, made=prints[0], other=prints[1])
    assert not prints[0] or prints[0] != prints[1]


@pytest.mark.parametrize("device", ["cuda:99", "cuda", "foo", "meta"])
@pytest.mark.parametrize("key", ["pipeline.targets", "pipeline.drafters"])
def test_devices_of_a_run_that_do_not_exist(
    refused: Callable[..., str], run_yaml: Path, write_dataset: Callable[..., Path], key: str, device: str
) -> None:
    write_dataset([([5, 6, 8], 1)])
    message = refused("train", "RUN.yaml", f"{key}=[{device}]", "pipeline.ready_timeout_s=20")
    assert key in message
    assert device in message


# --- bad input of init, generate, evaluate, export


@pytest.mark.parametrize("verb", ["init", "generate", "prepare"])
@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("bare", "Target folder bare has no *.safetensors file. Convert its weights to safetensors first."),
        ("empty", "Target folder empty has no config.json. Give the folder that holds the model's files."),
        ("./nowhere", "There is no target folder ./nowhere. Give a folder or a hub id such as Qwen/Qwen3-8B."),
        (
            "/nowhere/at/all",
            "There is no target folder /nowhere/at/all. Give a folder or a hub id such as Qwen/Qwen3-8B.",
        ),
        (
            "Qwen/Qwen3-8B",
            NO_REVISION,
        ),
        ("mute", "Target folder mute has no tokenizer.json. Put the model's tokenizer files beside it."),
    ],
)
def test_targets_that_are_refused(
    refused: Callable[..., str], tiny_folder: Path, verb: str, target: str, sentence: str
) -> None:
    Path("empty").mkdir()
    for name, missing in (("bare", "model.safetensors"), ("mute", "tokenizer.json")):
        shutil.copytree(tiny_folder, name)
        Path(name, missing).unlink()
    source = (
        [] if verb == "init" else [lines("in.jsonl", {"prompt": "w5", "prompt_ids": [5], "completion_ids": [6, 7]})]
    )
    assert refused(verb, *source, "--target", target, "--out", "out") == sentence


def test_a_mask_token_outside_the_embedding(refused: Callable[..., str], tiny_folder: Path) -> None:
    assert (
        refused("init", "--target", tiny_folder, "--mask-token-id", "128")
        == "--mask-token-id must be a row of the target's embedding (0..127), got 128."
    )


PROMPT_FAULTS = [
    ("{nope", ":2 is not JSON: Expecting property name enclosed in double quotes at column 2. Correct the line."),
    ("[1]", ':2 must be a JSON object with "prompt" or "messages", found list.'),
    ('{"prompt": " "}', ':2 needs a non-empty "prompt" text or a list of "messages" objects, found keys [\'prompt\'].'),
    (
        '{"messages": [{"role": "robot", "content": "w5"}]}',
        ":2: Message 1 has role 'robot'. Use one of system, user, assistant, tool.",
    ),
    (
        '{"messages": [{"role": "user", "content": ""}]}',
        ":2 has no tokens, so there is nothing to answer. Give it text.",
    ),
    (
        json.dumps({"prompt": "w5 " * 500}),
        ":2 has 500 tokens and --max-new-tokens is 16, together more than the target's 512 positions. "
        "Shorten one of them.",
    ),
]


@pytest.mark.parametrize(("line", "sentence"), PROMPT_FAULTS)
def test_prompts_that_generate_refuses(
    refused: Callable[..., str], tiny_folder: Path, line: str, sentence: str
) -> None:
    path = lines("p.jsonl", {"prompt": "w5"}, line)
    options = ["--target", tiny_folder, "--max-new-tokens", "16", "--device", "cpu"]
    share = "At most 0 of 2 prompts may be refused (--max-quarantined), 1 are."
    assert refused("generate", path, "--out", "new/c", *options) == f"p.jsonl{sentence} {share}"


@pytest.mark.parametrize(("line", "sentence"), PROMPT_FAULTS)
def test_prompts_that_evaluate_refuses(finished: Path, refused: Callable[..., str], line: str, sentence: str) -> None:
    path = lines("p.jsonl", {"prompt": "w5"}, line)
    options = ["--max-new-tokens", "16", "--device", "cpu"]
    assert refused("evaluate", "runs/a", path, *options) == f"p.jsonl{sentence}"


def test_prompt_files_that_are_refused(finished: Path, refused: Callable[..., str], tiny_folder: Path) -> None:
    lines("none.jsonl", "")
    for verb in (["generate", "{}", "--out", "c", "--target", tiny_folder], ["evaluate", "runs/a", "{}"]):
        for file, sentence in (
            ("nowhere.jsonl", "There is no prompt file nowhere.jsonl. Give a JSONL file, one prompt a line."),
            ("none.jsonl", "Prompt file none.jsonl holds no prompt. Write one JSON object a line."),
            ("runs", "Prompt file runs cannot be read: Is a directory. Give a JSONL file."),
        ):
            arguments = [file if argument == "{}" else argument for argument in verb]
            assert refused(*arguments, "--device", "cpu") == sentence


def test_places_that_cannot_hold_the_output(finished: Path, refused: Callable[..., str], tiny_folder: Path) -> None:
    target = ["--target", tiny_folder, "--overwrite"]
    generate = ["generate", "prompts.jsonl", *target, "--device", "cpu", "--max-new-tokens", "4", "--out"]
    assert refused(*generate, "RUN.yaml") == "RUN.yaml is a file, and completions go to a folder. Choose another --out."
    assert refused(*generate, "runs") == (
        "A folder of completions must hold nothing else, got a in runs (--out). Move that away, or choose another "
        "--out."
    )
    assert refused("init", *target, "--out", "runs") == "runs exists. Choose another --out."
    assert (
        refused("prepare", "done", *target, "--out", "runs")
        == "runs exists and is not a dataset, so it is never replaced. Choose another place."
    )
    assert (
        refused(*generate, "RUN.yaml/x")
        == "RUN.yaml/x (--out) cannot be written: Not a directory. Choose another place."
    )
    ended = paceline("init", *target, "--out", "RUN.yaml/x")  # Python's own sentence has no full stop
    assert (ended.status, ended.stdout, ended.stderr) == (2, "", "error: File exists: RUN.yaml\n")


def test_a_run_does_not_lie_in_its_dataset(refused: Callable[..., str], run_yaml: Path, write_dataset: Any) -> None:
    write_dataset([([5, 6, 8, 9], 1)])
    message = refused("train", "RUN.yaml", "run_dir=dataset/run")
    assert (
        message
        == "run_dir must not lie in the dataset dataset (data.dataset), got dataset/run. Choose another run_dir."
    )


@pytest.mark.parametrize("device", ["cuda:99", "cuda", "foo", "meta", ""])
def test_devices_that_do_not_exist(finished: Path, refused: Callable[..., str], tiny_folder: Path, device: str) -> None:
    generate = ["generate", "prompts.jsonl", "--out", "c", "--target", tiny_folder]
    for command in (generate, ["evaluate", "runs/a", "prompts.jsonl"]):
        message = refused(*command, "--device", device)
        if device == "cuda:99":
            pattern = r"--device names cuda:99, but this machine has .+\. Use one that is there, or cpu\."
            assert re.fullmatch(pattern, message)
        else:
            assert message == f"--device must be cpu or cuda:N, got {device!r}. Write for example cuda:0."


def test_folders_that_are_no_run(refused: Callable[..., str], write_dataset: Callable[..., Path]) -> None:
    write_dataset([([5, 6, 7], 1)])
    prompts = lines("p.jsonl", {"prompt": "w5"})
    for folder in ("nowhere", "dataset", "p.jsonl"):
        sentence = f"{folder} is no folder of a finished run: it has no drafter/drafter.json. Train it first."
        assert refused("export", folder) == sentence
        assert refused("evaluate", folder, prompts, "--device", "cpu") == sentence


def test_checkpoints_that_are_not_there(finished: Path, refused: Callable[..., str]) -> None:
    """The run of 12 steps ended before its first save was due."""
    for verb in (["export", "runs/a", "--out", "e"], ["evaluate", "runs/a", "prompts.jsonl", "--device", "cpu"]):
        assert refused(*verb, "--checkpoint", "9") == (
            "There is no checkpoint after step 9 in runs/a/checkpoints. There is none."
        )
        assert refused(*verb, "--checkpoint", "newest") == (
            "A checkpoint is named latest, best or by its number of steps, got 'newest'. There is none."
        )


def test_export_into_a_folder_that_is_not_empty(finished: Path, refused: Callable[..., str]) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    never = "(--out) exists and is no export, so it is never replaced. Choose another place."
    assert refused("export", "runs/a", "--out", "mine") == f"mine {never}"
    assert refused("export", "runs/a", "--out", "RUN.yaml", "--overwrite") == f"RUN.yaml {never}"


def test_export_in_all_layouts(finished: Path, tiny_folder: Path, refused: Callable[..., str]) -> None:
    told = paceline("export", "runs/a", "--format", "all", "--out", "e", "--max-shard-size", "20KB", "--json").json
    assert [folder["folder"] for folder in told["folders"]] == ["e", "e-speculators"]
    files = [len(list((finished / name).glob("*.safetensors"))) for name in ("e", "e-speculators")]
    assert files == [len(folder["files"]) for folder in told["folders"]]
    assert min(files) > 1
    verifier = json.loads((finished / "e-speculators" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(tiny_folder), "architectures": ["Qwen3ForCausalLM"]}
    shutil.rmtree("e")  # the other is still in the way, and nothing is written before that is known
    sentence = "Folder e-speculators exists and is not empty. Choose another --out or add --overwrite."
    assert refused("export", "runs/a", "--format", "all", "--out", "e") == sentence
    assert not Path("e").exists()
    paceline("export", "runs/a", "--format", "all", "--out", "e", "--overwrite", "--json")
    assert [path.name for path in Path("e-speculators").glob("*.safetensors")] == ["model.safetensors"]
    size = "--max-shard-size must be a size such as 5GB or 500MB, got '5'."
    assert refused("export", "runs/a", "--overwrite", "--max-shard-size", "5") == size


def test_a_run_starts_from_an_exported_drafter(finished: Path, refused: Callable[..., str]) -> None:
    """With a rate near zero it ends where it started, which is not where a run that draws its weights does."""
    paceline("export", "runs/a", "--dtype", "float32", "--out", "e")
    warm = ["train.init_from=e", "train.lr=1e-30", "train.max_steps=1", "--json"]
    paceline("train", "runs/a/settings.yaml", "run_dir=runs/b", *warm)
    first, second = (load_file(finished / "runs" / name / "drafter" / "model.safetensors") for name in "ab")
    assert all(first[name].equal(second[name]) for name in first)
    sentence = "There is no folder nowhere (train.init_from). Name the folder of a z-lab, speculators, SpecForge or "
    assert refused("train", "runs/a/settings.yaml", "run_dir=c", "train.init_from=nowhere").startswith(sentence)
    assert not Path("c").exists()
    assert "is a run of paceline" in refused("train", "runs/a/settings.yaml", "run_dir=c", "train.init_from=runs/a")


@pytest.mark.parametrize("out", ["mine", "runs/a", "runs/a/drafter", "runs", "."])
def test_export_never_replaces_what_is_no_export(finished: Path, refused: Callable[..., str], out: str) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    assert out in refused("export", "runs/a", "--out", out, "--overwrite")


def test_evaluation_needs_the_target_of_the_run(finished: Path, refused: Callable[..., str], tied_folder: Path) -> None:
    meta = Path("runs/a/drafter/drafter.json")
    tree = json.loads(meta.read_text())
    meta.write_text(json.dumps({**tree, "target": str(tied_folder)}))
    message = refused("evaluate", "runs/a", "prompts.jsonl", "--device", "cpu")
    assert message == (
        f"The drafter in runs/a was trained for a target with hidden size 64, but {tied_folder} has 48. Evaluate with "
        "the target it was trained for."
    )
    meta.write_text(json.dumps({**tree, "target_revision": "0" * 16}))
    assert refused("evaluate", "runs/a", "prompts.jsonl", "--device", "cpu") == (
        f"The drafter in runs/a was trained for revision {'0' * 16} of {tree['target']}, but revision "
        f"{tree['target_revision']} lies there now. Evaluate with the target it was trained for."
    )
    meta.write_text(json.dumps({**tree, "target": "/gone"}))
    assert refused("evaluate", "runs/a", "prompts.jsonl", "--device", "cpu").startswith(
        "There is no target folder /gone."
    )


# --- bad rows of prepare

GOOD = {"prompt_ids": [5, 6], "completion_ids": [7, 8, 2]}
BAD_ROWS = [
    ("{nope", "not JSON", "The line is not JSON: Expecting property name enclosed in double quotes"),
    ([1], "not an object", "A row must be an object, got list."),
    ({"words": "w5"}, "unknown form", "A row holds messages or conversations, or prompt and completion, or text, or"),
    ({"text": "w5"}, "text without a mask", "The chat template must open an answer with a special token"),
    ({"prompt": "w5", "completion": " "}, "empty completion", "A conversation needs an assistant message, and none of"),
    ({"prompt_ids": [5], "completion_ids": []}, "empty completion", "completion_ids is empty."),
    (
        {"prompt_ids": [5], "completion_ids": [6]},
        "no two supervised tokens",
        "The row has no two supervised tokens in a",
    ),
    (
        {"prompt_ids": [5], "completion_ids": [6] * 20},
        "too long",
        "The row has 21 tokens, max_length is 20. Raise it or truncate long rows.",
    ),
    (
        {"messages": [{"role": "robot", "content": "w5"}, {"role": "assistant", "content": "w6"}]},
        "unknown role",
        "Message 1 has role 'robot'. Use one of system, user, assistant, tool.",
    ),
    ({"prompt_ids": [5], "completion_ids": [6, 128]}, "id outside the vocabulary", "completion_ids holds 128; the"),
    ({"prompt_ids": [5], "completion_ids": [6, 3]}, "contains the mask token", "The row holds token 3, which is the"),
]


@pytest.fixture
def chat_folder(here: Path, tiny_folder: Path) -> Path:
    """The tiny target with a chat template that ends every turn with a special token."""
    shutil.copytree(tiny_folder, "chat")
    Path("chat/chat_template.jinja").write_text(
        "{% for m in messages %}{{ ' ' + m['content'] + ' <eos>' }}{% endfor %}"
    )
    return Path("chat")


def prepare(*more: object) -> list[object]:
    limits = ["--max-length", 20, "--mask-token-id", 3, "--max-quarantined", 1]
    return ["prepare", "in.jsonl", "--out", "out", "--target", "chat", *limits, *more]


def test_every_bad_row_is_in_the_quarantine_with_its_reason(chat_folder: Path) -> None:
    pair = {"prompt": "w9 w10", "completion": "w11 w12"}
    lines("in.jsonl", GOOD, *(row for row, _, _ in BAD_ROWS), pair)
    ended = paceline(*prepare("--json"))
    reasons = [reason for _, reason, _ in BAD_ROWS]
    assert {key: ended.json[key] for key in ("rows_read", "rows", "truncated", "quarantined", "quarantine")} == {
        "rows_read": len(BAD_ROWS) + 2,
        "rows": 2,
        "truncated": 0,
        "quarantined": {reason: reasons.count(reason) for reason in reasons},
        "quarantine": "out.quarantine.jsonl",
    }
    entries = [json.loads(line) for line in Path("out.quarantine.jsonl").read_text().splitlines()]
    for number, (entry, (row, reason, detail)) in enumerate(zip(entries, BAD_ROWS, strict=True), 2):
        assert (entry["file"], entry["line"], entry["reason"], entry["row"]) == ("in.jsonl", number, reason, row)
        assert entry["detail"].startswith(detail)
    dataset = open_dataset(Path("out"))
    assert [dataset.row(i)[0].tolist() for i in range(2)] == [[5, 6, 7, 8, 2], [9, 10, 2, 11, 12, 2]]
    assert [dataset.row(i)[1].tolist() for i in range(2)] == [[False] * 2 + [True] * 3, [False] * 3 + [True] * 3]
    assert dataset.manifest.origin.quarantined == ended.json["quarantined"]


def test_a_person_is_told_what_was_refused(chat_folder: Path) -> None:
    lines("in.jsonl", GOOD, [1], [2], GOOD, "{")
    ended = paceline(*prepare())
    assert (ended.status, ended.stderr) == (0, "")
    assert " ".join(ended.stdout.split()).endswith(
        "Wrote 2 rows, 10 tokens (60% supervised) in out. "
        "Quarantined 3 of 5 rows in out.quarantine.jsonl: 2 not an object 1 not JSON"
    )
    again = paceline(*prepare())
    assert "Found 2 rows, 10 tokens" in again.stdout
    assert "out holds this very dataset already" in " ".join(again.stdout.split())


def test_too_many_bad_rows_end_the_command(chat_folder: Path) -> None:
    lines("in.jsonl", *[GOOD] * 90, *[[1]] * 10)
    ended = paceline(*prepare("--max-quarantined", "0.05"))
    assert ended.status == 2
    assert ended.stderr == (
        "error: At most 5.00% of the rows may be quarantined (--max-quarantined 0.05), but 10 of 100 are (not an "
        "object: 10). See out.partial/quarantine.jsonl for each of them; correct them, or allow more with "
        "--max-quarantined 0.1.\n"
    )
    assert not Path("out").exists()
    assert paceline(*prepare("--max-quarantined", "0.1", "--json")).json["rows"] == 90


def test_checksums_are_verified(chat_folder: Path) -> None:
    lines("in.jsonl", GOOD, GOOD)
    paceline(*prepare())
    ended = paceline("prepare", "out", "--verify")
    assert re.fullmatch(r"1 shard, [\d,]+ bytes, 2 rows: all as their manifests say\.", ended.stdout.splitlines()[-1])
    shard = Path("out/data-00000-of-00001.arrow")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    ended = paceline("prepare", "out", "--verify")
    assert ended.status == 2
    assert ended.stderr.startswith("error: Shard out/data-00000-of-00001.arrow is damaged: its sha256 is ")


@pytest.mark.parametrize(
    ("option", "name"), [(["--out", "zzz"], "out"), (["--target", "no"], "target"), (["--on-bad", "stop"], "on-bad")]
)
def test_checksums_are_verified_with_no_other_option(refused: Callable[..., str], option: list[str], name: str) -> None:
    assert refused("prepare", "out", "--verify", *option) == (
        f"--verify writes nothing and goes with datasets alone, got --{name} too. Leave one of them out."
    )


def test_names_that_no_dataset_can_have(refused: Callable[..., str], chat_folder: Path) -> None:
    lines("in.jsonl", GOOD)
    Path("loop").symlink_to("loop")
    for out in ("loop", "loop/out"):
        assert refused(*prepare("--out", out)) == (
            f"--out must lead to a place, got {out}, whose links lead in a circle. Remove it."
        )
    assert refused(*prepare("--out", os.fsdecode(b"a\xff"))) == (
        "--out must be UTF-8, got 'a\\udcff'. Choose another name."
    )


def test_template_arguments_have_their_form(chat_folder: Path) -> None:
    lines("in.jsonl", GOOD)
    ended = paceline(*prepare("--template-arg", "thinking"))
    assert ended.stderr == "error: --template-arg has the form key=value, got 'thinking'.\n"
    ended = paceline(*prepare("--template-arg", "x=" + "[" * 100_000))
    assert (
        ended.stderr
        == "error: --template-arg x must be a plain value, got [[[[[[[[[[[[[[[[[[[[..., nested too deeply.\n"
    )
    ended = paceline(*prepare("--template-arg", "thinkin=false"))
    assert ended.stderr == (
        "error: A chat template argument must be one that the chat template reads, and that of chat never mentions "
        "thinkin (--template-arg). Correct its name or leave it out.\n"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, False) for text in ("false", "False", "FALSE")),
        *((text, True) for text in ("true", "True")),
        *((text, None) for text in ("null", "None")),
        *(("0", 0), ("[1]", [1]), ("none", "none"), ("no", "no"), ('"False"', "False"), ("a=b", "a=b"), ("", "")),
    ],
)
def test_template_arguments_are_read_as_json_and_as_python(text: str, value: object) -> None:
    assert read_template_arg(f"thinking={text}") == ("thinking", value)


def test_long_rows_are_cut_when_asked(chat_folder: Path) -> None:
    lines("in.jsonl", {"prompt_ids": [5], "completion_ids": list(range(6, 36))}, GOOD)
    summary = paceline(*prepare("--on-long", "truncate", "--json")).json
    assert (summary["rows"], summary["truncated"], summary["longest"], summary["quarantine"]) == (2, 1, 20, None)
    assert open_dataset(Path("out")).row(0)[0].tolist() == list(range(5, 25))
    assert not Path("out.quarantine.jsonl").exists()


def test_when_every_row_is_bad(chat_folder: Path) -> None:
    lines("in.jsonl", [1], {"prompt": "w5", "completion": ""}, [2])
    ended = paceline(*prepare("--json"))
    assert (ended.status, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1] == (
        "error: No row of in.jsonl can be used (not an object: 2, empty completion: 1). "
        "See out.partial/quarantine.jsonl for each of them."
    )
    assert not Path("out").exists()
    reasons = [json.loads(line)["reason"] for line in Path("out.partial/quarantine.jsonl").read_text().splitlines()]
    assert reasons == ["not an object", "empty completion", "not an object"]


def test_the_first_bad_row_can_be_an_error(chat_folder: Path, here: Path) -> None:
    lines("in.jsonl", GOOD, [1], GOOD)
    before = on_disk(here)
    ended = paceline(*prepare("--on-bad", "stop"))
    assert ended.status == 2
    assert ended.stderr == "error: in.jsonl:2: A row must be an object, got list.\n"
    assert on_disk(here) == before
    assert paceline(*prepare()).status == 0
    assert paceline(*prepare("--on-bad", "stop")) == ended, "also where the dataset is there already"


def test_prepare_keeps_what_is_not_its_own(refused: Callable[..., str], chat_folder: Path) -> None:
    lines("in.jsonl", GOOD)
    Path("out.partial").mkdir()
    Path("out.partial/thesis.txt").write_text("years of work")
    assert refused(*prepare()) == (
        "out.partial is where pieces of out are kept (--out), so it must hold nothing else, got thesis.txt. Move that "
        "away, or choose another --out."
    )
    Path("out.partial/thesis.txt").unlink()
    lines("out.quarantine.jsonl", {"prompt": "w5"})
    assert refused(*prepare("--exclude", "out.quarantine.jsonl")) == (
        "Evaluation set out.quarantine.jsonl is out.quarantine.jsonl, which is replaced when out is written (--out). "
        "Move it, or choose another --out."
    )


def test_a_failed_prepare_keeps_the_dataset_that_is_there(chat_folder: Path) -> None:
    lines("in.jsonl", GOOD)
    assert paceline(*prepare()).status == 0
    before = on_disk(Path("out"))
    lines("in.jsonl", [1])
    assert paceline(*prepare("--overwrite")).status == 2
    assert on_disk(Path("out")) == before


def test_input_files_that_are_refused(refused: Callable[..., str], chat_folder: Path) -> None:
    def message(name: str) -> str:
        return refused("prepare", name, "--out", "out", "--target", "chat")

    assert message("no.jsonl") == (
        "There is no input file no.jsonl. Give a JSONL, Parquet or Arrow file, or a folder of them."
    )
    Path("a.csv").write_text("x")
    assert message("a.csv") == ("Input a.csv must end in .jsonl, .parquet or .arrow or be a folder, got '.csv'.")
    Path("a.parquet").write_text("x")
    assert message("a.parquet").startswith("a.parquet cannot be read: ")
    Path("empty.jsonl").write_text("")
    assert message("empty.jsonl") == "empty.jsonl holds no rows, so there is nothing to prepare. Give a file with rows."
    Path("folder").mkdir()
    assert message("folder").startswith("Folder folder holds no .jsonl, .parquet or .arrow files.")


def test_a_line_that_is_not_utf8_is_a_bad_row(chat_folder: Path) -> None:
    Path("in.jsonl").write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xe9"}\n')
    assert paceline(*prepare("--json")).json["quarantined"] == {"not UTF-8": 1}
    ended = paceline(*prepare("--on-bad", "stop", "--overwrite"))
    assert ended.stderr == "error: in.jsonl:2: The line is not UTF-8 (byte 0xe9). Convert the file to UTF-8.\n"


def test_parquet_rows_go_the_same_way(chat_folder: Path) -> None:
    rows = [{"prompt": "w5", "completion": "w6 w7"}, {"prompt": "w5", "completion": ""}]
    pq.write_table(pa.Table.from_pylist(rows), "in.parquet")
    summary = paceline(
        "prepare", "in.parquet", "--out", "out", "--target", "chat", "--json", "--max-quarantined", 1
    ).json
    assert (summary["rows"], summary["quarantined"]) == (1, {"empty completion": 1})
    (entry,) = map(json.loads, Path("out.quarantine.jsonl").read_text().splitlines())
    assert (entry["file"], entry["line"], entry["row"]) == ("in.parquet", 2, rows[1])


def test_prepare_takes_what_the_settings_say(refused: Callable[..., str], run_yaml: Path) -> None:
    text = run_yaml.read_text()
    run_yaml.write_text(re.sub(r"max_length: \d+", "max_length: 6", text))
    source = lines(
        "in.jsonl",
        {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9]},
        {"prompt_ids": [5, 6], "completion_ids": [7] * 9},
    )
    ended = paceline("prepare", source, "--settings", "RUN.yaml", "--json", "--max-quarantined", "0.5")
    assert json.loads(ended.stdout)["quarantined"] == {"too long": 1}
    run_yaml.write_text(run_yaml.read_text().replace("on_long: refuse", "on_long: truncate"))
    ended = paceline("prepare", source, "--settings", "RUN.yaml", "--json", "--overwrite")
    assert (json.loads(ended.stdout)["rows"], json.loads(ended.stdout)["truncated"]) == (2, 1)
    assert (
        refused("train", "RUN.yaml", "data.max_length=5")
        == "A sample may have data.max_length (5) tokens, but dataset has one of 6. "
        "Raise it or prepare again with --settings."
    )
    assert refused("prepare", source, "--out", "other").startswith("`prepare` needs --out and --target.")


def test_numbers_that_are_not_finite_are_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    finish(Console(json=True), True, {"loss": math.nan, "all": [1.5, -math.inf], "step": {"s": (math.inf, 2)}}, "")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    told = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert told == {"loss": None, "all": [1.5, None], "step": {"s": [None, 2]}}
