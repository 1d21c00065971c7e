"""Settings: what is written is read back equal, and whatever is wrong is named with its key and place."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paceline import __version__
from paceline.config import DataSettings, DrafterSettings, PipelineSettings, RunSettings, TargetSettings, TrainSettings
from paceline.config_file import dump_settings, load_settings
from paceline.recipes.init import default_taps
from paceline.records import UserError

TREE: dict[str, Any] = {
    "run_dir": "run",
    "target": {"model": "t"},
    "drafter": {
        "taps": [1, 3],
        "mask_token_id": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "rope_theta": 10000.0,
    },
    "data": {"dataset": "dataset"},
}


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A RUN.yaml in the working folder, so that messages name it without a path."""
    monkeypatch.chdir(tmp_path)
    Path("RUN.yaml").write_text(dump_settings(RunSettings.model_validate(TREE)))
    return Path("RUN.yaml")


def written(text: str) -> Path:
    Path("RUN.yaml").write_text(text, encoding="utf-8")
    return Path("RUN.yaml")


# --- there and back

# What YAML takes for something else than a text, or cannot hold without quotes.
NASTY = [
    *(
        "off",
        "yes",
        "null",
        "~",
        "true",
        "1",
        "0123",
        "0x1f",
        "12e4567",
        "1e3",
        ".5",
        ".inf",
        "nan",
        "2024-01-05",
        "<<",
    ),
    *("a # b", "a: b", "- a", "{a", "[a", "'a", '"a"', "%a", "@a", "&a", "*a", "!a", "|", "?", "a\nb", "a\n\n b", "\n"),
    *(
        " a ",
        "\ta",
        "a\x85b",
        "a\u2028b",
        "a\rb",
        "\x07",
        "\ufeffa",
        "é",
        "🙂",
        "a\\b",
        "...",
        "---",
        "1:30",
        "=",
        "a,b",
    ),
]


def random_settings(draw: random.Random) -> RunSettings:
    def text() -> str:
        return draw.choice(
            [*NASTY, "".join(draw.choice("ab:#'\"\\ \n-{}[],&*~0.e") for _ in range(draw.randint(1, 12)))]
        )

    def number(low: float, high: float) -> float:
        return draw.choice([low, high, draw.uniform(low, high)])

    kv_heads = draw.randint(1, 8)
    min_batch, anchors, align = draw.randint(1, 9), draw.randint(1, 999), draw.randint(1, 99)
    cache = draw.choice(["off", "memory", "disk"])
    edges = sorted({align * draw.randint(1, 99) for _ in range(draw.randint(1, 4))})
    folders = tuple({text() for _ in range(draw.randint(1, 3))})
    return RunSettings(
        run_dir=text(),
        target=TargetSettings(
            model=text(),
            revision=draw.choice([None, text()]),
            dtype=draw.choice(["float32", "bfloat16"]),
        ),
        drafter=DrafterSettings(
            block_size=draw.randint(2, 32),
            layers=draw.randint(1, 9),
            taps=tuple(sorted(draw.sample(range(64), draw.randint(1, 6)))),
            mask_token_id=draw.randint(0, 2**31 - 1),
            heads=kv_heads * draw.randint(1, 8),
            kv_heads=kv_heads,
            head_dim=2 * draw.randint(1, 99),
            intermediate_size=draw.randint(1, 9999),
            rope_theta=number(1e-300, 1e300),
            rms_norm_eps=number(1e-12, 1e-3),
        ),
        data=DataSettings(
            dataset=text() if len(folders) == 1 else folders,
            edges=draw.choice([None, tuple(edges)]),
            align=align,
            min_batch=min_batch,
            max_batch=min_batch + draw.randint(0, 9),
            layout=draw.choice(["bucketed", "trimmed"]),
            weights=draw.choice([None, [float(draw.randint(1, 9)) for _ in folders]]),
            prefetch=draw.randint(1, 99),
            reshuffle="batches" if cache != "off" else draw.choice(["samples", "batches"]),
        ),
        train=TrainSettings(
            max_steps=draw.choice([None, draw.randint(1, 2**31 - 1)]),
            anchors_per_sample=anchors,
            anchor_slots=anchors + draw.randint(0, 99),
            optimizer=draw.choice(["adamw", "muon"]),
            lr=number(1e-300, 1e300),
            betas=(number(0, 0.999), number(0, 0.999)),
            gamma=draw.choice([None, number(1e-7, 1e7)]),
            seed=draw.choice([0, 2**63 - 1, draw.randrange(2**63)]),
        ),
        pipeline=PipelineSettings(
            targets=tuple(text() for _ in range(draw.randint(1, 3))), drafters=(text(),), feature_cache=cache
        ),
    )


