"""Writes docs/settings.md from the declarations of the settings. A test compares; `make docs` writes it first."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ratoon.api.options import option_of, shown_default
from ratoon.api.server.settings import ServerSettings
from ratoon.core.setting import Setting, settings_of
from ratoon.core.settings import ENGINE_SETTINGS, FRONT_END_SETTINGS
from ratoon.core.vllm_names import NEGATED, NO_EFFECT, RENAMED, RULES, SPECIAL

WITHOUT_OPTION = ("skip_tokenizer", "adapters")
PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings

*Written by `docs/write_settings.py` from `ratoon/core/config.py` and `ratoon/api/server/settings.py`.*

A setting is a keyword of `LLM` and `AsyncLLM` ([python.md](python.md)) and an option of every command that starts an
engine ([command-line.md](command-line.md)), `serve` included ([serving.md](serving.md)). Sizes are numbers of bytes, or
text such as `512MiB` (binary) and `1.5GB` (decimal). What is left out is chosen to fit the model and the machine; a
value that has no meaning is a `ConfigError` with the name of the setting.

## Engine
"""
FRONT_END = """
## Front end

Of the process that takes requests. `serve` has all but `skip_tokenizer` as options, adapters by `--adapter NAME=PATH`
([adapters.md](adapters.md)); the other commands have `--otlp-traces-endpoint` and `--max-total-hidden-states-bytes`.
"""
SERVER = """
## Server

Options of `ratoon serve` alone. [serving.md](serving.md#options) has its other options: files with keys, and the log.
"""
VLLM = """
## vLLM's names

Taken for scripts and command lines that come from there.

| keyword | option | meaning |
|---|---|---|
"""


def page() -> str:
    tables = ((HEAD, ENGINE_SETTINGS), (FRONT_END, FRONT_END_SETTINGS), (SERVER, settings_of(ServerSettings)))
    text = "".join(f"{head}\n{table(settings)}" for head, settings in tables)
    theirs = {name: f"`{ours}`" for name, ours in RENAMED.items()}
    theirs |= {name: f"not `{ours}`" for name, ours in NEGATED.items()}
    theirs |= SPECIAL
    theirs |= {name: rule.expected for name, rule in RULES.items()}
    theirs |= dict.fromkeys(NO_EFFECT, "changes nothing")
    rows = (f"| `{name}` | {names([option_of(name)])} | {cell(meaning)} |\n" for name, meaning in theirs.items())
    return f"{text}{VLLM}{''.join(rows)}"


def table(settings: Iterable[Setting]) -> str:
    rows = ["| keyword | option | meaning | default |\n", "|---|---|---|---|\n"]
    for setting in settings:
        options = [] if setting.name in WITHOUT_OPTION else [option_of(setting.name), *setting.options]
        if setting.kind is bool and (setting.default or setting.optional):
            options += ["--no-" + option.removeprefix("--") for option in options]
        default = shown_default(setting)
        shown = f"`{default}`" if default else "on" if setting.default is True else ""
        rows.append(f"| `{setting.name}` | {names(options)} | {cell(setting.help)} | {shown} |\n")
    return "".join(rows)


def names(options: Iterable[str]) -> str:
    return ", ".join(f"`{option}`" for option in options)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
