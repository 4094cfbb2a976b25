"""Formats of quantised checkpoints, by `quant_method` of config.json: those that are built in, and those that another
package registers (entry points of the group `ratoon.weight_formats`).

A format reads its settings and returns a function that makes the source of the model's tensors from the files'. It
imports torch only when a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from ratoon.core.errors import ModelError
from ratoon.core.plugins import WEIGHT_FORMATS, PluginError, find_plugin
from ratoon.models import block_fp8_source, mxfp4_source
from ratoon.models.block_fp8_source import BlockFp8Source, read_block
from ratoon.models.config_fields import ConfigFields
from ratoon.models.mxfp4_source import Mxfp4Source
from ratoon.models.packed_source import AWQ, COMPRESSED, GPTQ, PackedSource, read_scheme

if TYPE_CHECKING:
    from ratoon.layers.weights import TensorSource

WrapTensors: TypeAlias = "Callable[[TensorSource], TensorSource]"
# From the fields of `quantization_config`; ModelError for settings that it does not support.
WeightFormatReader: TypeAlias = Callable[[ConfigFields], WrapTensors]


def read_weight_format(raw_config: Mapping[str, Any], source: str) -> WrapTensors | None:
    """What makes the model's tensors from those of the files; None: they are the same. `source` is for messages."""
    if not raw_config.get("quantization_config"):
        return None
    fields = ConfigFields(raw_config, source).below("quantization_config")
    method = fields.text("quant_method", "an unknown method")
    registered = None if method in BUILT_IN else _find_registered(method, source)
    return BUILT_IN.get(method, _read_packed)(fields) if registered is None else registered(fields)


def _find_registered(method: str, source: str) -> WeightFormatReader | None:
    try:
        found: WeightFormatReader | None = find_plugin(WEIGHT_FORMATS, method, callable, "function")
    except PluginError as error:
        raise ModelError(source, f"is quantised with {method}, which {error.problem}", "another version") from error
    return found


def _read_packed(fields: ConfigFields) -> WrapTensors:
    scheme = read_scheme(fields)
    return lambda files: PackedSource(files, scheme)


def _read_fp8(fields: ConfigFields) -> WrapTensors:
    block = read_block(fields)
    return lambda files: BlockFp8Source(files, block)


def _read_mxfp4(fields: ConfigFields) -> WrapTensors:
    return Mxfp4Source


BUILT_IN: dict[str, WeightFormatReader] = {
    **dict.fromkeys((GPTQ, AWQ, COMPRESSED), _read_packed),
    block_fp8_source.METHOD: _read_fp8,
    mxfp4_source.METHOD: _read_mxfp4,
}
