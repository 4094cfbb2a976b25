"""The tensors of a checkpoint under the names that a module of the Transformers library has for them.

The names are mostly equal. Where they are not (files without the head's prefix, names of older versions, experts that
files have apart and the module has stacked), the library has rules for its own loading, which are applied here one
tensor at a time. They are of its inside: this file was written for transformers 5.22, and is the only one that uses
them. With a version that has them elsewhere, files whose names are the module's still load.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.layers.stored import StoredTensor, TensorSlice
from ratoon.layers.weights import Destination, TensorSource
from ratoon.models.transformers_trace import build_module

logger = logging.getLogger(__name__)


def with_module_names(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The source itself where its names are those of the module."""
    assert config.library is not None, "a config of a native family"
    root: Any = build_module(json.loads(config.library), config.architecture, source.name)
    if set(source.shapes()) <= set(root.state_dict()):
        return source
    try:
        return _Renamed(source, root)
    except (ImportError, AttributeError, TypeError) as error:
        logger.warning("the library's rules for names of tensors can't be used (%s): they must be the module's", error)
        return source


class _Renamed:
    """Implements TensorSource. What no rule has a place for keeps its name: the model then refuses it."""

    def __init__(self, source: TensorSource, root: Any) -> None:
        self.name = source.name
        self._source = source
        self._root = root
        self._names: dict[str, str] = {}  # in the file, of tensors that are as the module has them
        self._converted: dict[str, str] = {}  # the first of the tensors that come from the same conversion
        self._parts: dict[str, list[tuple[str, str]]] = {}  # by that one: patterns and names in the file
        self._converters: dict[str, Any] = {}
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

        rules = get_model_conversion_mapping(root)
        self._rules = [[rule for rule in rules if isinstance(rule, kind)] for kind in (WeightRenaming, WeightConverter)]
        wanted = root.state_dict()
        ignored = [re.compile(pattern) for pattern in root._keys_to_ignore_on_load_unexpected or ()]
        for name in sorted(source.shapes(), key=dot_natural_key):
            if not any(pattern.search(name) for pattern in ignored):
                self._place(name, wanted)
        self._shapes = {name: source.shapes()[known] for name, known in self._names.items()}
        self._shapes |= {name: tuple(wanted[name].shape) for name in self._converted}

    def _place(self, name: str, wanted: Mapping[str, torch.Tensor]) -> None:
        from transformers.core_model_loading import rename_source_key

        renamings, converters = self._rules
        prefix = self._root.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target not in wanted or pattern is None:
            self._names[target if target in wanted else name] = name
            return
        converter = next(rule for rule in converters if pattern in rule.source_patterns)
        self._parts.setdefault(target, []).append((pattern, name))
        self._converters[target] = converter
        first = converter.target_patterns[0]
        for other in converter.target_patterns:
            self._converted[target.replace(first, other)] = target

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, part: TensorSlice | None = None, destination: Destination | None = None) -> StoredTensor:
        if name in self._names:
            return self._source.read(self._names[name], part, destination)
        first = self._converted[name]
        converter = deepcopy(self._converters[first])
        for pattern, known in self._parts[first]:
            converter.add_tensor(first, known, pattern, self._source.read(known).floats())
        found = converter.convert(first, model=self._root, config=self._root.config).get(name)
        found = found[0] if isinstance(found, list) else found
        if found is None or tuple(found.shape) != self._shapes[name]:
            shape = None if found is None else tuple(found.shape)
            problem = f"tensors {', '.join(known for _, known in self._parts[first])[:200]} become {shape}"
            raise ModelError(self.name, f"{problem} as {name!r}", f"the config asks for {self._shapes[name]}")
        return StoredTensor.of_floats(found[part.slices()] if part is not None else found)
