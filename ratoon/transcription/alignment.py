"""The times of a window's tokens, from the weights with which they attend to the encoder's positions: as openai-whisper
and transformers find them.

Weights of the model's alignment heads are normalised over the tokens, smoothed over time, and averaged. What is left
says how well a token and a position fit; dynamic time warping finds the best way through all of them along which both
only go forward. The weights of a token are those with which the token behind it is chosen: where the way first reaches
them is the end of the token, and the beginning of the next. Numpy only, and pure.
"""

from __future__ import annotations

import numpy as np

from ratoon.transcription.vocabulary import MEDIAN_WIDTH

SECONDS_OF_POSITION = 0.02  # of the encoder


def token_times(weights: np.ndarray, median_width: int = MEDIAN_WIDTH) -> np.ndarray:
    """[heads, tokens, positions] → [tokens]: the seconds at which each token ends, never falling; transformers'
    `token_timestamps`. The positions are those of the recording, without padding behind it."""
    _, num_tokens, num_positions = weights.shape
    if num_tokens == 0 or num_positions == 0:
        return np.zeros(num_tokens)
    fit = median_filter(normalised(weights.astype(np.float32)), median_width).mean(axis=0)
    tokens, positions = warp(-fit.astype(np.float64))
    is_first = np.diff(tokens, prepend=-1) > 0  # the steps of the way that reach another token
    return positions[is_first] * SECONDS_OF_POSITION


def normalised(weights: np.ndarray) -> np.ndarray:
    """Every position of a head has a mean of 0 and a deviation of 1 over the tokens; 0, where all tokens are alike."""
    mean = weights.mean(axis=-2, keepdims=True)
    deviation = weights.std(axis=-2, keepdims=True)
    return np.divide(weights - mean, deviation, out=np.zeros_like(weights), where=deviation > 0)


def median_filter(values: np.ndarray, width: int) -> np.ndarray:
    """The median of the `width` values around each one, along the last axis, which is mirrored at its ends."""
    half = width // 2
    if half == 0 or values.shape[-1] <= half:
        return values
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(half, half)], mode="reflect")
    around = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    return np.partition(around, half, axis=-1)[..., half]


def warp(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest way through [tokens, positions] from the first of both to the last of both: rows and columns of its
    steps. A step goes to the next token, to the next position, or to both. Where several are as cheap, the one that
    comes from the position before is taken."""
    num_rows, num_columns = costs.shape
    # An anti-diagonal at a time: its cells depend on the two diagonals before it alone. Cell (i, j) of diagonal i + j
    # is at index i. Sums are float32, as in transformers, where ties and near ties are decided by them.
    previous = np.full(num_rows + 1, np.inf, np.float32)  # index i + 1: row -1 is infinite
    before = previous.copy()
    came_from = np.empty((num_rows, num_columns), np.int8)
    for diagonal in range(num_rows + num_columns - 1):
        rows = np.arange(max(0, diagonal - num_columns + 1), min(diagonal, num_rows - 1) + 1)
        both, row_alone, column_alone = before[rows], previous[rows], previous[rows + 1]
        best = np.minimum(np.minimum(both, row_alone), column_alone)
        if diagonal == 0:
            best = np.zeros(1, np.float32)
        current = np.full(num_rows + 1, np.inf, np.float32)
        current[rows + 1] = costs[rows, diagonal - rows] + best
        came_from[rows, diagonal - rows] = np.where(column_alone == best, 2, np.where(both == best, 0, 1))
        before, previous = previous, current
    return _way_back(came_from)


def _way_back(came_from: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    row, column = came_from.shape[0] - 1, came_from.shape[1] - 1
    way = [(row, column)]
    while row > 0 or column > 0:
        step = 2 if row == 0 else 1 if column == 0 else came_from[row, column]
        row, column = row - (step != 2), column - (step != 1)
        way.append((row, column))
    rows, columns = zip(*reversed(way))
    return np.array(rows), np.array(columns)