@pytest.mark.parametrize("seed", range(8))
def test_what_is_written_is_read_back_equal(run_yaml: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        settings = random_settings(draw)
        assert load_settings(written(dump_settings(settings))) == settings


@pytest.mark.parametrize("text", NASTY)
def test_any_text_survives_a_file_and_an_override(run_yaml: Path, text: str) -> None:
    settings = RunSettings.model_validate({**TREE, "run_dir": text, "pipeline": {"targets": ["cpu", text]}})
    assert load_settings(written(dump_settings(settings))) == settings
    quoted = json.dumps(text, ensure_ascii=False) if text[0] in "\"'" or text in ("~", "null") else text
    lists = json.dumps(["cpu", text], ensure_ascii=max(text) < "\U00010000")  # JSON escapes those as two
    Path("RUN.yaml").write_text(dump_settings(RunSettings.model_validate(TREE)))
    assert load_settings(run_yaml, [f"run_dir={quoted}", f"pipeline.targets={lists}"]) == settings


@pytest.mark.parametrize("seed", range(3))
def test_every_setting_can_be_an_override(run_yaml: Path, seed: int) -> None:
    settings = random_settings(random.Random(seed))
    overrides = []
    for section, values in settings.model_dump(mode="json").items():
        leaves = {f"{section}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {}
        overrides += [f"{key}={json.dumps(value)}" for key, value in (leaves or {section: values}).items()]
    assert load_settings(run_yaml, overrides) == settings


def test_every_line_of_a_written_file_has_its_comment(run_yaml: Path) -> None:
    lines = [line for line in run_yaml.read_text().splitlines() if line]
    assert all("  # " in line for line in lines)
    settings = RunSettings.model_validate(TREE)
    sections = [value for value in settings.model_dump().values() if isinstance(value, dict)]
    assert len(lines) == 2 + sum(1 + len(section) for section in sections)  # version and run_dir


def test_the_last_override_wins_and_the_file_stays(run_yaml: Path) -> None:
    before = run_yaml.read_text()
    assert load_settings(run_yaml, ["train.lr=1", "train.lr=2e-3"]).train.lr == 2e-3
    assert run_yaml.read_text() == before


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("train.lr=2e-3", "lr", 2e-3),  # a text in YAML 1.1
        ("train.max_steps=1e3", "max_steps", 1000),
        ("train.max_steps=null", "max_steps", None),
        ("train.betas=[0, .5]", "betas", (0.0, 0.5)),
        ("train.gamma=", "gamma", None),
        ("train.optimizer=muon", "optimizer", "muon"),
    ],
)
def test_values_of_overrides(run_yaml: Path, override: str, key: str, value: object) -> None:
    assert getattr(load_settings(run_yaml, [override]).train, key) == value


def test_off_is_a_word(run_yaml: Path) -> None:
    """YAML 1.1 reads it as false; people write it without quotes."""
    assert load_settings(run_yaml, ["pipeline.feature_cache=off"]).pipeline.feature_cache == "off"
    written(run_yaml.read_text().replace("feature_cache: 'off'", "feature_cache: off"))
    assert load_settings(run_yaml).pipeline.feature_cache == "off"


