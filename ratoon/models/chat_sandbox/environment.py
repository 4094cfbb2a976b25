"""The Jinja environment of chat templates: compiles a text into a guarded template, and carries its calls out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from ratoon.models.chat_sandbox.filters import guarded_filters
from ratoon.models.chat_sandbox.limits import CONTAINERS, MAX_TEMPLATE_TOKENS, LimitReached, current_budget, measure
from ratoon.models.chat_sandbox.methods import bounded_format, call_method
from ratoon.models.chat_sandbox.operators import (
    GUARDS,
    OPERATORS,
    WALKING_TESTS,
    collect,
    concatenate,
    guarded_test,
)
from ratoon.models.chat_sandbox.syntax import weave_guards
from ratoon.models.chat_sandbox.words import TemplateWords, words_of


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only has to be let through."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own convention)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class OpaqueNamespace(Namespace):
    """Namespaces can hold each other any number of times; printing one does not follow that."""

    def __repr__(self) -> str:
        return "<Namespace>"


def make_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    checked = [arg if isinstance(arg, CONTAINERS) else collect(arg) for arg in args]
    measure(checked)  # the keys get hashed
    made: dict[str, Any] = dict(*checked, **kwargs)
    current_budget().make_entries(len(made))
    return made


def make_namespace(*args: Any, **kwargs: Any) -> Namespace:
    return OpaqueNamespace(make_dict(*args, **kwargs))


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(OPERATORS)

    def __init__(self) -> None:
        extensions = [GenerationBlock, loopcontrols]
        # Jinja's optimizer runs parts of a template when it compiles it, and takes long over deep expressions.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.filters = {**guarded_filters(), **GUARDS}
        original: Mapping[str, Any] = TESTS
        self.tests |= {name: guarded_test(original[name]) for name in WALKING_TESTS}
        for name in ("filter", "test"):  # these look their value up in a table of ours
            del self.tests[name]
        self.globals.update({"dict": make_dict, "namespace": make_namespace})
        del self.globals["lipsum"]

    def compile_template(self, text: str) -> tuple[Template, TemplateWords]:
        for index, _ in enumerate(self.lex(text)):
            if index == MAX_TEMPLATE_TOKENS:
                raise LimitReached(f"has more than {MAX_TEMPLATE_TOKENS} words and signs")
        tree = self.parse(text)
        words = words_of(tree)  # the template's own, before guards are put in
        weave_guards(tree)
        return self.from_string(tree), words

    def concat(self, pieces: Iterable[str]) -> str:  # Jinja has "".join here
        return concatenate(pieces)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # From a class one gets to its methods without an object, past the checks on what they may change.
        return not isinstance(obj, type) and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        if modifies_known_mutable(obj, attribute):  # may also be meant as a key, so it is an error only if it gets used
            return super().unsafe_undefined(obj, attribute)
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return OPERATORS[operator](left, right)

    def wrap_str_format(self, value: Any) -> Any:
        is_format = super().wrap_str_format(value) is not None
        return bounded_format(self, value) if is_format else None

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        current_budget().step()
        if isinstance(__obj, BuiltinMethodType):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return call_method(__obj, args, kwargs)
        if isinstance(__obj, MethodType) and isinstance(__obj.__self__, LoopContext):
            measure(args)  # loop.changed() compares them
        return super().call(__context, __obj, *args, **kwargs)
