"""Chat templates that use up time or memory, reach outside or can't be compiled; and ordinary ones for comparison."""

from __future__ import annotations

from ratoon.models.chat_sandbox import limits


def growing(first: str, rule: str, times: int = 99, name: str = "ns") -> str:
    """Each value is made out of the last one, `ns.a`."""
    loop = "{% for i in range(" + str(times) + ") %}{% set ns.a = " + rule + " %}{% endfor %}"
    return ("{% set ns = namespace(a=" + first + ") %}" + loop).replace("ns", name)


def many(expression: str, times: int) -> str:
    return "{% set all = [" + ", ".join([expression] * times) + "] %}{{ raise_exception('got through') }}"


def nested_loops(depth: int, body: str) -> str:
    return "{% for i in range(90000) %}" * depth + body + "{% endfor %}" * depth


BIG = "{% set big = 'x' * 8000000 %}"
LONG_LIST = "{% set long = [0] * 1000000 %}"
DOUBLING_LIST = growing("[1]", "[ns.a, ns.a]")
TWO_DOUBLING_LISTS = DOUBLING_LIST + growing("[1]", "[m.a, m.a]", name="m")
DOUBLING_TUPLE = growing("(1,)", "(ns.a, ns.a)")
DEEP_TUPLE = growing("()", "(ns.a,)", times=50000)
DEEP_LIST = growing("[]", "[ns.a]", times=50000)