def test_a_file_without_defaulted_sections(run_yaml: Path) -> None:
    assert load_settings(written(json.dumps(TREE))) == RunSettings.model_validate(TREE)


@pytest.mark.parametrize(
    ("value", "folders"),
    [
        ("a", ("a",)),
        ("12", ("12",)),
        ("1e5", ("1e5",)),
        ("a b", ("a b",)),
        ("[a]", ("a",)),
        ("[a, b/c]", ("a", "b/c")),
        ("[\"12\", '[x]']", ("12", "[x]")),
        ('"[x]"', ("[x]",)),
    ],
)
def test_datasets_of_an_override(run_yaml: Path, value: str, folders: tuple[str, ...]) -> None:
    settings = load_settings(run_yaml, [f"data.dataset={value}"])
    assert settings.data.folders == folders
    assert load_settings(written(dump_settings(settings))) == settings


def test_weights_of_datasets(run_yaml: Path) -> None:
    settings = load_settings(run_yaml, ["data.dataset=[a, b]", "data.weights=[1, 0.25]"])
    assert settings.data.weights == (1.0, 0.25)
    assert load_settings(written(dump_settings(settings))) == settings
    assert load_settings(run_yaml, ["data.weights=null"]).data.weights is None


def test_a_packed_row_of_all_context_slots(run_yaml: Path) -> None:
    packed = ["data.layout=packed", "data.token_budget=8192"]
    assert load_settings(run_yaml, packed).data.layout == "packed"
    assert load_settings(run_yaml).data.layout == "trimmed"


@pytest.mark.parametrize(("steps", "due"), [(1, False), (3, True), (4, False), (6, True), (8, True)])
def test_when_a_held_out_loss_is_due(run_yaml: Path, steps: int, due: bool) -> None:
    evaluate = load_settings(run_yaml, ["evaluate.held_out=others", "evaluate.every_steps=3"]).evaluate
    assert evaluate.due(steps, 8) == due
    assert not load_settings(run_yaml).evaluate.due(200, 200)


@pytest.mark.parametrize(
    ("steps", "held_out", "tau"),
    [(1, False, False), (3, True, False), (4, True, True), (6, True, False), (7, True, True)],
)
def test_true_acceptance_is_compared_with_the_held_out_rows_of_the_same_state(
    run_yaml: Path, steps: int, held_out: bool, tau: bool
) -> None:
    given = ["evaluate.held_out=others", "evaluate.every_steps=3", "evaluate.device=cpu", "evaluate.tau_every_steps=4"]
    evaluate = load_settings(run_yaml, given).evaluate
    assert (evaluate.due(steps, 7), evaluate.tau_due(steps, 7)) == (held_out, tau)
    assert not load_settings(run_yaml, given[:2]).evaluate.tau_due(steps, 7)


def test_what_the_best_is_chosen_by(run_yaml: Path) -> None:
    for given, by in (([], None), (["held_out=others"], "loss"), (["held_out=others", "device=cpu"], "tau")):
        assert load_settings(run_yaml, [f"evaluate.{one}" for one in given]).evaluate.best_by == by


