"""The models of `ratoon serve MODEL…`, and its configuration file (`--config ratoon.toml`).

The file has the options of the command line by their names, and a table [[model]] for each model, whose options are
its own. What the command line says goes before what the file says.
"""

from __future__ import annotations

import argparse
import copy
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratoon.core.errors import ConfigError
from ratoon.core.suggestions import did_you_mean

TABLE = "model"
# Options of the server that a model may have for itself; all of the engine's are.
OWN_OPTIONS = frozenset({"chat_template", "tool_parser", "reasoning_parser", "served_model_name", "keep_alive"})


@dataclass
class NamedModel:
    """A model of the command line or of the file."""

    model: str
    name: str  # in requests
    args: argparse.Namespace  # its options: the server's, and its own
    further_names: tuple[str, ...] = ()
    own: frozenset[str] = field(default_factory=frozenset)  # options that are its own


def named_models(args: argparse.Namespace) -> tuple[argparse.Namespace, list[NamedModel]]:
    """Returns the options of the server, and the models, of both sources. ConfigError: the file is wrong, or there is
    no model, or two have one name."""
    tables: list[dict[str, Any]] = []
    if args.config is not None:
        args, tables = _with_file(args, Path(args.config))
    found = [_named(word, args) for word in args.models]
    for number, table in enumerate(tables):
        found.append(_of_table(args, table, f"{args.config}, model {number + 1}"))
    if not found:
        expected = "a folder, a GGUF file, a hub id or an embedded name; or --config FILE with a table [[model]]"
        raise ConfigError("MODEL", "is missing", expected)
    if len(found) == 1:
        (only,) = found
        if "=" in "".join(args.models) and only.name != default_name(only.model):
            only.args.served_model_name = only.args.served_model_name or [only.name]
        only.args.model = only.model
        return only.args, found
    _verify_names(found, args)
    return args, found


def _verify_names(models: Sequence[NamedModel], args: argparse.Namespace) -> None:
    names: list[str] = []
    for one in models:
        for name in (one.name, *one.further_names):
            if name in names:
                expected = "a different name for each: NAME=MODEL, or served-model-name in the file"
                raise ConfigError("MODEL", f"two models have the name {name!r}", expected)
            names.append(name)
    for option, value in (("served_model_name", args.served_model_name), ("adapter", args.served_adapters)):
        if value and len(models) > 1:
            expected = f"{option.replace('_', '-')} in the table [[model]] of a file (--config)"
            raise ConfigError(option, "belongs to one model, and there are several", expected)


def default_name(model: str) -> str:
    """The name that a model has by itself."""
    from ratoon.models.embedded import EMBEDDED_MODELS

    path = Path(model).expanduser()
    if model in EMBEDDED_MODELS or not path.exists():
        return model
    return path.stem if path.is_file() else path.resolve().name


def _named(word: str, args: argparse.Namespace) -> NamedModel:
    name, equals, model = word.partition("=")
    if not equals or "/" in name or not name or not model or Path(word).exists():
        name, model = default_name(word), word
    return NamedModel(model, name, copy.copy(args))


# ---- the file ----


def _with_file(args: argparse.Namespace, path: Path) -> tuple[argparse.Namespace, list[dict[str, Any]]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("config", f"can't read {path}: {reason}", "a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config", f"{path} is not valid TOML: {error}", "a TOML file") from None
    tables = content.pop(TABLE, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("config", f"{path}: model is not a list of tables", "[[model]] above each model")
    given = _parse(args.parser, content, str(path))
    return _merged(args.parser, args, given), tables


def _of_table(args: argparse.Namespace, table: Mapping[str, Any], where: str) -> NamedModel:
    options = dict(table)
    model = options.pop(TABLE, None)
    given = _parse(args.parser, options, where)
    if not isinstance(model, str) or not model:
        raise ConfigError("config", f"{where}: has no model", 'model = "…": a folder, a GGUF file, a hub id or a name')
    own = _given(args.parser, given)
    for dest in own:
        if dest not in OWN_OPTIONS and dest not in args.model_options:
            problem = f"{where}: {dest.replace('_', '-')} is an option of the whole server"
            raise ConfigError("config", problem, "it belongs above the first [[model]]")
    merged = _merged(args.parser, given, args)
    names = given.served_model_name or []
    return NamedModel(model, names[0] if names else default_name(model), merged, tuple(names[1:]), frozenset(own))


def _parse(parser: argparse.ArgumentParser, options: Mapping[str, Any], where: str) -> argparse.Namespace:
    """Reads options of a file as those of the command line are read."""
    words: list[str] = []
    for key, value in options.items():
        words += _words(parser, key, value, where)
    given, _ = parser.parse_known_args(words)
    return given


def _words(parser: argparse.ArgumentParser, key: str, value: Any, where: str) -> list[str]:
    known: Mapping[str, argparse.Action] = parser._option_string_actions
    option = "--" + key.replace("_", "-")
    action = known.get(option)
    if action is None or key in ("help", "help-all", "config", "debug"):
        names = [TABLE, *(name.removeprefix("--") for name in known if name.startswith("--"))]
        meant = did_you_mean(key, names, "`ratoon serve --help-all` lists them")
        raise ConfigError("config", f"{where}: {key} is no option of `ratoon serve`", meant)
    if isinstance(value, bool):
        negated = "--no-" + option.removeprefix("--")
        if action.nargs != 0:
            raise ConfigError("config", f"{where}: {key} is neither true nor false", "a value in quotes, or a number")
        return [option] if value else [negated] if negated in known else []
    if action.nargs == 0:
        raise ConfigError("config", f"{where}: {key} = {value!r}", "true or false")
    if isinstance(value, list):
        return [word for one in value for word in (f"{option}={_text(one)}",)]
    return [f"{option}={_text(value)}"]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


def _given(parser: argparse.ArgumentParser, args: argparse.Namespace) -> set[str]:
    return {
        dest
        for dest, value in vars(args).items()
        if value != parser.get_default(dest) and dest not in ("models", "parser", "model_options", "run")
    }


def _merged(
    parser: argparse.ArgumentParser, first: argparse.Namespace, second: argparse.Namespace
) -> argparse.Namespace:
    """Options of the first, and of the second where the first has none."""
    merged = copy.copy(second)
    for dest in _given(parser, first):
        setattr(merged, dest, getattr(first, dest))
    merged.models = first.models or second.models
    return merged
