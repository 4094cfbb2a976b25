"""Which engine a request goes to: short queues, and prefixes that an engine already has."""

from __future__ import annotations

from ratoon.core.params import PoolingParams, SamplingParams
from ratoon.core.request import EngineCoreRequest, Extraction
from ratoon.engine.processes.balancer import MAX_REMEMBERED, LoadBalancer

PIECE = 4


def request(name: str, tokens: list[int], salt: str | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(name, tokens, SamplingParams(), cache_salt=salt)


def balancer(num_engines: int = 2) -> LoadBalancer:
    return LoadBalancer(num_engines, PIECE)


def test_strangers_spread_over_the_engines():
    two = balancer()
    chosen = [two.choose(request(str(i), [1000 * i + j for j in range(40)]), [0, 1]) for i in range(8)]
    assert chosen.count(0) == chosen.count(1) == 4


def test_engines_with_nothing_to_do_take_turns():
    two = balancer()
    for i in range(6):
        assert two.choose(request(str(i), [1000 * i + j for j in range(40)]), [0, 1]) == i % 2
        two.ended(str(i))


def test_the_next_turn_goes_where_the_last_one_was():
    two = balancer()
    conversations = {name: [base + j for j in range(200)] for name, base in (("a", 0), ("b", 1000), ("c", 2000))}
    homes = {name: two.choose(request(name, tokens), [0, 1]) for name, tokens in conversations.items()}
    for turn in range(5):
        for name in ("c", "a", "b"):
            conversations[name] += range(10)
            two.ended(name if turn == 0 else f"{name}{turn - 1}")
            assert two.choose(request(f"{name}{turn}", conversations[name]), [0, 1]) == homes[name]


def test_a_long_queue_outweighs_a_short_prefix():
    two = balancer()
    shared = list(range(8))
    assert two.choose(request("first", [*shared, 100]), [0, 1]) == 0
    chosen = [two.choose(request(f"r{i}", [*shared, 200 + i]), [0, 1]) for i in range(20)]
    assert chosen.count(1) >= 8


def test_a_long_prefix_outweighs_a_short_queue():
    two = balancer()
    document = list(range(2000))
    assert two.choose(request("first", document), [0, 1]) == 0
    two.started("first")
    assert [two.choose(request(f"r{i}", [*document, i]), [0, 1]) for i in range(5)] == [0] * 5


def test_other_salts_do_not_share():
    two = balancer()
    document = list(range(400))
    two.choose(request("a", document, "one"), [0, 1])
    assert two.choose(request("b", document, "two"), [0, 1]) == 1


def test_a_restarted_engine_has_forgotten_everything():
    two = balancer()
    document = list(range(400))
    assert two.choose(request("a", document), [0, 1]) == 0
    two.ended("a")
    two.learn(1, request("x", document), document[:200])
    two.forget(0)
    assert two.choose(request("b", document), [0, 1]) == 1


def test_only_engines_that_are_there_are_chosen():
    three = balancer(3)
    assert {three.choose(request(str(i), [i] * 8), [2]) for i in range(4)} == {2}


def test_the_books_are_empty_when_all_has_ended():
    two = balancer()
    for i in range(10):
        two.choose(request(str(i), list(range(i * 5 + 1))), [0, 1])
        two.started(str(i))
        two.started(str(i))
    for i in range(10):
        two.ended(str(i))
        two.ended(str(i))
    assert [(load.num_requests, load.num_tokens) for load in two.loads] == [(0, 0), (0, 0)]


def test_memory_is_bounded():
    two = balancer()
    for i in range(40):
        two.learn(0, request("x", []), list(range(i * 20_000, i * 20_000 + 8_000)))
    assert len(two._homes) == MAX_REMEMBERED


def test_what_generates_nothing_counts_with_the_rows_that_it_runs():
    two = balancer(1)
    asked = request("x", [*range(40)])
    asked.params = Extraction([39], [1])
    two.choose(asked, [0])
    assert two.loads[0].num_tokens == 41
    two.ended("x")
    two.choose(asked, [0])
    assert two.loads[0].num_tokens == 1, "the engine has the rest of its sequence now"
    pooled = request("p", [*range(100, 110)])
    pooled.params = PoolingParams()
    two.choose(pooled, [0])
    assert two.loads[0].num_tokens == 11
