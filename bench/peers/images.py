"""A worker for images: pictures of random pixels, the same for every engine, and the form of what is asked about them.

    take(asked)           makes the pictures of what is asked next. The engine knows nothing else of it
    answer(num_tokens)    greedy, all that was taken, exactly so many tokens; the new tokens of each

What is asked is a Question: the number of a picture, which decides its pixels, and tokens around it. Needs numpy, which
all engines have with them.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np


class Question(TypedDict):
    picture: int
    side: int  # of the picture, in pixels
    before: list[int]  # tokens before the picture, its placeholder not among them
    after: list[int]


def make_picture(number: int, side: int) -> np.ndarray:
    """[side, side, 3] uint8."""
    return np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
