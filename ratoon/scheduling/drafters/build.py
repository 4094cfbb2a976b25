"""Makes the sources of drafts on the host that the settings name. A new one is a file beside this, a line in MAKERS and
its name in SUPPORTED (core/speculation.py)."""

from __future__ import annotations

from collections.abc import Callable

from ratoon.core.speculation import SpeculationConfig
from ratoon.scheduling.drafters.device import DeviceDrafter
from ratoon.scheduling.drafters.interface import Drafter
from ratoon.scheduling.drafters.own_text import NgramDrafter
from ratoon.scheduling.drafters.roots import RootsDrafter

MAKERS: dict[str, Callable[[SpeculationConfig], Drafter]] = {
    "ngram": lambda config: NgramDrafter(config.ngram_min, config.ngram_max),
    "roots": lambda config: RootsDrafter(config.roots_bytes, config.roots_min_probability, config.roots_factor),
    "draft": lambda config: DeviceDrafter("draft"),
    "head": lambda config: DeviceDrafter("head"),
}


def build_drafters(config: SpeculationConfig) -> list[Drafter]:
    """Returns the sources by priority."""
    return [MAKERS[source.kind](config) for source in config.sources if source.kind in MAKERS]