# --- refused


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.lr", "An override has the form section.key=value, got 'train.lr'."),
        ("=3", "An override has the form section.key=value, got '=3'."),
        ("", "An override has the form section.key=value, got ''."),
        ("train.lrr=1", "Unknown setting train.lrr (in override 'train.lrr=1'). Did you mean train.lr?"),
        ("trian.lr=1", "Unknown setting trian.lr (in override 'trian.lr=1'). Did you mean train.lr?"),
        ("lr=1", "Unknown setting lr (in override 'lr=1'). Did you mean train.lr?"),
        ("train..lr=1", "Unknown setting train..lr (in override 'train..lr=1'). Did you mean train.lr?"),
        ("train.lr.x=1", "Unknown setting train.lr.x (in override 'train.lr.x=1'). Did you mean train.lr?"),
        ("run_dir.x=1", "Unknown setting run_dir.x (in override 'run_dir.x=1'). Did you mean run_dir?"),
        ("foo=1", "Unknown setting foo (in override 'foo=1'). `paceline init` writes a file with every setting."),
        (
            "train={lr: 1}",
            "An override sets one key, got the section train in 'train={lr: 1}'. Write train.epochs=value.",
        ),
        (
            "run_dir=",
            "run_dir must be a text, in quotes where it looks like a number, got None (in override 'run_dir=').",
        ),
        ('run_dir=""', "run_dir must not be empty, got '' (in override 'run_dir=\"\"')."),
        ("train.lr=", "train.lr must be a number, got None (in override 'train.lr=')."),
        ("train.lr=fast", "train.lr must be a number, got 'fast' (in override 'train.lr=fast')."),
        ("train.lr=0", "train.lr must be greater than 0, got 0 (in override 'train.lr=0')."),
        ("train.lr=inf", "train.lr must be a finite number, got 'inf' (in override 'train.lr=inf')."),
        ("train.lr=.inf", "train.lr must be a finite number, got inf (in override 'train.lr=.inf')."),
        ("train.lr=1e999", "train.lr must be a finite number, got inf (in override 'train.lr=1e999')."),
        (
            "train.weight_decay=.nan",
            "train.weight_decay must be a finite number, got nan (in override 'train.weight_decay=.nan').",
        ),
        ("train.lr=true", "train.lr must not be true or false, got True (in override 'train.lr=true')."),
        ("train.epochs=true", "train.epochs must not be true or false, got True (in override 'train.epochs=true')."),
        (
            "drafter.taps=[true, 2]",
            "drafter.taps must not be true or false, got [True, 2] (in override 'drafter.taps=[true, 2]').",
        ),
        ("train.epochs=yes", "train.epochs must be a whole number, got 'yes' (in override 'train.epochs=yes')."),
        ("train.epochs=1.5", "train.epochs must be a whole number, got 1.5 (in override 'train.epochs=1.5')."),
        ("train.epochs=[1]", "train.epochs must be a whole number, got [1] (in override 'train.epochs=[1]')."),
        ("train.epochs=[1", "The value of override 'train.epochs=[1' is not valid YAML. Write a number, word or list."),
        (
            "train.seed=9223372036854775808",
            "train.seed must be less than 9223372036854775808, got 9223372036854775808 "
            "(in override 'train.seed=9223372036854775808').",
        ),
        (
            "pipeline.credit_gib=1e300",
            "pipeline.credit_gib must be less than or equal to 1048576, got 1e+300 "
            "(in override 'pipeline.credit_gib=1e300').",
        ),
        (
            "drafter.block_size=1",
            "drafter.block_size must be greater than or equal to 2, got 1 (in override 'drafter.block_size=1').",
        ),
        ("train.betas=[0.9, 1]", "train.betas[1] must be less than 1, got 1 (in override 'train.betas=[0.9, 1]')."),
        (
            "train.betas=[-0.1, 0.9]",
            "train.betas[0] must be greater than or equal to 0, got -0.1 (in override 'train.betas=[-0.1, 0.9]').",
        ),
        ("train.betas=[0.9]", "train.betas must have more items, got [0.9] (in override 'train.betas=[0.9]')."),
        (
            "train.betas=[0, 0, 0]",
            "train.betas must have at most 2 items, not 3, got [0, 0, 0] (in override 'train.betas=[0, 0, 0]').",
        ),
        ("drafter.taps=3", "drafter.taps must be a list such as [a, b], got 3 (in override 'drafter.taps=3')."),
        ("drafter.taps=[]", "drafter.taps must have at least 1 item, not 0, got [] (in override 'drafter.taps=[]')."),
        ("drafter.taps=[a]", "drafter.taps[0] must be a whole number, got 'a' (in override 'drafter.taps=[a]')."),
        ("data.edges=[]", "data.edges must have at least 1 item, not 0, got [] (in override 'data.edges=[]')."),
        (
            "target.dtype=fp16",
            "target.dtype must be 'float32' or 'bfloat16', got 'fp16' (in override 'target.dtype=fp16').",
        ),
        # rules about a section name its key
        (
            "drafter.heads=3",
            "drafter.kv_heads must divide heads, got 2 and 3 (in RUN.yaml with override 'drafter.heads=3').",
        ),
        (
            "drafter.head_dim=3",
            "drafter.head_dim must be even, got 3 (in RUN.yaml with override 'drafter.head_dim=3').",
        ),
        (
            "drafter.taps=[2, 1]",
            "drafter.taps must ascend strictly from 0 up, got (2, 1) "
            "(in RUN.yaml with override 'drafter.taps=[2, 1]').",
        ),
        (
            "drafter.taps=[-1, 1]",
            "drafter.taps must ascend strictly from 0 up, got (-1, 1) "
            "(in RUN.yaml with override 'drafter.taps=[-1, 1]').",
        ),
        (
            "data.edges=[128, 64]",
            "data.edges must ascend strictly, got (128, 64) (in RUN.yaml with override 'data.edges=[128, 64]').",
        ),
        (
            "data.dataset=[]",
            "data.dataset must be a folder or a list of folders, numbers in quotes, got [] "
            "(in override 'data.dataset=[]').",
        ),
        (
            "data.dataset=[a, 3]",
            "data.dataset must be a folder or a list of folders, numbers in quotes, got ['a', 3] "
            "(in override 'data.dataset=[a, 3]').",
        ),
        (
            'data.dataset=[a, "b\\0"]',
            "data.dataset must be a folder or a list of folders, numbers in quotes, got ['a', 'b\\x00'] "
            "(in override 'data.dataset=[a, \"b\\\\0\"]').",
        ),
        (
            "data.dataset=[a, b, a]",
            "data.dataset must name each folder once; data.weights takes one more often, got ['a', 'b', 'a'] "
            "(in override 'data.dataset=[a, b, a]').",
        ),
        (
            "data.weights=[1, 2]",
            "data.weights must be one a dataset, got 2 for 1 (in RUN.yaml with override 'data.weights=[1, 2]').",
        ),
        (
            "data.weights=[0]",
            "data.weights[0] must be greater than or equal to 0.000001, got 0 (in override 'data.weights=[0]').",
        ),
        (
            "data.weights=[1e-300]",
            "data.weights[0] must be greater than or equal to 0.000001, got 1e-300 "
            "(in override 'data.weights=[1e-300]').",
        ),
        (
            "data.dataset=[a, b/../a/]",
            "data.dataset must name each folder once; data.weights takes one more often, got ['a', 'b/../a/'] "
            "(in override 'data.dataset=[a, b/../a/]').",
        ),
        (
            "data.token_budget=1000000000000",
            "data.token_budget must be less than or equal to 16777216, got 1000000000000 "
            "(in override 'data.token_budget=1000000000000').",
        ),
        ("data.prefetch=0", "data.prefetch must be greater than or equal to 1, got 0 (in override 'data.prefetch=0')."),
        (
            "data.layout=square",
            "data.layout must be 'bucketed', 'trimmed' or 'packed', got 'square' (in override 'data.layout=square').",
        ),
        (
            "data.layout=packed",
            "data.token_budget must not exceed train.context_slots with data.layout: packed, got 32768 > 8192: "
            "lower it to that (in RUN.yaml with override 'data.layout=packed').",
        ),
        (
            "data.max_batch=0",
            "data.max_batch must be greater than or equal to 1, got 0 (in override 'data.max_batch=0').",
        ),
        (
            "data.min_batch=65",
            "data.max_batch must be at least min_batch, got 64 < 65 (in RUN.yaml with override 'data.min_batch=65').",
        ),
        (
            "train.anchor_slots=1",
            "train.anchors_per_sample (512) must not exceed anchor_slots (1) "
            "(in RUN.yaml with override 'train.anchor_slots=1').",
        ),
        (
            "pipeline.feature_cache=disk",
            "pipeline.feature_cache: disk keeps features by batch, so it needs data.reshuffle: batches, got samples "
            "(in RUN.yaml with override 'pipeline.feature_cache=disk').",
        ),
        (
            "evaluate.held_out=dataset/.",
            "evaluate.held_out must be none of the folders of data.dataset, got dataset/. "
            "(in RUN.yaml with override 'evaluate.held_out=dataset/.').",
        ),
        ("evaluate.held_out=''", "evaluate.held_out must not be empty, got '' (in override \"evaluate.held_out=''\")."),
        (
            "evaluate.device=cpu",
            "evaluate.device needs prompts to decode: set prompts, or held_out whose rows have some "
            "(in RUN.yaml with override 'evaluate.device=cpu').",
        ),
        (
            "evaluate.every_steps=0",
            "evaluate.every_steps must be greater than or equal to 1, got 0 (in override 'evaluate.every_steps=0').",
        ),
    ],
)
def test_overrides_that_are_refused(run_yaml: Path, override: str, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        load_settings(run_yaml, [override])
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("  lr:", "  lrr:", "Unknown setting train.lrr (in RUN.yaml). Did you mean train.lr?"),
        ("train:", "trian:", "Unknown setting trian (in RUN.yaml). Did you mean train?"),
        (
            "train:",
            "foo: 1\ntrain:",
            "Unknown setting foo (in RUN.yaml). `paceline init` writes a file with every setting.",
        ),
        ("lr: 0.0006", "lr: .nan", "train.lr must be a finite number, got nan (in RUN.yaml)."),
        (
            "block_size: 16",
            "block_size: 1",
            "drafter.block_size must be greater than or equal to 2, got 1 (in RUN.yaml).",
        ),
        ("heads: 4", "heads: 3", "drafter.kv_heads must divide heads, got 2 and 3 (in RUN.yaml)."),
        (
            "revision: null",
            "revision: 1234567",
            "target.revision must be a text, in quotes where it looks like a number, got 1234567 (in RUN.yaml).",
        ),
        ("betas: [0.9, 0.95]", "betas: [0.9, x]", "train.betas[1] must be a number, got 'x' (in RUN.yaml)."),
        (
            "lr: 0.0006",
            "lr: [1",
            "RUN.yaml:{after} is not valid YAML: expected ',' or ']', but got '<scalar>'. Correct the file.",
        ),
        (
            "  lr: 0.0006",
            "\tlr: 1",
            "RUN.yaml:{line} is not valid YAML: found character '\\t' that cannot start any token. Correct the file.",
        ),
        ("  clip: 1.0", "  lr: 1", "RUN.yaml:{line} is not valid YAML: lr is given twice. Correct the file."),
        (
            "run_dir: run",
            "run_dir: !!python/name:os.system",
            "RUN.yaml:{line} is not valid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'. Correct the file.",
        ),
    ],
)
def test_files_that_are_refused(run_yaml: Path, old: str, new: str, sentence: str) -> None:
    text = run_yaml.read_text()
    line = text[: text.index(old)].count("\n") + 1
    with pytest.raises(UserError) as caught:
        load_settings(written(text.replace(old, new, 1)))
    assert str(caught.value) == sentence.format(line=line, after=line + 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "RUN.yaml must hold a mapping of settings, found NoneType. Write one with `paceline init`."),
        ("[1]", "RUN.yaml must hold a mapping of settings, found list. Write one with `paceline init`."),
        ("train", "RUN.yaml must hold a mapping of settings, found str. Write one with `paceline init`."),
        ("[" * 1000, None),
        ("run_dir: " + "1" * 5000, None),
        ("run_dir: \x01", None),
        (json.dumps({**TREE, "train": None}), "train must be a section of keys, got None (in RUN.yaml)."),
        (json.dumps({**TREE, "train": 5}), "train must be a section of keys, got 5 (in RUN.yaml)."),
        (
            json.dumps({key: value for key, value in TREE.items() if key != "drafter"}),
            "Setting drafter is required and missing in RUN.yaml. Add it; `paceline init` writes every setting.",
        ),
        (
            json.dumps({**TREE, "data": {}}),
            "Setting data.dataset is required and missing in RUN.yaml. Add it; `paceline init` writes every setting.",
        ),
        (
            json.dumps({**TREE, "data": {"datset": "x"}}),
            "Setting data.dataset is required and missing in RUN.yaml. Add it; `paceline init` writes every setting. "
            "Unknown setting data.datset (in RUN.yaml). Did you mean data.dataset?",
        ),
    ],
)
def test_texts_that_are_refused(run_yaml: Path, text: str, sentence: str | None) -> None:
    with pytest.raises(UserError) as caught:
        load_settings(written(text))
    if sentence is None:
        assert str(caught.value).startswith("RUN.yaml is not valid YAML: ")
        assert "\n" not in str(caught.value)
    else:
        assert str(caught.value) == sentence


