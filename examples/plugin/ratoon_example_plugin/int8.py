"""Checkpoints whose matrices are int8 codes with one scale for each row: `NAME.weight` and `NAME.weight_scale`.

The model sees floats: a tensor is decoded when it is read. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.models.config_fields import ConfigFields

if TYPE_CHECKING:
    from ratoon.layers.weights import Destination, TensorSource

SCALE = "_scale"


class Int8Source:
    """Implements TensorSource over the tensors of the files."""

    def __init__(self, files: TensorSource) -> None:
        self.name = files.name
        self._files = files

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._files.shapes().items() if not name.endswith(SCALE)}

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        if name + SCALE not in self._files.shapes():
            return self._files.read(name, part, destination)
        codes, scales = self._files.read(name).data, self._files.read(name + SCALE).data  # [out, in] int8, [out]
        return StoredTensor.of_floats(codes.float() * scales.float()[:, None], part)


def read_int8(fields: ConfigFields) -> Callable[[TensorSource], TensorSource]:
    """The format of a config.json whose `quantization_config` has the `quant_method` example_int8."""
    bits = fields.count("bits", 8)
    if bits != 8:
        raise fields.wrong("bits", f"is {bits}", "8")
    return Int8Source
