"""What the answer must match: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`.

Each is turned into the engine's StructuredOutput, and its errors get the body's names. At most one may be given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from ratoon.api.server.protocol.base import Entries, RequestModel
from ratoon.core.errors import RequestError
from ratoon.core.structured import KINDS, StructuredOutput

ENGINE_FIELD = "structured_output"  # of params, in errors


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, str | dict | bool):
        return value
    raise ValueError("is neither an object nor JSON text")


# A schema, or JSON text of one. Its contents are checked by the engine's front end, which names keyword and path.
Schema = Annotated[
    Any,
    PlainValidator(_json_value),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}),
]


class JsonSchemaFormat(RequestModel):
    name: str | None = Field(None, description="Accepted, without effect")
    description: str | None = Field(None, description="Accepted, without effect")
    schema_: Schema = Field(None, alias="schema", description="The JSON schema")
    strict: bool | None = Field(None, description="The answer matches the schema in any case")


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description="With the type json_schema")
    structures: Entries[dict[str, Any]] | None = Field(
        None, description="With the type structural_tag: objects with begin, schema and end"
    )
    triggers: Entries[str] | None = Field(
        None, description="With the type structural_tag: texts that begin a structure"
    )
    format: dict[str, Any] | None = Field(
        None, description="With the type structural_tag, in place of structures and triggers: a tree of formats"
    )


class StructuredOutputsFields(RequestModel):
    """vLLM's fields, and three of our own."""

    json_: Schema = Field(None, alias="json", description="A JSON schema")
    json_object: bool | None = Field(None, description="Any JSON object")
    regex: str | None = Field(None, description="A regular expression for the whole answer")
    choice: Entries[str] | None = Field(None, description="The answer is one of these texts")
    grammar: str | None = Field(None, description="A grammar in Lark's or llama.cpp's notation")
    structural_tag: Schema = Field(
        None, description="An object with structures and triggers, or with a format, or JSON text of it"
    )
    whitespace_pattern: str | None = Field(None, description="A regular expression for whitespace in JSON")
    disable_any_whitespace: bool | None = Field(None, description="JSON without any whitespace between its parts")
    allow_additional_properties: bool | None = Field(
        None, description="Objects may have properties that the schema does not name, as JSON Schema has it"
    )
    disable_additional_properties: bool | None = Field(None, description="vLLM's name for the opposite; default: true")
    begins_after: str | None = Field(
        None, description='Any text up to this marker, such as "</think>"; what follows matches'
    )
    continue_grammar: bool | None = Field(
        None, description="With continuation_of: continue the grammar of the earlier answer where that ended"
    )
    disable_fallback: bool | None = Field(None, description="Accepted, without effect")


@dataclass(frozen=True, slots=True)
class _Asked:
    """One of the ways to say it: fields of StructuredOutput, and their names in the body."""

    field: str  # of the body
    values: dict[str, Any]
    names: Mapping[str, str]

    def verify_one(self) -> None:
        """Checks that exactly one field says what to match, in the body's names."""
        given = [self.name_of(kind) for kind in KINDS if self.values.get(kind) is not None]
        if len(given) > 1:
            raise RequestError(given[1], f"contradicts {given[0]}", "leave one of them out")
        if not given and not self.values.get("continue_grammar"):
            problem = "does not say what the answer must match"
            raise RequestError(self.field, problem, f"one of {', '.join(self.name_of(kind) for kind in KINDS)}")

    def name_of(self, inner: str) -> str:
        """The body's name for a field of StructuredOutput, which may have an index."""
        name, bracket, rest = inner.partition("[")
        return self.names.get(name, f"{self.field}.{name}") + bracket + rest


# Fields of a body → those of StructuredOutput
GUIDED = {
    "guided_json": "json_schema",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "guided_whitespace_pattern": "whitespace_pattern",
}
OF_OUTPUTS = {"json_": "json_schema"}
WITHOUT_EFFECT = ("disable_fallback",)


