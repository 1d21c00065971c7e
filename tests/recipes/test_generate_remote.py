"""`generate` through servers: the folder is that of the built-in engine's kind, and says what answered."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import MODEL, choice, serving, vllm
from typer.testing import CliRunner

from paceline.cli import app
from paceline.decode import remote_server


def generate(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["generate", *map(str, args)])
    return done.exit_code, done.output if done.exception is None else f"{done.output}{done.exception}"


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "completions-00000.jsonl").read_text().splitlines()]


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(remote_server, "FIRST_WAIT_S", 0.02)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{5 + i} w9"}) + "\n" for i in range(12)))
    return path


def test_a_server_answers_with_token_ids(prompts: Path, tmp_path: Path, tiny_folder: Path) -> None:
    with serving(vllm) as one, serving(vllm) as other:
        status, said = generate(
            prompts, "--target", tiny_folder, "--out", tmp_path / "out", "--served-name", MODEL, "--server", one.url,
            "--server", other.url, "--max-new-tokens", 20, "--json",
        )  # fmt: skip
    assert status == 0, said
    summary = json.loads(said[said.index("{") :])
    assert (summary["conversations"], summary["retokenized"], summary["quarantined"]) == (12, 0, {})
    assert summary["asked"]["engine"] == "remote"
    sent = {tuple(body["prompt"]) for server in (one, other) for body in server.asked}
    assert {tuple(row["prompt_ids"]) for row in rows(tmp_path / "out")} == sent
    assert one.asked
    assert other.asked


def test_answers_of_text_are_marked_and_counted(prompts: Path, tmp_path: Path, tiny_folder: Path) -> None:
    with serving(choice) as server:
        status, said = generate(
            prompts, "--target", tiny_folder, "--out", tmp_path / "out", "--served-name", MODEL, "--server", server.url,
            "--max-new-tokens", 20,
        )  # fmt: skip
    assert status == 0, said
    assert "Ids that were made of text: 12 rows." in said
    assert all(row["retokenized"] for row in rows(tmp_path / "out"))


def test_another_model_and_another_engine_are_refused(prompts: Path, tmp_path: Path, tiny_folder: Path) -> None:
    out = tmp_path / "out"
    with serving(vllm) as server:
        asked = (prompts, "--target", tiny_folder, "--out", out, "--max-new-tokens", 20, "--server", server.url)
        status, said = generate(*asked)
        assert status != 0
        assert MODEL in said
        assert "--served-name" in said
        assert generate(*asked, "--device", "cpu")[0] != 0
        assert generate(*asked, "--served-name", MODEL)[0] == 0
    status, said = generate(prompts, "--target", tiny_folder, "--out", out, "--max-new-tokens", 20, "--device", "cpu")
    assert status != 0
    assert 'engine was "remote" and is "built-in" now' in said
