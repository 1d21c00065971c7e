"""A run that fails while another role is deep inside torch still ends with status 1; and one that is asked to stop,
with 75, or 130 when asked twice."""

import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunSettings
from paceline.config_file import dump_settings

SCRIPT = """
    import os, sys, threading
    import torch
    from paceline import cli
    from paceline.target.model import FeatureTarget

    torch.set_num_threads(1)
    whole = FeatureTarget.features
    calls = {"count": 0}

    def features(self, *args):
        calls["count"] += 1
        if calls["count"] > 3:  # two rehearsals and the first micro-batch went well
            if threading.current_thread().name == "target replica 1":
                print("busy", flush=True)
                x = torch.ones(2000, 2000)
                while True:  # never looks at anything else
                    x = x @ x * 1e-4
            if %(fail)s:
                raise RuntimeError("device lost")
            threading.Event().wait(60)
        return whole(self, *args)

    FeatureTarget.features = features
    sys.argv = ["paceline", "train", sys.argv[1]]
    cli.main()
"""


@pytest.mark.faults
@pytest.mark.parametrize("how", ["fault", "stop", "stop twice"])
def test_the_status_is_right_although_a_role_stays_busy(
    tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list, how: str
) -> None:
    tree = {
        "run_dir": str(tmp_path / "run"),
        "target": {"model": str(tiny_folder), "dtype": "float32"},
        "drafter": shape.model_dump(),
        "data": {"dataset": str(write_dataset(random_rows)), "max_batch": 2},
        "train": {"context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4, "dtype": "float32"},
        "pipeline": {"targets": ["cpu", "cpu"], "credit_gib": 1e-6, "restarts": 0, "work_timeout_s": 6},
        "checkpoint": {"grace_s": 3},
    }
    settings = tmp_path / "RUN.yaml"
    settings.write_text(dump_settings(RunSettings.model_validate(tree)))
    script = textwrap.dedent(SCRIPT) % {"fail": how == "fault"}
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(settings)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if how != "fault":
        assert process.stdout is not None
        assert any("busy" in line for line in process.stdout)
        process.send_signal(2)
    if how == "stop twice":
        time.sleep(0.5)
        process.send_signal(15)
    _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - began < 45
    assert "terminate called" not in stderr
    if how == "fault":
        assert process.returncode == 1
        assert re.search("^error: (No target replica is left|Two replicas have failed at micro-batch)", stderr, re.M)
        assert re.search(r"target replica 0 on cpu failed while running \(.+\): RuntimeError: device lost", stderr)
        assert "target replica 1 on cpu hangs" in stderr
        assert "target replica 1" in (tmp_path / "run" / "stacks.txt").read_text()
    elif how == "stop":
        assert process.returncode == 75
        assert re.search(
            rf"^stopped: after step [01] of 72, .+\. Go on with `paceline train {tmp_path}/run --resume`\. "
            r"It took longer than checkpoint\.grace_s \(3 s\)\.$",
            stderr.strip(),
        )
    else:
        assert process.returncode == 130
        assert stderr.strip().endswith("error: interrupted")
