"""`ratoon hidden-states`: how positions and layers are written, and what is refused before anything is loaded."""

from __future__ import annotations

import io

import pytest

from ratoon.api.commands.hidden_states import parse_layers, parse_positions
from ratoon.cli import main


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        ("all", "all"),
        ("-1", [-1]),
        ("0, 5,-2", [0, 5, -2]),
        ("3:10,12", [[3, 10], 12]),
        (":4", [[0, 4]]),
        ("-4:", [[-4, None]]),
    ],
)
def test_positions_as_people_write_them(text, positions):
    assert parse_positions(text) == positions


@pytest.mark.parametrize(("text", "layers"), [("all", "all"), ("norm", ["norm"]), ("0, -1,norm", [0, -1, "norm"])])
def test_layers_as_people_write_them(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "MODEL: is missing"),
        (["model", "one", "two"], "PROMPT: 2 were given"),
        (["model", ""], "PROMPT: is empty"),
        (["model", "x", "--positions", "last"], "--positions: 'last' is no whole number"),
        (["model", "x", "--positions", "1:2:3"], "--positions: '2:3' is no whole number"),
        (["model", "x", "--layers", "top"], "--layers: 'top' is no whole number"),
        (["model", "x", "--output", "/no/such/folder/file"], "--output: there is no folder /no/such/folder"),
        (["model", "x", "--choice", "1"], "--original-request-id and --choice: belong to a server"),
        (["--original-request-id", "cmpl-x"], "--original-request-id and --choice: belong to a server"),
        (["--url", "localhost:9", "x", "--choice", "1"], "--choice: has no meaning without --original-request-id"),
        (["--url", "localhost:9", "x", "--original-request-id", "y"], "PROMPT: and --original-request-id exclude"),
        (["--url", "localhost:9", "x", "--num-blocks", "4"], "--num-blocks: is a setting of the server"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(monkeypatch, capsys, words, message):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["hidden-states", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_server_that_is_not_there_is_exit_code_1(capsys, tmp_path):
    assert main(["hidden-states", "--url", "localhost:9", "x", "--output", str(tmp_path / "file")]) == 1
    assert "can't be reached" in capsys.readouterr().err and not list(tmp_path.iterdir())