@pytest.mark.parametrize(("section", "count"), [("drafter", 7), ("data", 7), ("train", 9), ("pipeline", 3)])
@pytest.mark.parametrize("value", [2**63, 10**30])
def test_every_whole_number_has_an_upper_bound(run_yaml: Path, section: str, count: int, value: int) -> None:
    """Beyond it arrays are asked for that no memory holds, or numbers that no array holds."""
    base = load_settings(run_yaml).model_dump()[section]
    keys = [key for key, default in base.items() if type(default) is int] + ["max_steps"] * (section == "train")
    assert len(keys) == count
    for key in keys:
        with pytest.raises(UserError, match=rf"^{section}\.{key} must be less than (or equal to )?\d+, got {value} \("):
            load_settings(run_yaml, [f"{section}.{key}={value}"])


def test_files_that_cannot_be_read(run_yaml: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^There is no settings file nowhere.yaml. Write one with `paceline init`.$"):
        load_settings(Path("nowhere.yaml"))
    run_yaml.write_bytes(b"run_dir: \xff\n")
    with pytest.raises(UserError, match="^RUN.yaml cannot be read as UTF-8 text: .* 0xff .*Check the file.$"):
        load_settings(run_yaml)
    Path("folder").mkdir()
    with pytest.raises(UserError, match="^folder cannot be read as UTF-8 text: .*Is a directory.*$"):
        load_settings(Path("folder"))


def test_an_override_into_a_section_that_is_none(run_yaml: Path) -> None:
    with pytest.raises(UserError, match="^Override 'train.lr=1' treats train as a section, but it is a value.$"):
        load_settings(written(json.dumps({**TREE, "train": 5})), ["train.lr=1"])


@pytest.mark.parametrize(("layers", "taps"), [(28, (1, 7, 13, 19, 25)), (36, (1, 9, 17, 25, 33)), (9, (1, 2, 4, 5, 6))])
def test_default_taps(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers, 5) == taps


def test_a_shallow_target_has_no_five_taps() -> None:
    assert default_taps(6, 1) == (3,)
    with pytest.raises(UserError, match="^A target of 6 layers has no 5 distinct taps. Ask for fewer taps.$"):
        default_taps(6, 5)


def test_a_file_says_which_version_its_keys_have(run_yaml: Path) -> None:
    text = run_yaml.read_text()
    assert text.startswith("version: 1  # ")
    settings = load_settings(run_yaml)
    older = text.split("\n", 1)[1]  # as it was written before there were versions
    assert load_settings(written(older)) == settings
    assert load_settings(written(json.dumps(TREE))) == settings


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            "2",
            f"version must be at most 1, which is what paceline {__version__} knows, got 2 (in RUN.yaml): a newer "
            "paceline wrote this file. Use that one, or write the file anew with `paceline init`.",
        ),
        *(
            (
                value,
                f"version must be a whole number from 1 up, got {shown} (in RUN.yaml). `paceline init` writes version: "
                "1.",
            )
            for value, shown in (("0", "0"), ("true", "True"), ("1.0", "1.0"), ("'1'", "'1'"), ("null", "None"))
        ),
    ],
)
def test_other_versions_are_refused_by_name(run_yaml: Path, found: str, sentence: str) -> None:
    """Before anything else, since the keys may be others."""
    text = run_yaml.read_text().replace("version: 1 ", f"version: {found} ").replace("lr:", "new_name_of_lr:")
    with pytest.raises(UserError) as caught:
        load_settings(written(text))
    assert str(caught.value) == sentence


