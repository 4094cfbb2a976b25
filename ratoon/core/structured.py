"""Structured output: what the text of a request must match.

Values are checked here for type and size only. Whether a schema or a grammar can be compiled is the validator's
question (engine/grammars/validator.py), and how it limits the next token that of execution/grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from ratoon.core.closed_objects import close_objects
from ratoon.core.errors import RequestError
from ratoon.core.suggestions import ParamsMeta, did_you_mean

MAX_GRAMMAR_CHARACTERS = 2**17  # of the text of a schema, an expression or a grammar
MAX_CHOICE_CHARACTERS = 2**20  # of all choices together
MAX_JSON_DEPTH = 120  # of objects and lists within each other, in a schema or a tag; the grammar library reads 127
DEPTH_EXPECTED = f"objects and lists within each other, up to {MAX_JSON_DEPTH} levels deep"
MAX_MARKER_CHARACTERS = 256  # of begins_after
KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")  # exactly one is set
VLLM_NAMES = {"json": "json_schema"}
VLLM_OPPOSITES = {"disable_additional_properties": "allow_additional_properties"}  # switches that mean the opposite
FILLED = ("first_token", "translation", "num_bytes", "is_large")  # fields that the engine sets


class StructuredMeta(ParamsMeta):
    """Accepts vLLM's names of fields too."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **fields: Any) -> Any:
            return super().__call__(*args, **dict(_in_our_names(name, value) for name, value in fields.items()))


