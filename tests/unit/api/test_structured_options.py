"""Structured output on the command line, and as fields of a server's request."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ratoon.api.cli import parse_arguments
from ratoon.api.commands.complete import make_request
from ratoon.api.options import in_terms_of_options
from ratoon.api.remote.client import RefusedError
from ratoon.cli import main
from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.structured import StructuredOutput

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "tag.json").write_text(json.dumps(TAG))
    (tmp_path / "grammar.lark").write_text('start: "a"+')
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "not.json").write_text(json.dumps({"properties": {"a": {"not": {}}}}))
    (tmp_path / "bytes").write_bytes(b"\xff")
    monkeypatch.chdir(tmp_path)
    return tmp_path


WAYS = [
    (["--json-schema", "schema.json"], StructuredOutput(json_schema=json.dumps(SCHEMA))),
    (["--json-object"], StructuredOutput(json_object=True)),
    (["--regex", "[0-9]+"], StructuredOutput(regex="[0-9]+")),
    (["--choice", "a", "--choice", "b"], StructuredOutput(choice=["a", "b"])),
    (["--grammar", "grammar.lark"], StructuredOutput(grammar='start: "a"+')),
    (["--structural-tag", "tag.json"], StructuredOutput(structural_tag=json.dumps(TAG))),
    (
        ["--json-schema", "schema.json", "--allow-additional-properties"],
        StructuredOutput(json_schema=json.dumps(SCHEMA), allow_additional_properties=True),
    ),
]


def asked(request: EngineCoreRequest) -> StructuredOutput:
    """Without what was measured when it was checked."""
    return msgspec.structs.replace(request.params.structured_output, num_bytes=None, is_large=False)


@pytest.mark.parametrize(("options", "meant"), WAYS)
def test_options_become_params(client, files, options, meant):
    assert main(["generate", "fake", "abc", "--raw", *options]) == 0
    assert asked(client.added[0]) == meant


def test_a_beam_search_has_it_too(client, files):
    options, meant = WAYS[0]
    assert main(["generate", "fake", "abc", "--raw", "--beam-width", "2", *options]) == 0
    assert isinstance(client.added[0].params, BeamSearchParams)
    assert asked(client.added[0]) == meant


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (
            ["--json-schema", "schema.json"],
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        (["--json-object"], {"response_format": {"type": "json_object"}}),
        (["--regex", "[0-9]+"], {"structured_outputs": {"regex": "[0-9]+"}}),
        (["--choice", "a", "--choice", "b"], {"structured_outputs": {"choice": ["a", "b"]}}),
        (["--grammar", "grammar.lark"], {"structured_outputs": {"grammar": 'start: "a"+'}}),
        (["--structural-tag", "tag.json"], {"structured_outputs": {"structural_tag": json.dumps(TAG)}}),
        (
            ["--json-schema", "schema.json", "--allow-additional-properties"],
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": False}},
        ),
    ],
)
def test_options_become_fields_for_a_server(files, options, fields):
    for form in ([], ["--chat"], ["--beam-width", "2"]):
        _, body = make_request("m", "x", parse_arguments(["complete", "--url", "x", "x", *form, *options]))
        assert fields.items() <= body.items()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regex", "a", "--json-object"], "--regex: contradicts --json-object; leave one of them out"),
        (["--json-schema", "none.json"], "--json-schema: can't read none.json: No such file"),
        (["--grammar", "bytes"], "--grammar: can't read bytes: it is not UTF-8"),
        (["--json-schema", "bad.json"], "--json-schema: is not JSON"),
        (["--json-schema", "."], "--json-schema: can't read .: "),
        (["--allow-additional-properties"], "--allow-additional-properties: has no meaning without a schema"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(client, files, capsys, options, message):
    assert main(["generate", "fake", "abc", *options]) == 2
    assert message in capsys.readouterr().err
    assert main(["complete", "--url", "http://127.0.0.1:9", "abc", *options]) == 2
    assert message in capsys.readouterr().err
    assert not client.added


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--json-schema", "not.json"], "error: --json-schema: 'not' at #/properties/a is not supported"),
        (["--regex", "("], "error: --regex: "),
        (["--grammar", "bad.json"], "error: --grammar: "),
        (["--structural-tag", "schema.json"], "error: --structural-tag: "),
        (["--temperature", "-1"], "error: --temperature: -1.0 is out of range"),
        (["--beam-width", "2", "-n", "3"], "error: --n: 3 is out of range"),
    ],
)
def test_errors_name_the_option_and_come_before_the_model_is_loaded(monkeypatch, files, capsys, options, message):
    def load(*arguments, **settings):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("ratoon.api.llm.LLM", load)
    for command in (["generate", "fake", "abc"], *([["chat", "fake"]] if "--beam-width" not in options else [])):
        assert main([*command, *options]) == 2
        assert capsys.readouterr().err.startswith(message)


def test_a_server_s_errors_name_the_option():
    args = parse_arguments(["complete", "--url", "x", "x", "--regex", "(", "--top-p", "2"])
    for told, shown in (
        ("structured_outputs.regex: unclosed group (HTTP 400)", "server: --regex: unclosed group (HTTP 400)"),
        ("top_p: 2.0 is out of range (HTTP 400)", "server: --top-p: 2.0 is out of range (HTTP 400)"),
        ("model: is not served (HTTP 404)", "server: model: is not served (HTTP 404)"),
        ("not today (HTTP 400)", "server: not today (HTTP 400)"),
    ):
        error = RefusedError("server", told, kind="HTTP 400", status=400)
        assert str(in_terms_of_options(error, args)) == shown
    args = parse_arguments(["complete", "--url", "x", "x", "--json-schema", "schema.json"])
    error = RefusedError("server", "response_format.json_schema.schema: 'not' at #", kind="HTTP 400")
    assert str(in_terms_of_options(error, args)) == "server: --json-schema: 'not' at #"
    error = RefusedError("server", "structured_outputs.json: 'not' at #", kind="HTTP 400")
    assert str(in_terms_of_options(error, args)) == "server: --json-schema: 'not' at #"
    listed = RequestError("prompts[1].structured_output.json_schema", "is bad", "a good one")
    assert str(in_terms_of_options(listed, args)) == "prompts[1], --json-schema: is bad; a good one"
