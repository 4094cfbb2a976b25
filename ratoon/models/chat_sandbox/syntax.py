"""Weaves guards into a template's syntax tree: a step in each loop and macro body, a check around what can be large.

Only decides where a guard is needed; operators.py has the guards. The names of guards hold a blank, so that a template
can neither write nor hide them.
"""

from __future__ import annotations

from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

MAKING = (nodes.Output, nodes.BinExpr, nodes.Concat, nodes.Call, nodes.Filter, nodes.List, nodes.Tuple, nodes.Dict)


def weave_guards(tree: nodes.Template) -> None:
    environment = tree.environment
    assert environment is not None
    GuardWeaver().visit(tree)
    tree.set_environment(environment)


class GuardWeaver(NodeTransformer):
    def __init__(self) -> None:
        self.making = 0  # nodes so far that make something

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.making += isinstance(node, MAKING)
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._guard_body(node)
        if node.test is not None:  # runs once for each item that it drops, before any body does
            node.test = nodes.And(guard("tick", nodes.Const(1)), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._guard_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._guard_body(node)

    def _guard_body(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        before = self.making
        self.generic_visit(node)
        tick = guard("tick", nodes.Const(1 + self.making - before))
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):  # ((a + b) + c) + d, from the right
            terms.append(left.right)
            left = left.left
        terms.append(left)
        return guard("add", *(self.visit(term) for term in reversed(terms)))

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [child if is_text(child) else guarded("output", child) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return guard("concat", *(self.visit(term) for term in node.nodes))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        if not any(isinstance(operand, nodes.Const) for operand in operands):
            name = "operand"
        elif searches or len(operands) > 2:
            name = "haystack" if len(operands) == 2 and isinstance(node.expr, nodes.Const) else "operand"
        else:  # with a constant: over after as many characters as that has
            return node
        node.expr = guarded(name, node.expr)
        for operand in node.ops:
            operand.expr = guarded(name, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            node.arg = guarded("key", node.arg)
            return node
        nothing = nodes.Const(None)
        return guard("slice", node.node, node.arg.start or nothing, node.arg.stop or nothing, node.arg.step or nothing)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items:
            pair.key = guarded("key", pair.key)
        return guard("literal", node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return guarded("literal", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else guarded("literal", node)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        return self._guard_arguments(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._guard_arguments(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return self._guard_arguments(node)

    def _guard_arguments(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = guard("arguments", node.dyn_args)
        return node

    def refuse(self, node: nodes.Node) -> NoReturn:
        raise TemplateSyntaxError(f"{type(node).__name__} is not for chat templates", node.lineno)

    visit_Extends = visit_Include = visit_Import = visit_FromImport = refuse
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = refuse


def guard(name: str, value: nodes.Expr, *more: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, f"guard {name}", list(more), [], None, None, lineno=value.lineno)


def is_text(node: nodes.Expr) -> bool:
    """Whether it can be nothing else: plain words, or a sum with a text in it."""
    if isinstance(node, nodes.Filter) and node.name == "guard add":
        return any(is_text(term) for term in (node.node, *node.args) if term is not None)
    return isinstance(node, nodes.TemplateData) or (isinstance(node, nodes.Const) and isinstance(node.value, str))


def guarded(name: str, value: nodes.Expr) -> nodes.Expr:
    """The value behind a guard, unless the template's text already says how large it is."""
    if isinstance(value, nodes.Const):
        return value
    if isinstance(value, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in value.items):
        return value
    return guard(name, value)
