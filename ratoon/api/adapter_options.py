"""Options of the command line for adapters (LoRA): one that a command answers with, or those that a server names."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ratoon.core.errors import ConfigError

EXPECTED = 'NAME=PATH, or {"name": "NAME", "path": "PATH"}'


def add_adapter_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter", metavar="PATH", help="answer with this adapter (LoRA): a PEFT folder or .gguf file"
    )


def settings_for_adapter(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of an engine that has the adapter of the command line, and no other."""
    if getattr(args, "adapter", None) is None:
        return {}
    return {"enable_lora": True} | ({"max_loras": 1} if args.max_loras is None else {})


def add_served_adapters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adapters")
    group.add_argument(
        "--adapter",
        dest="served_adapters",
        action="append",
        metavar="NAME=PATH",
        help="serve an adapter (LoRA) as a model of this name; may be repeated",
    )
    group.add_argument(
        "--lora-modules",
        dest="served_adapters",
        action="extend",
        nargs="+",
        metavar="NAME=PATH",
        help="the same under vLLM's name: several, each also as a JSON object",
    )


def served_adapters(args: argparse.Namespace, served_names: tuple[str, ...]) -> dict[str, Any]:
    """The setting `adapters`, if there are any. ConfigError: one has no name or no path, or a name of another."""
    named: dict[str, str] = {}
    for given in args.served_adapters or ():
        name, path = _name_and_path(given)
        if name in named or name in served_names:
            other = "the model" if name in served_names else "another adapter"
            raise ConfigError("adapter", f"{name!r} is the name of {other} as well", "a different name for each")
        named[name] = path
    return {"adapters": named} if named else {}


def _name_and_path(given: str) -> tuple[str, str]:
    if given.lstrip().startswith("{"):
        try:
            fields = json.loads(given)
        except ValueError as error:
            raise ConfigError("lora_modules", f"{given!r} is no JSON: {error}", EXPECTED) from None
        name, path = (fields.get(key) if isinstance(fields, dict) else None for key in ("name", "path"))
        if not isinstance(name, str) or not isinstance(path, str):
            raise ConfigError("lora_modules", f"{given!r} has no name or no path", EXPECTED)
    else:
        name, _, path = given.partition("=")
    if not name or not path:
        raise ConfigError("adapter", f"{given!r} has no name or no path", EXPECTED)
    return name, path
