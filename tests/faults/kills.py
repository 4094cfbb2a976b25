"""How many processes a test kills. RATOON_KILLS=50 asks for more than a run of all tests has time for."""

from __future__ import annotations

import os


def number_of_kills(usual: int) -> int:
    return int(os.environ.get("RATOON_KILLS", usual))
