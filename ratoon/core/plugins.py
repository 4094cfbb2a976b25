"""Parts that other packages register by entry points: where they are found, and how they are loaded.

A part is looked up by its group and name when nothing of that name is built in, and only then: a start that uses
built-in parts alone does not read the metadata of installed packages. A package that can't be loaded is an error for
what asked for it by name, and for nothing else. What the parts of a group are is said where they are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ratoon.core.errors import RatoonError

logger = logging.getLogger(__name__)

MODELS = "ratoon.models"
ATTENTION_BACKENDS = "ratoon.attention_backends"
WEIGHT_FORMATS = "ratoon.weight_formats"
DEVICES = "ratoon.devices"
KV_CONNECTORS = "ratoon.kv_connectors"
GROUPS = {  # what a name of the group stands for
    MODELS: "an architecture, as in config.json",
    ATTENTION_BACKENDS: "a value of attention_backend",
    WEIGHT_FORMATS: "a quant_method of config.json",
    DEVICES: "a value of device",
    KV_CONNECTORS: "a value of kv_connector",
}


class Plugin(NamedTuple):
    """A part that an installed package registers."""

    group: str
    name: str
    value: str  # module:object
    package: str  # its name and version


class PluginError(RatoonError):
    """A part that a package registers can't be loaded, or is not what its group needs."""

    def __init__(self, plugin: Plugin, problem: str) -> None:
        self.plugin = plugin
        self.problem = f"is registered by the package {plugin.package}, and {plugin.value} {problem}"
        super().__init__(f"{plugin.group} {plugin.name!r} {self.problem}")


@cache
def installed_plugins() -> tuple[Plugin, ...]:
    """All parts that installed packages register. Nothing of these packages is imported."""
    from importlib.metadata import distributions

    found: dict[tuple[str, str], Plugin] = {}
    for package in distributions():
        try:
            entries = [entry for entry in package.entry_points if entry.group in GROUPS]
        except Exception as error:  # of a damaged file
            logger.warning("the entry points of the package %s can't be read: %s", package.name, error)
            continue
        for entry in entries:
            plugin = Plugin(entry.group, entry.name, entry.value, f"{package.name} {package.version}")
            first = found.setdefault((entry.group, entry.name), plugin)
            if first.value != plugin.value:
                logger.warning(
                    "%s %r is registered by %s and by %s: the first is used",
                    entry.group, entry.name, first.package, plugin.package,
                )  # fmt: skip
    return tuple(sorted(found.values()))


def plugin_names(group: str) -> list[str]:
    return [plugin.name for plugin in installed_plugins() if plugin.group == group]


def find_plugin(group: str, name: str, is_fit: Callable[[Any], bool], needed: str) -> Any | None:
    """The object that a package registers under this name. None: there is no such package. Raises PluginError, also if
    the object does not fit: `needed` says what would."""
    plugin = next((one for one in installed_plugins() if (one.group, one.name) == (group, name)), None)
    if plugin is None:
        return None
    found = load_plugin(plugin)
    if not is_fit(found):
        raise PluginError(plugin, f"is no {needed}")
    return found


@cache
def load_plugin(plugin: Plugin) -> Any:
    """Imports the package. Raises PluginError, whatever the package raises."""
    from importlib.metadata import EntryPoint

    try:
        return EntryPoint(plugin.name, plugin.value, plugin.group).load()
    except Exception as error:
        raise PluginError(plugin, f"can't be loaded ({type(error).__name__}: {error})") from error


def plugin_facts() -> list[dict[str, Any]]:
    """All registered parts, for display: group, name, value, package, and why it can't be loaded, or None. Imports all
    of their packages."""
    facts = []
    for plugin in installed_plugins():
        problem = None
        try:
            load_plugin(plugin)
        except PluginError as error:
            problem = error.problem
        facts.append({**plugin._asdict(), "problem": problem})
    return facts
