"""Which engine a request goes to: short queues, and prefixes that an engine already has."""

from __future__ import annotations

import random

from ratoon.core.adapters import Adapter
from ratoon.core.params import PoolingParams, SamplingParams
from ratoon.core.request import EngineCoreRequest, Extraction
from ratoon.engine.processes.balancer import ENTRIES_BY_ENGINE, LEAST_MARKS, MARKS_BY_ENGINE, MAX_HOMES, LoadBalancer

PIECE = 4


def request(name: str, tokens: list[int], salt: str | None = None, adapter: Adapter | None = None) -> EngineCoreRequest:
    return EngineCoreRequest(name, tokens, SamplingParams(), cache_salt=salt, adapter=adapter)


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


def test_an_engine_has_a_prefix_with_the_adapter_of_this_digest_alone():
    """Whatever the adapter's name and place: its files may have changed, or be those of another name."""
    two = balancer()
    document = list(range(400))
    first, other = Adapter("1" * 32, "/a", 8), Adapter("2" * 32, "/a", 8)
    assert two.choose(request("first", document, adapter=first), [0, 1]) == 0
    two.started("first")
    for name, adapter in (("base", None), ("changed", other)):
        assert two.choose(request(name, document, adapter=adapter), [0, 1]) == 1, "no engine has computed it"
        two.ended(name)
    assert two.choose(request("moved", document, adapter=Adapter("1" * 32, "/b", 8)), [0, 1]) == 0


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


def test_memory_is_bounded_by_the_number_of_engines():
    for num_engines in (2, 32):
        several = balancer(num_engines)
        most = max(LEAST_MARKS, MARKS_BY_ENGINE * num_engines)
        for i in range(most // 16 + 1):
            several.learn(0, request("x", []), list(range(i * 1000, i * 1000 + 16 * PIECE)))
        assert len(several._homes) == most


def test_a_long_conversation_is_remembered_at_few_places():
    two = balancer()
    two.learn(0, request("x", []), list(range(64_000 * PIECE)))
    assert len(two._homes) < 16 + 8 * 12
    two.learn(1, request("y", []), list(range(9_000 * PIECE)))
    known = two._known_tokens(two._marks_behind((0, hash((None, None))), list(range(10_000 * PIECE))))
    assert 10_000 * PIECE * 7 / 8 < known[0] <= 10_000 * PIECE
    assert 9_000 * PIECE * 7 / 8 < known[1] <= 9_000 * PIECE


def test_a_conversation_is_found_behind_a_prompt_that_many_engines_have():
    many = balancer(3 * MAX_HOMES)
    everyone = list(range(3 * MAX_HOMES))
    system_prompt = list(range(100))
    mine = [*system_prompt, *range(1000, 1400)]
    many.learn(5, request("mine", []), mine)
    for engine in everyone:
        many.learn(engine, request("other", []), system_prompt)
    assert many.choose(request("next", [*mine, 1, 2]), everyone) == 5


def test_the_choice_is_the_one_that_a_look_at_all_engines_gives():
    draw = random.Random(1)
    many = balancer(20)
    documents = [[1000 * i + j for j in range(draw.randrange(4, 300))] for i in range(12)]
    running: list[str] = []
    for number in range(600):
        candidates = sorted(draw.sample(range(20), draw.randint(1, 20)))
        tokens = [*draw.choice(documents)[: draw.randrange(4, 300)], *(draw.randrange(10**6) for _ in range(20))]
        asked = request(str(number), tokens)
        known = many._known_tokens(many._marks_behind((0, hash((None, None))), tokens))
        costs = {i: (many.loads[i].num_tokens - known.get(i, 0), many.loads[i].num_chosen) for i in candidates}
        chosen = many.choose(asked, candidates)
        assert costs[chosen] == min(costs.values())
        running.append(asked.request_id)
        if draw.random() < 0.8:
            many.started(draw.choice(running))
            many.ended(running.pop(draw.randrange(len(running))))
        if number % 100 == 99:
            many.forget(draw.randrange(20))
    assert len(many._by_load) <= ENTRIES_BY_ENGINE * 20


def test_an_engine_that_is_added_gets_the_next_request():
    two = balancer()
    for i in range(4):
        two.choose(request(str(i), [1000 * i + j for j in range(40)]), [0, 1])
    assert two.add_engine() == 2
    assert two.choose(request("next", list(range(7000, 7040))), [0, 1, 2]) == 2


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
