"""The rates that a machine's profile has of its GPUs, for what is predicted from them."""

from pathlib import Path

from paceline.records import UserError
from paceline.runtime.profile import MachineProfile, Rates, load_profile, profile_path, this_machine


def slowest_peer(profile: MachineProfile) -> float | None:
    """Return the rate of the slowest copies between two GPUs, in GB/s; None where nobody measured them."""
    return min((speed for row in profile.peer_gb_s for speed in row if speed is not None), default=None)


def measured_rates(path: Path | None) -> tuple[MachineProfile, Rates]:
    """Return a machine's profile, this one's without a path, and the rates of its slowest GPU.

    Raises:
        UserError: nobody measured them.
    """
    place = path or profile_path()
    profile, reason = load_profile(place, None if path else this_machine())
    if profile is None:
        raise UserError(f"What a run makes is predicted from measured rates. {reason}")
    if not profile.rates:
        raise UserError(
            f"What a run makes is predicted from measured rates, but the machine profile {place} has none of a GPU. "
            "Run `paceline doctor` where the GPUs are, and name its profile with --profile if that is not here."
        )
    return profile, min(profile.rates.values(), key=lambda rates: rates.bf16_tflops)  # a step waits for the slowest
