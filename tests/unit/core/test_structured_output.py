"""What a request says about the form of its text: every way to write it, and what is refused without a model."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from ratoon.core.errors import RequestError
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.structured import MAX_GRAMMAR_CHARACTERS, StructuredOutput
from ratoon.core.wire import Decoder, encode

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class City(pydantic.BaseModel):
    name: str


def test_a_schema_is_text_a_mapping_or_a_model_class() -> None:
    text = json.dumps(SCHEMA)
    for way in (text, SCHEMA):
        assert json.loads(StructuredOutput(json_schema=way).json_schema or "") == SCHEMA
        assert json.loads(StructuredOutput(json=way).json_schema or "") == SCHEMA  # type: ignore[call-arg]
    of_class = json.loads(StructuredOutput(json_schema=City).json_schema or "")  # type: ignore[arg-type]
    assert of_class == City.model_json_schema()


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"json_schema": SCHEMA}, StructuredOutput(json_schema=json.dumps(SCHEMA))),
        ({"json": SCHEMA}, StructuredOutput(json_schema=json.dumps(SCHEMA))),
        ({"choice": ("a", "b")}, StructuredOutput(choice=["a", "b"])),
        ({"regex": "a+", "begins_after": "</think>"}, StructuredOutput(regex="a+", begins_after="</think>")),
        (City, StructuredOutput(json_schema=json.dumps(City.model_json_schema()))),
        (None, None),
    ],
)
def test_params_take_a_mapping_or_a_model_class(asked: Any, meant: StructuredOutput | None) -> None:
    sampling = SamplingParams(structured_output=asked)
    beams = BeamSearchParams(beam_width=2, structured_output=asked)
    for params in (sampling, beams):
        params.verify()
        assert params.structured_output == meant


@pytest.mark.parametrize(
    ("asked", "field", "problem"),
    [
        (StructuredOutput(), "json_schema", "is missing"),
        (StructuredOutput(json_object=True, regex="a"), "regex", "contradicts json_object"),
        (StructuredOutput(continue_grammar=True, regex="a"), "continue_grammar", "contradicts regex"),
        (StructuredOutput(json_schema="{"), "json_schema", "is not JSON"),
        (StructuredOutput(json_schema="[]"), "json_schema", "is list, not an object"),
        (StructuredOutput(structural_tag="true"), "structural_tag", "is bool, not an object"),
        (StructuredOutput(json_object=1), "json_object", "1 is neither true nor false"),  # type: ignore[arg-type]
        (StructuredOutput(regex=5), "regex", "int is not text"),  # type: ignore[arg-type]
        (StructuredOutput(regex="\ud800"), "regex", "lone surrogate"),
        (StructuredOutput(regex="a" * (MAX_GRAMMAR_CHARACTERS + 1)), "regex", "characters"),
        (StructuredOutput(choice=[]), "choice", "is empty"),
        (StructuredOutput(choice="ab"), "choice", "str is not a list"),  # type: ignore[arg-type]
        (StructuredOutput(choice=["a", 1]), "choice[1]", "int is not text"),  # type: ignore[list-item]
        (StructuredOutput(grammar=""), "grammar", "is empty"),
        (StructuredOutput(regex="a", begins_after=""), "begins_after", "is empty"),
        (
            StructuredOutput(json_object=True, disable_any_whitespace=True, whitespace_pattern=" "),
            "whitespace_pattern",
            "contradicts disable_any_whitespace",
        ),
    ],
)
def test_bad_values_are_refused_by_name(asked: StructuredOutput, field: str, problem: str) -> None:
    for params in (SamplingParams(structured_output=asked), BeamSearchParams(beam_width=2, structured_output=asked)):
        with pytest.raises(RequestError) as refused:
            params.verify()
        assert refused.value.field == f"structured_output.{field}"
        assert problem in refused.value.problem


def test_a_mapping_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(RequestError, match="has no field 'json_shema'; did you mean json_schema"):
        SamplingParams(structured_output={"json_shema": SCHEMA})
    with pytest.raises(RequestError, match=r"structured_output\.json_schema: is not JSON"):
        SamplingParams(structured_output={"json_schema": {"const": object()}})


def test_another_type_is_refused() -> None:
    with pytest.raises(RequestError, match="int is not StructuredOutput"):
        SamplingParams(structured_output=5).verify()  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [SamplingParams(), BeamSearchParams(beam_width=2)])
def test_it_crosses_processes(params: Any) -> None:
    params.structured_output = StructuredOutput(choice=["a", "b"], begins_after="</think>", first_token=3)
    request = EngineCoreRequest("r", [1], params)
    frames = [bytes(frame) for frame in encode(request)]
    assert Decoder(EngineCoreRequest).decode(frames) == request