class StructuredOutput(
    msgspec.Struct, metaclass=StructuredMeta, kw_only=True, omit_defaults=True, frozen=True, gc=False
):
    """What the text must match: exactly one of `json_schema`, `json_object`, `regex`, `choice`, `grammar` and
    `structural_tag`. The fields follow vLLM's StructuredOutputsParams."""

    json_schema: str | None = None  # JSON text; also accepted: a mapping, or a pydantic model class
    json_object: bool = False  # any JSON object
    regex: str | None = None  # the whole text matches it
    choice: list[str] | None = None  # the text is one of these
    grammar: str | None = None  # in Lark's or llama.cpp's (GBNF) notation
    # JSON text, or a mapping: free text in which a part begun by a trigger must match the schema of its structure
    structural_tag: str | None = None

    # Free text up to the first occurrence of this marker (such as "</think>"); what follows must match. None: all of it
    begins_after: str | None = None
    # A continuation goes on with its parent's grammar where the parent's text ended. No other field is set then.
    continue_grammar: bool = False

    # Of JSON. By default any whitespace is possible where JSON allows it.
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None  # an expression for whitespace between the parts
    # Objects of a schema have only the properties that it names, unless it has additionalProperties or this is set.
    allow_additional_properties: bool = False

    # Filled by the InputProcessor; a caller leaves them alone.
    first_token: int | None = None  # the prompt's tokens from here on are part of the text
    translation: str | None = None  # in the notation of the grammar library, where writing it takes long
    num_bytes: int | None = None  # of the compiled grammar, as measured when it was checked
    is_large: bool = False  # compiling it takes long, as measured

    def __post_init__(self) -> None:
        for name in ("json_schema", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                msgspec.structs.force_setattr(self, name, _json_text(name, value))
        if isinstance(self.choice, tuple):
            msgspec.structs.force_setattr(self, "choice", list(self.choice))

    @property
    def kind(self) -> str | None:
        """The name of the field that is set."""
        return next((name for name in KINDS if _is_set(getattr(self, name))), None)

    def enforced(self, schema: Any) -> Any:
        """The JSON schema that texts match where `schema` was given."""
        return schema if self.allow_additional_properties else close_objects(schema)

    def verify(self) -> None:
        """Raise RequestError, naming the field, for values of a wrong type or size and for contradictions."""
        given = [name for name in KINDS if _is_set(getattr(self, name))]
        for name in ("json_object", "continue_grammar", "disable_any_whitespace", "allow_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"{getattr(self, name)!r} is neither true nor false", "true or false")
        if len(given) > 1:
            raise RequestError(given[1], f"contradicts {given[0]}", f"one of {', '.join(KINDS)}")
        if self.continue_grammar and given:
            raise RequestError("continue_grammar", f"contradicts {given[0]}", "the parent's grammar goes on: only one")
        if not given and not self.continue_grammar:
            raise RequestError(KINDS[0], "is missing", f"one of {', '.join(KINDS)}")
        for name in ("json_schema", "regex", "grammar", "structural_tag", "whitespace_pattern"):
            _verify_text(name, getattr(self, name), MAX_GRAMMAR_CHARACTERS)
        _verify_text("begins_after", self.begins_after, MAX_MARKER_CHARACTERS)
        for name in ("begins_after", "grammar"):
            if getattr(self, name) == "":
                raise RequestError(name, "is empty", "at least one character, or leave it out")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError("whitespace_pattern", "contradicts disable_any_whitespace", "one of the two")
        if self.choice is not None:
            _verify_choice(self.choice)
        for name in ("json_schema", "structural_tag"):
            _verify_json(name, getattr(self, name))


def content_of(asked: StructuredOutput) -> bytes:
    """What its compiled form depends on."""
    plain = msgspec.structs.replace(
        asked,
        begins_after=None,
        continue_grammar=False,
        first_token=None,
        translation=None,
        num_bytes=None,
        is_large=False,
    )
    return msgspec.msgpack.encode(plain)


class HasJsonSchema(Protocol):
    """A pydantic model class, or another object that tells its JSON schema."""

    def model_json_schema(self) -> dict[str, Any]: ...


StructuredOutputLike: TypeAlias = StructuredOutput | Mapping[str, Any] | HasJsonSchema  # mapping: of its fields

# A field of params. The constructor takes any StructuredOutputLike and converts it (`__post_init__`), so that a
# StructuredOutput is read, encoded and decoded. A type checker learns both types from a descriptor. Only the
# constructor converts: what is assigned later must be a StructuredOutput.
if TYPE_CHECKING:

    class StructuredOutputField:
        def __get__(self, params: object, owner: type | None = None) -> StructuredOutput | None: ...

        def __set__(self, params: object, asked: StructuredOutputLike | None) -> None: ...

else:
    StructuredOutputField = StructuredOutput | None  # the type that msgspec decodes

FREE_TEXT: Any = None  # the default of such a field. Any: for a type checker None is no StructuredOutputField


def structured_output(asked: StructuredOutputLike | None) -> StructuredOutput | None:
    """The StructuredOutput that is meant. A value of another type is returned as it is, and refused by
    verify_structured_output."""
    if isinstance(asked, Mapping):
        own = (name for name in StructuredOutput.__struct_fields__ if name not in FILLED)
        known = (*own, *VLLM_NAMES, *VLLM_OPPOSITES)
        for name in asked:
            if name not in known:
                expected = did_you_mean(str(name), known, f"one of {', '.join(KINDS)}")
                raise RequestError("structured_output", f"has no field {name!r}", expected)
        try:
            return StructuredOutput(**asked)
        except RequestError as error:
            raise error.inside("structured_output") from None
    if hasattr(asked, "model_json_schema"):
        return StructuredOutput(json_schema=_json_text("json_schema", asked))
    return asked


def verify_structured_output(asked: Any) -> None:
    if asked is None:
        return
    if not isinstance(asked, StructuredOutput):
        problem = f"{type(asked).__name__} is not StructuredOutput"
        raise RequestError("structured_output", problem, "a StructuredOutput, or a mapping of its fields")
    try:
        asked.verify()
    except RequestError as error:
        raise error.inside("structured_output") from None


def _in_our_names(name: str, value: Any) -> tuple[str, Any]:
    if name in VLLM_OPPOSITES:  # a value that is no switch is refused by verify
        return VLLM_OPPOSITES[name], not value if isinstance(value, bool) else value
    return VLLM_NAMES.get(name, name), value


def _is_set(value: Any) -> bool:
    return value is not None and value is not False


def _json_text(field: str, value: Any) -> str:
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise RequestError(field, "is nested too deeply", DEPTH_EXPECTED) from None
    except (TypeError, ValueError) as error:
        raise RequestError(field, f"is not JSON: {error}", "JSON text, or a mapping of JSON values") from None


def _verify_text(field: str, value: Any, longest: int) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise RequestError(field, f"{type(value).__name__} is not text", "text")
    if len(value) > longest:
        raise RequestError(field, f"has {len(value)} characters", f"{longest} at most")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(field, "holds a lone surrogate", "text that UTF-8 can encode") from None


def _verify_choice(choice: Any) -> None:
    if not isinstance(choice, list):
        raise RequestError("choice", f"{type(choice).__name__} is not a list", "a list of texts")
    if not choice:
        raise RequestError("choice", "is empty", "at least one text")
    try:
        whole = "".join(choice)
        whole.encode()
    except (TypeError, UnicodeEncodeError):  # in one of them
        for index, text in enumerate(choice):
            _verify_text(f"choice[{index}]", text, MAX_CHOICE_CHARACTERS)
        raise
    if len(whole) > MAX_CHOICE_CHARACTERS:
        raise RequestError("choice", f"has {len(whole)} characters in all", f"{MAX_CHOICE_CHARACTERS} at most")


def _verify_json(field: str, text: str | None) -> None:
    if text is None:
        return
    try:
        value = json.loads(text)
    except RecursionError:
        raise RequestError(field, "is nested too deeply", DEPTH_EXPECTED) from None
    except ValueError as error:
        raise RequestError(field, f"is not JSON: {error}", "JSON text, or a mapping") from None
    depth = _depth_of(value)
    if depth > MAX_JSON_DEPTH:
        raise RequestError(field, f"is nested {depth} levels deep", DEPTH_EXPECTED)
    if not isinstance(value, dict) and not (field == "json_schema" and isinstance(value, bool)):
        raise RequestError(field, f"is {type(value).__name__}, not an object", "a JSON object")


def _depth_of(value: Any) -> int:
    """Levels of objects and lists. Without recursion, of which Python allows less than JSON."""
    depth, level = 0, [value]
    while level := [part for part in level if isinstance(part, (dict, list))]:
        depth += 1
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return depth
