"""The interface of an encoder of images and video for the runner, and its input on the device.

Attention is passed in, because models do not choose kernels. Which inputs run when, and where their rows are kept, is
the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ratoon.core.media import MediaInput

Tensor = torch.Tensor

# q, k, v, each [T, heads, head_dim], and the lengths of runs of rows, which sum to T → [T, heads · head_dim]: every row
# attends to all rows of its run. k and v may be strided views.
Attend = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]


class MediaEncoder(Protocol):
    """Turns pixels into rows of embeddings for the decoder."""

    def encode(self, inputs: Sequence[MediaInput], attend: Attend) -> list[Tensor]:
        """The rows [num_rows, hidden size of the decoder] of each input, in order. All run as one batch."""
        ...


def read_pixels(media: MediaInput, device: torch.device) -> Tensor:
    """The pixels of an input as uint8, on the device, in the shape in which they came."""
    pixels = torch.from_numpy(np.array(media.features.view(), np.uint8)).view(media.features.shape)
    return pixels.to(device)
