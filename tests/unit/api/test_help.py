"""The help of the command line: what is used every day on one screen, everything by --help-all."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ratoon.api.cli import build_parser
from ratoon.cli import COMMANDS, main

ROOT = Path(__file__).parents[3]
PATHS = [
    [], ["generate"], ["chat"], ["complete"], ["embed"], ["rerank"], ["hidden-states"], ["transcribe"], ["serve"],
    ["models"], ["pull"], ["rm"], ["ps"], ["stop"], ["info"], ["demo"], ["bench"],
    ["bench", "serve"], ["bench", "latency"], ["bench", "two-stage"],
]  # fmt: skip


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def parser_of(path: list[str]) -> argparse.ArgumentParser:
    parser = build_parser(COMMANDS)
    for word in path:
        (subparsers,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
        parser = subparsers.choices[word]
    return parser


def test_every_command_is_looked_at():
    (subparsers,) = (one for one in build_parser(COMMANDS)._actions if isinstance(one, argparse._SubParsersAction))
    assert {path[0] for path in PATHS if path} == set(subparsers.choices)


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_fits_on_a_screen_and_help_all_has_every_option(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short = printed([*path, "--help"], capsys)
    assert short.count("\n") < 60
    assert short.startswith(f"usage: {' '.join(['ratoon', *path])} [OPTION ...]")
    everything = printed([*path, "--help-all"], capsys)
    names = [name for action in parser_of(path)._actions for name in action.option_strings]
    assert all(f"{name} " in everything or f"{name}," in everything or f"{name}\n" in everything for name in names)
    assert ("--help-all shows all" in short) == (len(everything) > len(short) + 100)


def test_help_of_generate_shows_groups_with_short_descriptions(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short = printed(["generate", "--help"], capsys)
    for line in (
        "sampling:",
        "  --temperature X          0: the likeliest token",
        "engine:",
        "  -q, --quantization NAME  bits of weights: auto, none, int8, int4 or fp8",
        "ratoon generate --help-all shows all",
    ):
        assert line in short
    assert "--max-num-batched-tokens" not in short and "vLLM" not in short


def test_the_document_lists_the_commands_as_the_help_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    help = printed(["--help"], capsys)
    listed = help[help.index("  COMMAND\n") :]
    assert listed in (ROOT / "docs/command-line.md").read_text()


def test_commands_of_other_programs_lead_somewhere(capsys):
    assert main(["list"]) == main(["ls"]) == 0
    assert capsys.readouterr().out.count("smollm2-135m") == 2
    assert printed(["help", "pull"], capsys) == printed(["pull", "--help"], capsys)
    assert printed(["help"], capsys) == printed(["--help"], capsys)


def test_without_a_command_the_help_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "generate" in capsys.readouterr().err
