"""How a run's targets compute on the GPUs that a plan is for, by what is known before one is loaded."""

from paceline.config import RunSettings
from paceline.recipes.target_memory import off_fast_path
from paceline.runtime.profile import MachineProfile
from paceline.target.load import TargetFacts, load_config
from paceline.target.replica import Pace


def expected_pace(run: RunSettings, facts: TargetFacts, profile: MachineProfile) -> tuple[Pace, str]:
    """Return how the targets should compute on the machine of a profile, and how that is called."""
    if off := off_fast_path(run, str(load_config(facts.folder).model_type)):
        return Pace(), f"by transformers' own forward: {off}"
    policy = profile.policy if run.train.policy == "auto" else run.train.policy
    pace = Pace(fast=True, compiled=policy != "eager", fp8=run.target.fp8 == "on")
    if not pace.compiled:
        unknown = "; what fp8 gains there nobody measured" if pace.fp8 else ""
        return pace, f"on the fast path, not compiled (policy eager){unknown}"
    return pace, f"on the fast path, compiled{', in fp8' if pace.fp8 else ''}"
