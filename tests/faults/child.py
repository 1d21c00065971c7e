"""What a forked process runs: `paceline` with ARGUMENTS, its output in OUTPUT; see conftest.

SLOW_S lengthens every sync of a checkpoint's file, and steps. FAULT, unless None, is the name of a file in this folder
and the keyword arguments of its `inject`, which breaks something in this process.
"""

import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

import torch

from paceline import cli

handle = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT)
os.dup2(handle, 1)
os.dup2(handle, 2)
os.makedirs(TEMP, exist_ok=True)
os.environ["TMPDIR"] = tempfile.tempdir = TEMP
torch.set_num_threads(1)

if SLOW_S:
    whole = os.fsync

    def fsync(handle: int) -> None:
        if "/checkpoints/" in os.readlink(f"/proc/self/fd/{handle}"):
            time.sleep(SLOW_S)
        whole(handle)

    os.fsync = fsync

    from paceline.train.step import DrafterStep

    step = DrafterStep.update

    def update(self: DrafterStep, lr: float) -> None:
        time.sleep(min(4 * SLOW_S, 0.05))  # else steps are so short that kills come too late
        step(self, lr)

    DrafterStep.update = update

if FAULT is not None:
    runpy.run_path(str(Path(FOLDER, f"{FAULT[0]}.py")))["inject"](**FAULT[1])

sys.argv = ["paceline", *ARGUMENTS]
cli.main()