class StructuredFields(RequestModel):
    response_format: ResponseFormat | None = Field(
        None, description="The form of the answer: text, json_object, json_schema, or vLLM's structural_tag"
    )
    structured_outputs: StructuredOutputsFields | None = Field(
        None, description="What the answer must match: one of json, json_object, regex, choice, grammar, structural_tag"
    )
    guided_json: Schema = Field(None, description="The same as structured_outputs.json; the following likewise")
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Entries[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: Schema = None
    guided_decoding_backend: str | None = Field(None, description="Accepted, without effect")

    def structured_output(self) -> StructuredOutput | None:
        """What the request asks for. RequestError for contradictions and invalid values."""
        asked = self._asked()
        if asked is None:
            return None
        asked.verify_one()
        try:
            output = StructuredOutput(**asked.values)
            output.verify()
        except RequestError as error:
            raise type(error)(asked.name_of(error.field), error.problem, error.expected) from None
        return output

    def body_name(self, field: str) -> str:
        """The body's name for a field of params."""
        outer, _, inner = field.partition(".")
        asked = self._asked() if outer == ENGINE_FIELD else None
        return field if asked is None else asked.name_of(inner)

    def _asked(self) -> _Asked | None:
        ways = [way for way in (self._of_format(), self._of_outputs(), self._of_guided()) if way is not None]
        if len(ways) > 1:
            raise RequestError(ways[1].field, f"contradicts {ways[0].field}", "leave one of them out")
        return ways[0] if ways else None

    def _of_format(self) -> _Asked | None:
        asked, field = self.response_format, "response_format"
        if asked is None:
            return None
        _refuse_other_formats(asked)
        if asked.type == "json_object":
            return _Asked(field, {"json_object": True}, {"json_object": field})
        if asked.type == "json_schema":
            schema = None if asked.json_schema is None else asked.json_schema.schema_
            if schema is None:
                name = f"{field}.json_schema" + ("" if asked.json_schema is None else ".schema")
                raise RequestError(name, "is missing", "a JSON schema; json_object is the type for any object")
            return _Asked(field, {"json_schema": schema}, {"json_schema": f"{field}.json_schema.schema"})
        if asked.type == "structural_tag":
            tag: dict[str, Any] = {"type": asked.type}
            tag |= {"structures": asked.structures or [], "triggers": asked.triggers or []}
            if asked.format is not None:
                tag["format"] = asked.format
            return _Asked(field, {"structural_tag": tag}, {"structural_tag": field})
        return None

    def _of_outputs(self) -> _Asked | None:
        asked, field = self.structured_outputs, "structured_outputs"
        if asked is None:
            return None
        values = {
            OF_OUTPUTS.get(name, name): value
            for name in type(asked).model_fields
            if name not in WITHOUT_EFFECT and (value := getattr(asked, name)) is not None
        }
        if values.get("json_object") is False:  # of the others, false is a schema, or an option
            del values["json_object"]
        return _Asked(field, values, {"json_schema": f"{field}.json"})

    def _of_guided(self) -> _Asked | None:
        given = {name: value for name in GUIDED if (value := getattr(self, name)) is not None}
        if given.get("guided_json_object") is False:
            del given["guided_json_object"]
        if not given:
            return None
        names = {ours: name for name, ours in GUIDED.items()}
        return _Asked(next(iter(given)), {GUIDED[name]: value for name, value in given.items()}, names)


def _refuse_other_formats(asked: ResponseFormat) -> None:
    """Fields that belong to another type."""
    for name, owner in (
        ("json_schema", "json_schema"),
        ("structures", "structural_tag"),
        ("triggers", "structural_tag"),
        ("format", "structural_tag"),
    ):
        if getattr(asked, name) is not None and asked.type != owner:
            problem = f"has no meaning with the type {asked.type}"
            raise RequestError(f"response_format.{name}", problem, f"the type {owner}, or leave it out")
