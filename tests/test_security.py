"""What comes from outside never runs, paths stay in their folder, and secrets are written nowhere."""

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_server import MODEL, serving, vllm
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import paceline
from paceline.checkpoint import store
from paceline.checkpoint.folder import write_whole
from paceline.checkpoint.host import HostCopy
from paceline.cli import app
from paceline.config_file import load_settings
from paceline.data.store import open_dataset
from paceline.decode import remote_server
from paceline.decode.remote import KEY_VARIABLE
from paceline.observe.events import EventLog
from paceline.observe.quarantine import Quarantine
from paceline.pipeline.watch import write_stacks
from paceline.records import UserError
from paceline.target.load import describe, load_causal, load_tokenizer

SOURCES = sorted(Path(paceline.__file__).parent.rglob("*.py"))
KEY = "sk-very-secret-0815"


# What runs


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def named(call: ast.Call) -> dict[str, str]:
    return {keyword.arg or "**": ast.unparse(keyword.value) for keyword in call.keywords}


def faults(text: str) -> list[str]:
    """Return what in a source file could run what it reads."""
    found, tree = [], ast.parse(text)
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = getattr(node, "module", None) or ""
        if {module.partition(".")[0], *(name.partition(".")[0] for name in names)} & {
            "pickle",
            "dill",
            "joblib",
            "shelve",
        }:
            found.append(f"imports {ast.unparse(node)}")
    for name, call in calls(tree):
        options, last = named(call), name.rpartition(".")[2]
        if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"):
            found.append(f"calls {name}")
        if name == "torch.load" and options.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if options.get("allow_pickle", "False") != "False" or options.get("shell", "False") != "False":
            found.append(f"{name} with {options}")
        if name.startswith("yaml.") and last in ("load", "load_all", "full_load", "unsafe_load"):
            loaders = (*map(ast.unparse, call.args), *options.values())
            found += [f"{name} without the safe loader"] * (last != "load" or "_Loader" not in loaders)
        if last in ("from_pretrained", "from_config") and name.startswith(("Auto", "kind")):
            told = options.get("trust_remote_code") == "False" or options.get("**") == "FROM"
            found += [f"{name} without trust_remote_code=False"] * (not told)
    return found


def test_nothing_in_the_sources_can_run_what_it_reads() -> None:
    assert len(SOURCES) > 100
    assert {path.name: found for path in SOURCES if (found := faults(path.read_text()))} == {}
    from paceline.config_file import _Loader
    from paceline.target.weights import FROM

    assert FROM["trust_remote_code"] is False
    assert not [tag for tag in _Loader.yaml_constructors if tag and "python" in tag]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "eval('1')", "torch.load(path)", "np.load(p, allow_pickle=True)",
        "yaml.load(text, yaml.UnsafeLoader)", "yaml.full_load(text)", "AutoConfig.from_pretrained(folder)",
        "subprocess.run(line, shell=True)", "AutoModel.from_config(config, trust_remote_code=True)",
    ],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert faults(text)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!python/name:os.system", "!!python/object:os.X"])
def test_yaml_makes_no_objects(tmp_path: Path, tag: str) -> None:
    touched = tmp_path / "touched"
    path = tmp_path / "RUN.yaml"
    path.write_text(f"run_dir: {tag} ['touch {touched}']\n")
    with pytest.raises(
        UserError, match=r"RUN\.yaml:1 is not valid YAML: could not determine a constructor for the tag"
    ):
        load_settings(path)
    path.write_text("run_dir: run\n")
    with pytest.raises(UserError, match=r"is not valid YAML"):
        load_settings(path, [f"train.lr={tag} ['touch {touched}']"])
    assert not touched.exists()


