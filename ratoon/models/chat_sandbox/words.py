"""What a template's text says about the conversations that it knows: which fields it reads, which roles it names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes

ROLE = "role"


@dataclass(frozen=True, slots=True)
class TemplateWords:
    read: frozenset[str]  # variables, fields and keys
    roles: frozenset[str]  # texts that a role is compared with


def words_of(tree: nodes.Template) -> TemplateWords:
    roles = (text for node in tree.find_all(nodes.Compare) if ROLE in _words(node) for text in _compared_texts(node))
    return TemplateWords(frozenset(_words(tree)), frozenset(roles))


def _words(node: nodes.Node) -> Iterator[str]:
    yield from (name.name for name in node.find_all(nodes.Name) if name.ctx == "load")
    yield from (field.attr for field in node.find_all(nodes.Getattr))
    yield from (constant.value for constant in node.find_all(nodes.Const) if isinstance(constant.value, str))


def _compared_texts(node: nodes.Compare) -> Iterator[str]:
    """`role == "tool"` and `role in ["tool", "ipython"]` name roles; `"role" in message` names none."""
    for side in (node.expr, *(operand.expr for operand in node.ops)):
        for constant in side.items if isinstance(side, (nodes.List, nodes.Tuple)) else [side]:
            if isinstance(constant, nodes.Const) and isinstance(constant.value, str) and constant.value != ROLE:
                yield constant.value
