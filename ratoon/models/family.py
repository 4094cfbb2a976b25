"""Families of models that another package registers (entry points of the group `ratoon.models`, by architecture).

Reading a config must not import torch: the process of the HTTP server does that, and has no torch. So a family names
its class, and the class is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.core.plugins import MODELS, PluginError, find_plugin, plugin_names
from ratoon.models.config_fields import ConfigFields

ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification", "Model")
WHOLE = ("LMHeadModel", "MTModel")  # endings that one family has


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family for one architecture. `model_class` is "module:Class", a LanguageModel. `config` is the architecture of
    a built-in family whose config.json has the same fields, or a function of the fields and the architecture."""

    model_class: str
    config: str | Callable[[ConfigFields, str], ModelConfig]


def find_family(architecture: str) -> ModelFamily | None:
    """The registered family of an architecture that is not built in. Raises ModelError if its package is broken."""
    try:
        return find_plugin(MODELS, architecture, lambda found: isinstance(found, ModelFamily), "ModelFamily")
    except PluginError as error:
        raise ModelError(architecture, error.problem, "another version of it, or uninstall it") from error


def known_architectures(built_in: list[str]) -> str:
    """The known architectures, those with a common ending together: a message has no room for all names in full."""
    families: dict[str, list[str]] = {}
    for name in sorted([*built_in, *plugin_names(MODELS)]):
        ending = next((one for one in ENDINGS if name.endswith(one) and not name.endswith(WHOLE)), "")
        families.setdefault(ending, []).append(name.removesuffix(ending))
    parts = [f"…{ending} of {', '.join(families[ending])}" for ending in ENDINGS if ending in families]
    return f"known: {'; '.join([*parts, *([', '.join(families[''])] if '' in families else [])])}"
