"""The drafter that a run starts from, where train.init_from names one."""

import textwrap
from pathlib import Path

from paceline.config import RunSettings
from paceline.formats.warm_start import WarmStart, open_warm_start
from paceline.observe.console import Console
from paceline.target.load import TargetFacts


def warm_start(settings: RunSettings, facts: TargetFacts, console: Console) -> WarmStart | None:
    """Return the drafter that train.init_from names, checked, or None where weights are drawn.

    Raises:
        UserError: its weights cannot be used for these settings and this target.
    """
    if settings.train.init_from is None:
        return None
    warm = open_warm_start(
        Path(settings.train.init_from).expanduser(),
        settings.drafter,
        target=facts.name,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        embed_scale=facts.conventions.embed_scale,
        logit_cap=facts.conventions.logit_cap,
    )
    console.line(f"  starting from the {warm.layout} drafter in {warm.folder}")
    for note in warm.notes:
        console.line(textwrap.fill(note, width=80, initial_indent="  ", subsequent_indent="    "))
    return warm
