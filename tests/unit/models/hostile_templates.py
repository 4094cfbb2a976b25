"""Chat templates that use up time or memory, reach outside or can't be compiled; and ordinary ones for comparison."""

from __future__ import annotations

from ratoon.models.template_sandbox import MAX_TEMPLATE_CHARACTERS


def growing(first: str, rule: str, times: int = 99) -> str:
    """Each value is made out of the last one, `ns.a`."""
    loop = "{% for i in range(" + str(times) + ") %}{% set ns.a = " + rule + " %}{% endfor %}"
    return "{% set ns = namespace(a=" + first + ") %}" + loop


def nested_loops(depth: int, body: str) -> str:
    return "{% for i in range(90000) %}" * depth + body + "{% endfor %}" * depth


BIG = "{% set big = 'x' * 8000000 %}"
DOUBLING_LIST = growing("[1]", "[ns.a, ns.a]")

# One for each way to spend time: in bytecode, in Jinja's own loops, and in one call of C that no handler interrupts.
ENDLESS = {
    "loops": nested_loops(4, ""),
    "macros that call each other twice": "".join(
        f"{{% macro f{n}() %}}{{{{ f{n + 1}() }}}}{{{{ f{n + 1}() }}}}{{% endmacro %}}" for n in range(50)
    )
    + "{% macro f50() %}{% endmacro %}{{ f0() }}",
    "maps of maps": "{{ range(90000) | map('string') | map('upper') | list | length }}" * 200,
    "a number of many digits": "{{ 10 ** (10 ** 10) }}",
    "a long search from behind": "{{ ('a' * 8000000).rfind('a' * 2000000 + 'b' + 'a' * 2000000) }}",
    "a doubling tuple as a key": growing("(1,)", "(ns.a, ns.a)") + "{{ {}[ns.a] }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for i in [1] recursive %}{{ loop([i, i]) }}{% endfor %}",
}
# At once, step by step, by an operator, a method, a filter, a format, JSON, output.
HUGE = {
    "a text times a number": "{{ 'a' * 10**10 }}",
    "a list times a number": "{{ ([0] * 10**10) | length }}",
    "a doubling text": growing("'x'", "ns.a ~ ns.a"),
    "a list that keeps what it makes": "{% set ns = namespace(a=[]) %}"
    + nested_loops(2, "{% set ns.a = ns.a + [i ~ 'text' * 1000] %}"),
    "% with a width": "{{ '%1000000000d' % 1 }}",
    "format with a width from a value": "{{ '{:>{w}}'.format(1, w=1000000000) }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "replace": BIG + "{{ big | replace('x', big) }}",
    "indent": "{{ ('x\n' * 100000) | indent(1000000000) }}",
    "tojson with an indent": "{{ [1] | tojson(indent=1000000000) }}",
    "a doubling list printed": DOUBLING_LIST + "{{ ns.a }}",
    "output": BIG + "{% for i in range(100) %}{{ big }}{% endfor %}",
    "output of a macro": BIG + "{% macro m() %}{% for i in range(90000) %}{{ big }}{% endfor %}{% endmacro %}{{ m() }}",
    "a range": "{{ range(10**9) | list }}",
    "a date": "{{ strftime_now('%1000000000d' * 1000) }}",
    "an error": BIG + "{{ raise_exception(big) }}",
    "an error of a doubling list": DOUBLING_LIST + "{{ raise_exception(ns.a) }}",
}
OUTSIDE = {
    "a class": "{{ ''.__class__ }}",
    "a class by item": "{{ ''['__class__'] }}",
    "a class by filter": "{{ '' | attr('__class__') }}",
    "a class by map": "{{ [''] | map(attribute='__class__') | list }}",
    "a class by format": "{{ '{0.__class__}'.format('') }}",
    "a class by format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "a global": "{{ raise_exception.__globals__ }}",
    "a global by item": "{{ raise_exception['__globals__'] }}",
    "a macro's function": "{% macro m() %}{% endmacro %}{{ m._func }}",
    "a loop's iterator": "{% for i in [1] %}{{ loop._iterator }}{% endfor %}",
    "the context": "{{ self._TemplateReference__context }}",
    "the context by item": "{{ self['_TemplateReference__context'] }}",
    "a change of a message": "{{ messages[0].update({'role': 'x'}) }}",
    "a change through the class": "{{ dict.update(messages[0], {'role': 'x'}) }}",
    "a change of the list": "{{ messages.append(1) }}",
    "a generator's frame": "{{ (messages | map('string')).gi_frame }}",
    "a generator's methods": "{{ (messages | map('string')).throw(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "include of a list": "{% include ['a', '/etc/passwd'] ignore missing %}",
    "import": "{% import 'os' as os %}",
    "from": "{% from 'os' import system %}",
    "extends": "{% extends '/etc/passwd' %}",
}
UNREADABLE = {
    "parentheses": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "lists": "{{ " + "[" * 9000 + "]" * 9000 + " }}",
    "operators": "{{ 1" + " - 1" * 4000 + " }}",
    "filters": "{{ 1" + " | abs" * 4000 + " }}",
    "items": "{{ a" + "[0]" * 6000 + " }}",
    "not": "{{ " + "not " * 9000 + "1 }}",
    "blocks": "{% if 1 %}" * 1000 + "{% endif %}" * 1000,
    "loops": "{% for i in [1] %}" * 50 + "{% endfor %}" * 50,
    "a long number": "{{ " + "9" * 100000 + " }}",
    "an unknown filter": "{{ 1 | nothing }}",
    "an unknown test": "{{ 1 is nothing }}",
    "an open block": "{% for i in [1] %}",
    "many open comments": "{#" * 100000,
    "a long template": "x" * (MAX_TEMPLATE_CHARACTERS + 1),
    "many expressions": "{{ a }}" * 10000,
    "one long expression": "{{ [" + "a, " * 20000 + "] }}",
}
# What templates of known models do.
ORDINARY = [
    "{{ messages | map(attribute='content') | join(', ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | rejectattr('role', 'in', ['tool']) | first }}",
    "{{ messages[::-1] }} {{ messages[-1]['content'][:1] }} {{ messages[1:] }}",
    "{{ '<think>a</think>b'.split('</think>')[-1].lstrip('\n') }} {{ 'a b  c'.split() }} {{ 'a,b,c'.rsplit(',', 1) }}",
    "{{ '%s is %05.2f' % ('pi', 3.14159) }} {{ '%d%%' | format(50) }} {{ '{} {x:>5}|'.format(1, x=2) }}",
    "{{ 'text' | upper ~ 1 ~ none ~ [1, 'b'] }} {{ 'a' * 3 }}",
    "{{ [1] * 2 + [3] }} {{ (1, 2) + (3,) }} {{ 2 ** 10 - 1 }} {{ 7 % 4 }} {{ 7 // 2 }} {{ -3 }}",
    "{% set ns = namespace(items=[], n=0) %}{% for m in messages %}{% set ns.items = ns.items + [m.role] %}"
    "{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.items }}{{ ns.n }}",
    "{% macro field(name, kind='text') %}<{{ name }}:{{ kind }}{{ caller() if caller }}>{% endmacro %}"
    "{{ field('a') }}{% call field('b', kind='c') %}!{% endcall %}",
    "{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}",
    "{% for k, v in {'x': 1}.items() %}{{ k }}{% endfor %}{{ {'x': 1} | items | list }}",
    "{% for i in range(3) if i != 1 %}{{ loop.index }}{{ i }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% for item in [1, [2, [3]]] recursive %}{{ loop(item) if item is iterable else item }}{% endfor %}",
    "{{ [3, 1, 2] | sort | join('-') }} {{ [1, 1, 2] | unique | list }} {{ [1, 2, 3, 4] | batch(2) | list }}",
    "{{ 'abc' | replace('b', 'x') | capitalize | center(9) }} {{ '  x ' | trim }} {{ 'a\nb' | indent(2) }}",
    "{{ 3.7 | round | int }} {{ [1, 2] | sum }} {{ [1, 2, 3] | max }} {{ [{'n': 1}] | sum('n', 2) }}",
    "{{ missing is defined }} {{ none is none }} {{ 'a' is string }} {{ {} is mapping }} {{ [] is sequence }}",
    "{{ missing | default('d') }} {{ {'a': 1}.get('b', 2) }} {{ {'a': {'b': 3}}.a.b }} {{ dict(a=1) }}",
    "{% filter upper %}shout{% endfilter %}{% set block %}in {{ 1 }}{% endset %}{{ block }}",
    "{% with a = 2 %}{{ a }}{% endwith %}{% set a, b = 'x-y'.split('-') %}{{ b }}{{ a }}",
    "{{ 'abc' | list | reverse | join }} {{ 'x' if false }} {{ 1 < 2 < 3 }} {{ 'ab' in 'cabd' }} {{ 4 is even }}",
    "{{ '<&>' | e }} {{ '<b>' | safe }} {{ ['a', 'b'] | string | length }} {{ 'Hello World'.swapcase().title() }}",
    "{{ [{'k': 1}, {'k': 1}] | groupby('k') | length }} {{ 'one two' | wordcount }} {{ 'some' | truncate(3) }}",
    "{{ messages[0]['missing'] is defined }} {{ messages | length > 1 and messages[1].role == 'assistant' }}",
    "{{ 'update' in {'update': 1} }} {{ {'update': 1}['update'] }} {{ not messages }} {{ messages[0] == messages[1] }}",
]