@pytest.fixture
def target(tmp_path: Path, tiny_folder: Path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "target")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("model_type", ["qwen3", "unheard-of"])
def test_a_targets_own_code_is_never_run(
    target: Path, tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where somebody sits at a terminal and says yes: nobody is asked."""
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    touched = tmp_path / "touched"
    for name in ("configuration_own", "modeling_own", "tokenization_own"):
        (target / f"{name}.py").write_text(
            f"open({str(touched)!r}, 'w')\nfrom transformers import PretrainedConfig\n"
            "class Own(PretrainedConfig):\n    model_type = 'unheard-of'\n"
        )
    own = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    change(target / "config.json", auto_map=own, model_type=model_type)
    change(
        target / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"]}
    )
    if model_type == "qwen3":  # transformers' own code reads it
        facts = describe(str(target))
        assert load_causal(facts, dtype=torch.float32, device="cpu").config.model_type == "qwen3"
    else:
        with pytest.raises(
            UserError, match=r"own code is never run, and .*target/config\.json asks for it \(auto_map\)"
        ):
            describe(str(target))
    load_tokenizer(str(target))
    change(target / "tokenizer_config.json", tokenizer_class="Unheard")
    with suppress(UserError):  # whether it loads at all is transformers' affair
        load_tokenizer(str(target))
    assert asked == []
    assert not touched.exists()


class Touching:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("beside", [False, True])
def test_weights_that_are_pickled_are_refused(target: Path, tmp_path: Path, beside: bool) -> None:
    touched = tmp_path / "touched"
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    (target / "pytorch_model.bin").write_bytes(pickle.dumps(Touching(touched)))
    if not beside:
        with pytest.raises(UserError, match=r"has no \*\.safetensors file. Convert its weights"):
            describe(str(target))
    else:  # under a name that transformers does not look for
        save_file(weights, target / "other.safetensors")
        with pytest.raises(Exception, match=r"safetensors"):
            load_causal(describe(str(target)), dtype=torch.float32, device="cpu")
    assert not touched.exists()


# Paths


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints after 2 and 4 steps, and one of somebody else's beside it."""
    group = {"drafter": {"w": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}}
    for folder, steps in ((tmp_path / "run", 2), (tmp_path / "run", 4), (tmp_path / "other", 4)):
        copies = {name: HostCopy(tensors) for name, tensors in group.items()}
        for name, copy in copies.items():
            copy.take(group[name])
        store.write(folder, steps, copies, {})
    return tmp_path / "run"


def assert_newest_is_refused(run: Path, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        store.newest(run, previous=False, tell=lambda text: None)
    saved = store.newest(run, previous=True, tell=lambda text: None)
    assert saved is not None
    assert saved.steps == 2


@pytest.mark.parametrize("text", ["../../other/checkpoints/step-00000004", "/etc/passwd", "step-00000004/../x", "."])
def test_a_pointer_leads_nowhere_else(run: Path, text: str) -> None:
    (run / "checkpoints" / "latest").write_text(text)
    with pytest.raises(UserError, match=r"latest must name the newest checkpoint, got "):
        store.newest(run, previous=False, tell=lambda text: None)


@pytest.mark.parametrize(("pointer", "which"), [("latest", "newest"), ("best", "best")])
def test_a_pointer_is_no_link(run: Path, pointer: str, which: str) -> None:
    assert store.point_best(run, 4)
    (run / "checkpoints" / pointer).rename(run / "elsewhere")
    (run / "checkpoints" / pointer).symlink_to("../elsewhere")
    with pytest.raises(UserError, match=rf"{pointer} must name the {which} checkpoint, but it is a link"):
        store.named(run, pointer, ["drafter.safetensors"])
    if pointer == "latest":
        with pytest.raises(UserError, match=r"latest must name the newest checkpoint, but it is a link"):
            store.newest(run, previous=False, tell=lambda text: None)


def test_a_manifest_lists_no_other_files(run: Path, tmp_path: Path) -> None:
    path = run / "checkpoints" / "step-00000004" / "manifest.json"
    tree = json.loads(path.read_text())
    for name in ("../../../other/checkpoints/step-00000004/state.json", "/etc/passwd", "more.safetensors"):
        files = {**tree["files"], name: tree["files"]["state.json"]}
        path.write_text(json.dumps({**tree, "files": files}))
        assert_newest_is_refused(run, rf"manifest\.json lists '{name}', which is no file of one")


@pytest.mark.parametrize("file", ["state.json", "drafter.safetensors", "manifest.json", ""])
def test_a_checkpoint_holds_no_links(run: Path, file: str) -> None:
    """Not even to what would be right."""
    place = run / "checkpoints" / "step-00000004" / file
    place.rename(run / "moved")
    place.symlink_to(run / "moved")
    assert_newest_is_refused(
        run, r"step-00000004 is damaged: .*(is a link|cannot be read \(Too many levels of symbolic links\))"
    )


def test_a_file_that_no_manifest_lists_is_not_read(run: Path) -> None:
    save_file({"w": torch.zeros(3)}, run / "checkpoints" / "step-00000004" / "zz.safetensors")
    saved = store.newest(run, previous=False, tell=lambda text: None)
    assert saved is not None
    assert [(file, name) for file, name, _ in saved.tensors()] == [("drafter", "w"), ("optimizer", "m")]


def test_sweeping_and_pruning_leave_what_is_not_theirs(run: Path, tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", run / "checkpoints"
    precious.mkdir()
    (precious / "thesis.txt").write_text("text")
    (folder / ".step-00000009.1").symlink_to(precious)
    (folder / ".bashrc").write_text("somebody's")
    (folder / ".best.new").write_text("step-0")  # of a killed process
    store.sweep(run)
    assert not (folder / ".best.new").exists()
    assert not (folder / ".step-00000009.1").is_symlink()
    assert (precious / "thesis.txt").exists()
    assert (folder / ".bashrc").exists()


def test_a_run_writes_through_no_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("text")
    run = tmp_path / "run"
    run.mkdir()
    (run / "events.jsonl").symlink_to(precious)
    with pytest.raises(UserError, match=r"events\.jsonl is a link, and a run writes only into its own folder"):
        EventLog(run)
    (run / "stacks.txt").symlink_to(precious)
    write_stacks(run / "stacks.txt")
    assert "MainThread" in (run / "stacks.txt").read_text()
    (run / "quarantine.jsonl").symlink_to(precious)
    with Quarantine(run) as quarantine, pytest.raises(UserError, match=r"quarantine\.jsonl is a link"):
        quarantine.write("quarantined", row=3)
    (run / f".settings.yaml.{os.getpid()}.new").symlink_to(precious)
    write_whole(run / "settings.yaml", "new")
    assert (run / "settings.yaml").read_text() == "new"
    assert precious.read_text() == "text"


@pytest.mark.parametrize("name", ["../other.arrow", "/etc/passwd", "a/b.arrow", "..", "x\0y"])
def test_a_datasets_manifest_names_files_in_it_alone(
    write_dataset: Callable[..., Path], random_rows: list[Any], name: str
) -> None:
    folder = write_dataset(random_rows)
    tree = json.loads((folder / "manifest.json").read_text())
    tree["shards"][0]["file"] = name
    (folder / "manifest.json").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"names no file in the folder"):
        open_dataset(folder)
    (folder / "manifest.json").unlink()
    change(folder / "state.json", _data_files=[{"filename": name}])
    with pytest.raises(UserError, match=r"has no readable state\.json"):
        open_dataset(folder)


# Secrets


def generate(*args: object) -> str:
    done = CliRunner().invoke(app, ["generate", *map(str, args)])
    return done.output + (f"{done.exception}" if done.exception is not None else "")


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(remote_server, "FIRST_WAIT_S", 0.02)
    (tmp_path / "asked").mkdir()
    path = tmp_path / "asked" / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{5 + i} w9"}) + "\n" for i in range(12)))
    return path


@pytest.mark.parametrize("how", ["well", "denied", "broken", "refusing one"])
def test_a_servers_key_comes_from_the_environment_and_is_written_nowhere(
    prompts: Path, tmp_path: Path, tiny_folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers repeat it in what they say, as some do."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    repeated = {"error": {"message": f"Bearer {KEY} is not what was wanted"}}

    def respond(body: dict[str, Any]) -> Any:
        if how == "denied":
            return 401, {}, repeated
        probe = body["max_tokens"] == 1
        if how == "broken" and not probe:
            return 400, {}, repeated
        if how == "refusing one" and not probe and body["prompt"][0] == 7:
            return 400, {}, repeated
        return vllm(body)

    out = tmp_path / "out"
    with serving(respond) as server:
        said = generate(
            prompts, "--target", tiny_folder, "--out", out, "--served-name", MODEL, "--server", server.url,
            "--max-new-tokens", 20, "--max-quarantined", 0.5,
        )  # fmt: skip
        assert server.keys == {f"Bearer {KEY}"}, "it was used"
    assert KEY not in said
    assert KEY.encode() not in (everything(out) if out.exists() else b"")
    if how == "well":
        assert "Finished 12 conversations" in said
    if how == "refusing one":
        assert "***" in (out / "quarantine-00000.jsonl").read_text(), "the message was kept without it"


@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{KEY}@localhost:9", f"http://{KEY}@localhost:9", f"http://user:{KEY}@localhost:port",
        f"http://localhost:9/?api_key={KEY}", f"http://localhost:9/v1#{KEY}", f"user:{KEY}@localhost:9", f"{KEY}://x",
    ],
)  # fmt: skip
def test_a_key_in_a_url_is_refused_and_not_repeated(prompts: Path, tmp_path: Path, tiny_folder: Path, url: str) -> None:
    out = tmp_path / "out"
    said = generate(prompts, "--target", tiny_folder, "--out", out, "--server", url, "--max-new-tokens", 20)
    assert "URL" in said
    if "@" in url or "localhost" in url:
        assert KEY not in said
    assert not out.exists() or KEY.encode() not in everything(out)


def test_what_is_in_the_environment_is_in_no_file_of_a_run(
    tmp_path: Path,
    tiny_folder: Path,
    shape: Any,
    write_dataset: Callable[..., Path],
    random_rows: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.config import RunSettings
    from paceline.observe.console import Console
    from paceline.recipes.train import train

    for name in (KEY_VARIABLE, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.setenv(name, KEY)
    tree = {
        "run_dir": str(tmp_path / "run"),
        "target": {"model": str(tiny_folder), "dtype": "float32"},
        "drafter": shape.model_dump(),
        "data": {"dataset": str(write_dataset(random_rows)), "token_budget": 120, "align": 8},
        "train": {"max_steps": 2, "context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4, "policy": "eager"},
    }
    train(RunSettings.model_validate(tree), console=Console(json=True))
    assert os.environ[KEY_VARIABLE] == KEY
    assert KEY.encode() not in everything(tmp_path / "run")