ENDLESS = {
    "loops": nested_loops(4, ""),
    "loops with output": nested_loops(4, "x"),
    "loops that keep what they make": "{% set ns = namespace(a=[]) %}"
    + nested_loops(2, "{% set ns.a = ns.a + [i ~ 'text'] %}"),
    "loops that keep dicts": "{% set ns = namespace(a=0) %}" + nested_loops(3, "{% set ns.a = {'a': ns.a} %}"),
    "a loop condition": "{% for i in range(90000) %}{% for j in range(90000) if false %}{% endfor %}{% endfor %}",
    "a loop over a text": BIG + nested_loops(1, "{% for c in big %}{% endfor %}"),
    "a recursive loop": "{% for i in [1] recursive %}{{ loop([i, i]) }}{% endfor %}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macros that call each other twice": "".join(
        f"{{% macro f{n}() %}}{{{{ f{n + 1}() }}}}{{{{ f{n + 1}() }}}}{{% endmacro %}}" for n in range(50)
    )
    + "{% macro f50() %}{% endmacro %}{{ f0() }}",
    "blocks that call each other twice": "".join(
        f"{{% block b{n} %}}{{{{ self.b{n + 1}() }}}}{{{{ self.b{n + 1}() }}}}{{% endblock %}}" for n in range(50)
    )
    + "{% block b50 %}{% endblock %}",
    "a caller in a loop": "{% macro m() %}{{ caller() }}{% endmacro %}"
    + nested_loops(2, "{% call m() %}{% endcall %}"),
    "maps of maps": "{{ range(90000) | map('string') | map('upper') | list | length }}" * 200,
    "select in a loop": nested_loops(1, "{{ range(90000) | select('odd') | first }}{{ range(90000) | sum }}"),
    "a sum of lists": "{{ ([[0] * 100] * 1000000) | sum(start=[]) | length }}",
    "searches in one expression": BIG + many("('xx' ~ messages) in big", 1500),
    "searches for a constant": BIG + many("'xy' in big", 2500),
    "comparisons": BIG + "{% set other = 'x' * 7999999 ~ 'y' %}" + many("big == other", 2500),
    "searches by a method": BIG + many("big.count('xy')", 1500),
    "case tests": BIG + many("big is lower", 2500),
    "a long search from behind": "{{ ('a' * 8000000).rfind('a' * 2000000 + 'b' + 'a' * 2000000) }}",
    "stripping many characters": "{{ ('a' * 8000000).strip('b' * 4000000 + 'a') | length }}",
    "trimming many characters": "{{ ('a' * 8000000) | trim('b' * 4000000 + 'a') | length }}",
    "a doubling list compared": TWO_DOUBLING_LISTS + "{{ m.a == ns.a }}",
    "a doubling list searched": TWO_DOUBLING_LISTS + "{{ m.a in [ns.a] }}",
    "a doubling list tested": TWO_DOUBLING_LISTS + "{{ m.a is eq(ns.a) }}",
    "a doubling list sorted": TWO_DOUBLING_LISTS + "{{ [m.a, ns.a] | sort | length }}",
    "a doubling list found": TWO_DOUBLING_LISTS + "{{ [m.a].index(ns.a) }}",
    "a doubling tuple as a key": DOUBLING_TUPLE + "{{ {}[ns.a] }}",
    "a doubling tuple in a dict": DOUBLING_TUPLE + "{{ {ns.a: 1} | length }}",
    "a doubling tuple looked up": DOUBLING_TUPLE + "{{ {}.get(ns.a) }}",
    "a doubling tuple in dict()": DOUBLING_TUPLE + "{{ dict([(ns.a, 1)]) | length }}",
    "a doubling tuple made unique": DOUBLING_TUPLE + "{{ [ns.a] | map('default') | unique | list | length }}",
    "slow filters": BIG + "{{ big | urlize }}{{ big | wordwrap(1) }}{{ ('<!-- ' * 1000000) | striptags }}",
}
HUGE = {
    "a text times a number": "{{ 'a' * 10**10 }}",
    "a number times a text": "{{ 10**10 * 'a' }}",
    "a list times a number": "{{ ([0] * 10**10) | length }}",
    "a tuple times a number": "{{ ((0,) * 10**10) | length }}",
    "a number of many digits": "{{ 10 ** (10 ** 10) }}",
    "a square of squares": growing("10", "ns.a * ns.a"),
    "a number that grows": growing("10", "ns.a - -ns.a", times=50000),
    "a doubling text": growing("'x'", "ns.a + ns.a"),
    "a doubling text by ~": growing("'x'", "ns.a ~ ns.a"),
    "a doubling block": "{% set ns = namespace(a='x') %}{% for i in range(99) %}"
    "{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}{% set ns.a = b %}{% endfor %}",
    "a doubling list of lists": growing("[0]", "ns.a + ns.a"),
    "% with a width": "{{ '%1000000000d' % 1 }}",
    "% with a precision": "{{ '%.1000000000f' % 1.5 }}",
    "% with a width from a value": "{{ '%*d' % (1000000000, 1) }}",
    "% with a width behind a name": "{{ '%(a(b)c)1000000000d' % {'a(b)c': 1} }}",
    "% with many fields": BIG + "{{ ('%(a)s' * 10000) % {'a': big} }}",
    "format with a width": "{{ '{:>1000000000}'.format(1) }}",
    "format with a width from a value": "{{ '{:>{w}}'.format(1, w=1000000000) }}",
    "format with many fields": BIG + "{{ ('{0}' * 10000).format(big) }}",
    "format of a doubling list": DOUBLING_LIST + "{{ '{}'.format(ns.a) }}",
    "format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "the format filter": "{{ '%1000000000d' | format(1) }}",
    "format by attribute": "{{ ('{:>1000000000}' | attr('format'))(1) }}",
    "format by map": "{{ (['{:>1000000000}'] | map(attribute='format') | first)(1) }}",
    "format by groupby": "{{ (['{:>1000000000}'] | groupby('format') | first)[0](1) }}",
    "center": "{{ 'x'.center(10**9) }}",
    "the center filter": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "rjust": "{{ 'x'.rjust(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "translate": BIG + "{{ big.translate({120: big}) }}",
    "encode": "{{ 'x'.encode().ljust(10**9) }}",
    "to_bytes": "{{ (5).to_bytes(10**10, 'big') }}",
    "fromkeys": "{{ {}.fromkeys(range(90000)) }}",
    "join": BIG + "{{ ','.join([big] * 100000) }}",
    "the join filter": BIG + "{{ ([big] * 100000) | join }}",
    "a long separator": BIG + "{{ ([1] * 100000) | join(big) }}",
    "replace": BIG + "{{ big.replace('', big) }}",
    "the replace filter": BIG + "{{ big | replace('x', big) }}",
    "split": BIG + "{{ big.split('x') | length }}",
    "splitlines": "{{ ('\n' * 8000000).splitlines() | length }}",
    "the list filter": BIG + "{{ big | list | length }}",
    "the sort filter": BIG + "{{ big | sort | length }}",
    "arguments": BIG + "{{ dict(*big) }}",
    "slices": BIG + many("big[1:]", 1500),
    "parts of lists": LONG_LIST + many("long[1:]", 1500),
    "copies": LONG_LIST + many("long.copy()", 1500),
    "upper cases": BIG + many("big.upper()", 1500),
    "the upper filter": BIG + many("big | upper", 1500),
    "indent by a number": "{{ ('x\n' * 100000) | indent(1000000000) }}",
    "indent by a text": BIG + "{{ ('x\n' * 100000) | indent(big) }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "round": "{{ 5 | round(1000000000, 'ceil') }}",
    "round to the left": "{{ 5 | round(-1000000000) }}",
    "tojson with an indent": "{{ [1] | tojson(indent=1000000000) }}",
    "tojson with separators": BIG + "{{ ([1] * 100000) | tojson(separators=(big, big)) }}",
    "tojson of a doubling list": DOUBLING_LIST + "{{ ns.a | tojson }}",
    "tojson of a deep list": DEEP_LIST + "{{ ns.a | tojson }}",
    "a doubling list printed": DOUBLING_LIST + "{{ ns.a }}",
    "a doubling list by ~": DOUBLING_LIST + "{{ ns.a ~ '' }}",
    "a doubling list by %": DOUBLING_LIST + "{{ '%s' % ns.a }}",
    "a doubling list as string": DOUBLING_LIST + "{{ ns.a | string }}{{ ns.a | upper }}",
    "a doubling list by pprint": DOUBLING_LIST + "{{ ns.a | pprint }}",
    "a deep list printed": DEEP_LIST + "{{ ns.a }}",
    "a deep tuple as a key": DEEP_TUPLE + "{{ {}[ns.a] }}",
    "a deep tuple as an attribute": DEEP_TUPLE + "{{ [{}] | map(attribute=ns.a) | list }}",
    "a deep tuple as an attribute to select": DEEP_TUPLE + "{{ [{}] | selectattr(ns.a) | list }}",
    "a deep tuple as an attribute to join": DEEP_TUPLE + "{{ [{}] | join(',', ns.a) }}",
    "a deep tuple as an attribute to sort": DEEP_TUPLE + "{{ [{}] | sort(attribute=ns.a) }}",
    "a deep tuple as a filter": DEEP_TUPLE + "{{ [{}] | map(ns.a) | list }}",
    "a deep tuple as a test": DEEP_TUPLE + "{{ ns.a is filter }}",
    "a long attribute": BIG + "{{ [{}] | map(attribute=big | replace('x', '.')) | list }}",
    "a deep tuple looked up": DEEP_TUPLE + "{{ {}.get(ns.a) }}{{ ns.a in {} }}",
    "output": BIG + "{% for i in range(100) %}{{ big }}{% endfor %}",
    "output of a macro": BIG + "{% macro m() %}{% for i in range(90000) %}{{ big }}{% endfor %}{% endmacro %}{{ m() }}",
    "output of a filter block": BIG
    + "{% filter upper %}{% for i in range(90000) %}{{ big }}{% endfor %}{% endfilter %}",
    "output of plain words": nested_loops(2, "words " * 1000),
    "a range": "{{ range(10**9) | list }}",
    "a range of big steps": "{% for i in range(10**12) %}{% endfor %}",
    "lorem ipsum": "{{ lipsum(n=1000000000) }}",
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
    "autoescape": "{% autoescape true %}{{ messages }}{% endautoescape %}",
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
    "a long template": "x" * (limits.MAX_TEMPLATE_CHARACTERS + 1),
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