def test_no_override_changes_the_version(run_yaml: Path) -> None:
    with pytest.raises(UserError, match="^Unknown setting version "):
        load_settings(run_yaml, ["version=1"])


# Keys that files of version 1 had when versions began. Whoever removes or renames one has to count up and translate.
FIRST_KEYS = """
run_dir target.model target.revision target.dtype drafter.block_size drafter.layers drafter.taps drafter.mask_token_id
drafter.heads drafter.kv_heads drafter.head_dim drafter.intermediate_size drafter.rope_theta drafter.rms_norm_eps
data.dataset data.weights data.max_length data.on_long data.layout data.buckets data.edges data.align data.token_budget
data.min_batch data.max_batch data.reshuffle data.prefetch data.bad_rows train.epochs train.max_steps
train.context_slots train.anchor_slots train.anchors_per_sample train.batches_per_step train.optimizer train.lr
train.schedule train.decay_share train.warmup_share train.min_lr_ratio train.betas train.weight_decay train.clip
train.gamma train.dtype train.policy train.logits_mib train.seed train.init_from train.log_every pipeline.targets
pipeline.drafters pipeline.target_threads pipeline.drafter_threads pipeline.credit_gib pipeline.ready_timeout_s
pipeline.work_timeout_s pipeline.restarts pipeline.feature_cache pipeline.feature_cache_gib checkpoint.every_minutes
checkpoint.every_steps checkpoint.keep checkpoint.on_full_disk checkpoint.grace_s checkpoint.notice_file
evaluate.held_out evaluate.every_steps evaluate.max_rows evaluate.device evaluate.tau_every_steps evaluate.prompts
evaluate.max_prompts evaluate.max_new_tokens evaluate.rows evaluate.disagreement guard.spike guard.window guard.rejected
observe.sample_s observe.trackers observe.on_end
"""


def test_files_of_this_version_keep_their_keys(run_yaml: Path) -> None:
    keys = {
        f"{name}.{key}" if isinstance(value, dict) else name
        for name, value in load_settings(run_yaml).model_dump().items()
        for key in (value if isinstance(value, dict) else [""])
    }
    assert set(FIRST_KEYS.split()) <= keys


def test_the_devices_of_split_replicas() -> None:
    def made(*targets: str, **target: object) -> RunSettings:
        given = {"target": {"model": "m", "devices_per_replica": 2} | target}
        return RunSettings.model_validate({**TREE, **given, "pipeline": {"targets": targets, "drafters": ["cuda:4"]}})

    settings = made("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert settings.replicas == (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"))
    assert (settings.roles, len(settings.devices)) == (3, 5)
    assert made("cpu", "cpu").replicas == (("cpu", "cpu"),)
    with pytest.raises(ValidationError, match=r"must name target.devices_per_replica \(2\) .* got 3: name 4, or"):
        made("cuda:0", "cuda:1", "cuda:2")
    with pytest.raises(ValidationError, match=r"got cuda:2 twice in \['cuda:2', 'cuda:2'\]"):
        made("cuda:0", "cuda:1", "cuda:2", "cuda:2")
