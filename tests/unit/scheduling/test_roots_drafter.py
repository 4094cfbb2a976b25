"""Drafts from the texts of ended requests: what is proposed, to whom, for how long, and in how much memory."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ratoon.core.adapters import Adapter
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.speculation import SpeculationConfig
from ratoon.scheduling.branch import Branch, Request
from ratoon.scheduling.drafters.roots import TOKENS_BETWEEN_COUNTS, RootsDrafter
from ratoon.scheduling.drafters.suffix_index import ANCHOR_BYTES, TOKEN_BYTES
from ratoon.scheduling.scheduler import Scheduler
from tests.unit.scheduling.steps import add as add_request
from tests.unit.scheduling.steps import scheduler_of, step

ALL = 1 << 40
TEXT = list(range(100, 140))


def branch_of(
    name: str, tokens: Sequence[int], owner: str | None = None, salt: str | None = None, adapter: Adapter | None = None
) -> Branch:
    asked = EngineCoreRequest(
        name, list(tokens), SamplingParams(), owner=owner, cache_salt=salt, adapter=adapter, external_id=name
    )
    return Request(asked, 0, 1 << 30).branches[0]


def drafter_with(*texts: Sequence[int], max_bytes: int = 1 << 20) -> RootsDrafter:
    drafter = RootsDrafter(max_bytes)
    for number, text in enumerate(texts):
        add(drafter, branch_of(f"root-{number}", text))
    return drafter


def add(drafter: RootsDrafter, branch: Branch) -> None:
    drafter.add(branch)
    drafter.work(ALL)
    drafter.check()


def test_what_follows_in_an_ended_text_is_proposed() -> None:
    drafter = drafter_with(TEXT)
    assert drafter.propose(branch_of("a", TEXT[:10]), 5) == TEXT[10:15]
    assert drafter.propose(branch_of("b", [1, 2, *TEXT[4:10]]), 5) == TEXT[10:15]
    assert not drafter.propose(branch_of("c", [1, *TEXT[8:10]]), 5), "two tokens are no match"
    assert not drafter.propose(branch_of("d", TEXT), 5), "nothing follows"


def test_a_draft_is_at_most_as_long_as_the_match_before_it() -> None:
    drafter = drafter_with(TEXT)
    assert drafter.propose(branch_of("a", [1, *TEXT[5:9]]), 16) == TEXT[9:13]
    assert drafter.propose(branch_of("b", [1, *TEXT[5:17]]), 16) == TEXT[17:29]


def test_a_text_is_drafted_from_once_it_is_linked() -> None:
    drafter = RootsDrafter(1 << 20)
    drafter.add(branch_of("root", TEXT))
    assert drafter.has_work and not drafter.propose(branch_of("a", TEXT[:10]), 5)
    drafter.work(15)
    assert drafter.has_work and drafter.propose(branch_of("b", TEXT[:10]), 5) == TEXT[10:15]
    drafter.work(ALL)
    assert not drafter.has_work


def test_the_place_of_a_branch_is_followed_and_found_again_behind_an_edit() -> None:
    drafter = drafter_with(TEXT)
    branch = branch_of("a", TEXT[:10])
    for number in range(10, 20):
        assert drafter.propose(branch, 3) == TEXT[number : number + 3]
        branch.append_tokens([TEXT[number]])
    branch.append_tokens([7, 8])
    assert not drafter.propose(branch, 3)
    branch.append_tokens(TEXT[25:28])
    assert drafter.propose(branch, 3) == TEXT[28:31]
    assert drafter.propose(branch, 3) == TEXT[28:31], "the same again, without new tokens"


def test_the_longest_match_decides_and_then_the_most_texts() -> None:
    drafter = drafter_with([1, 2, 3, 4, 50, 51], [9, 2, 3, 4, 60, 61], [8, 2, 3, 4, 60, 62])
    assert drafter.propose(branch_of("a", [1, 2, 3, 4]), 4) == [50, 51]
    assert drafter.propose(branch_of("b", [7, 2, 3, 4]), 4)[:1] == [60]


def test_a_text_that_was_added_twice_counts_twice() -> None:
    often = [1, 2, 3, 4, 50, 51]
    drafter = drafter_with(often, often, [1, 2, 3, 4, 60, 61])
    assert drafter.propose(branch_of("a", often[:4]), 2) == [50, 51]
    drafter = drafter_with(often, [1, 2, 3, 4, 60, 61], [1, 2, 3, 4, 60, 61])
    assert drafter.propose(branch_of("a", often[:4]), 2) == [60, 61]


def test_a_draft_ends_where_texts_no_longer_agree() -> None:
    beginning = [1, 2, 3, 4, 5, 6]
    texts = [[*beginning, 10 + number, 20 + number] for number in range(4)]
    drafter = RootsDrafter(1 << 20, min_probability=0.3)
    for number, text in enumerate(texts):
        add(drafter, branch_of(str(number), text))
    assert drafter.propose(branch_of("a", beginning[:4]), 4) == [5, 6], "of what follows each is one of four"


@pytest.mark.parametrize("other", [{"owner": "b"}, {"salt": "s"}, {"adapter": Adapter("x", "/x", 8)}, {"owner": None}])
def test_nothing_is_drafted_from_texts_of_another_owner_salt_or_adapter(other: dict[str, Any]) -> None:
    drafter = RootsDrafter(1 << 20)
    add(drafter, branch_of("root", TEXT, owner="a"))
    assert not drafter.propose(branch_of("stranger", TEXT[:10], **{"owner": "a", **other}), 5)  # type: ignore[arg-type]
    assert drafter.propose(branch_of("own", TEXT[:10], owner="a"), 5) == TEXT[10:15]
    add(drafter, branch_of("root-2", [*TEXT[:10], 1, 2, 3, 4], **{"owner": "a", **other}))  # type: ignore[arg-type]
    assert drafter.propose(branch_of("own-2", TEXT[:10], owner="a"), 5) == TEXT[10:15]


def test_nothing_is_drafted_from_a_forgotten_text_from_that_moment_on() -> None:
    drafter = drafter_with(TEXT, [1, 2, 3])
    following = branch_of("a", TEXT[:10])
    assert drafter.propose(following, 5)
    drafter.forget(["root-0", "root-17"])
    assert not drafter.propose(following, 5) and not drafter.propose(branch_of("b", TEXT[:10]), 5)
    drafter.work(ALL)
    drafter.check()
    assert not drafter.propose(following, 5) and len(drafter) == 1


def test_what_a_kept_text_has_in_common_with_a_forgotten_one_stays() -> None:
    longer = [*TEXT, 1, 2, 3, 4]
    drafter = drafter_with(TEXT, longer)
    drafter.forget(["root-0"])
    drafter.work(ALL)
    drafter.check()
    assert drafter.propose(branch_of("a", TEXT[:30]), 14) == longer[30:]
    drafter = drafter_with(TEXT, longer)
    drafter.forget(["root-1"])
    drafter.work(ALL)
    drafter.check()
    assert drafter.propose(branch_of("a", TEXT[:30]), 14) == TEXT[30:]


def test_a_place_is_not_followed_into_text_that_came_in_the_place_of_a_forgotten_one() -> None:
    drafter = drafter_with(TEXT[:20], TEXT)
    branch = branch_of("a", TEXT[:30])
    assert drafter.propose(branch, 5) == TEXT[30:35]
    drafter.forget(["root-1"])
    drafter.work(ALL)
    add(drafter, branch_of("root-2", [*TEXT[:20], *range(900, 920)]))
    assert not drafter.propose(branch, 5)


def test_an_index_without_texts_is_dropped() -> None:
    drafter = RootsDrafter(1 << 20)
    for number in range(20):
        add(drafter, branch_of(f"root-{number}", TEXT, owner=f"owner-{number % 3}", salt=str(number)))
    drafter.propose(branch_of("a", TEXT[:10], owner="owner-0", salt="0"), 5)
    drafter.forget([f"root-{number}" for number in range(20)])
    drafter.work(ALL)
    drafter.check()
    assert drafter.num_bytes == 0 and not drafter._scopes and not drafter._owners and not drafter.has_work


def random_text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(50_000) for _ in range(length)]


def test_memory_stays_within_its_limit_and_the_least_recently_used_text_goes() -> None:
    rng, max_bytes = random.Random(0), 1 << 20
    drafter = RootsDrafter(max_bytes)
    texts = [random_text(rng, 500) for _ in range(60)]
    slack = TOKENS_BETWEEN_COUNTS * (TOKEN_BYTES + ANCHOR_BYTES)
    for number, text in enumerate(texts):
        drafter.add(branch_of(str(number), text))
        while drafter.has_work:
            drafter.work(100)
            assert drafter.num_bytes <= max_bytes + slack
        assert drafter.num_bytes <= max_bytes
        assert drafter.propose(branch_of("a", texts[0][:9]), 4) == texts[0][9:13], "the first one is used all the time"
    drafter.check()
    assert 5 < len(drafter) < 30
    assert drafter.propose(branch_of("b", texts[-1][:9]), 4) and not drafter.propose(branch_of("c", texts[1][:9]), 4)


def test_a_text_that_does_not_fit_drives_out_no_other() -> None:
    drafter = drafter_with(TEXT, max_bytes=20_000)
    add(drafter, branch_of("long", random_text(random.Random(0), 5000)))
    assert len(drafter) == 1 and drafter.propose(branch_of("a", TEXT[:10]), 5)


def test_an_owner_with_much_text_drives_out_its_own() -> None:
    rng = random.Random(0)
    drafter = RootsDrafter(1 << 20)
    add(drafter, branch_of("quiet", TEXT, owner="quiet"))
    for number in range(30):
        add(drafter, branch_of(f"loud-{number}", random_text(rng, 500), owner="loud", salt=str(number % 4)))
    assert drafter.propose(branch_of("a", TEXT[:10], owner="quiet"), 5)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", ["different", "equal", "turns", "short", "salts"])
def test_the_memory_that_is_counted_is_the_memory_that_is_used(kind: str) -> None:
    rng = random.Random(0)
    shared = random_text(rng, 4000)
    shapes: dict[str, tuple[int, Callable[[int], list[int]]]] = {
        "different": (40, lambda number: random_text(rng, 1000)),
        "equal": (40, lambda number: [number, *shared]),
        "turns": (40, lambda number: shared[: 100 * (number + 1)]),
        "short": (500, lambda number: [number, *random_text(rng, 12)]),
        "salts": (200, lambda number: random_text(rng, 50)),
    }
    count, make = shapes[kind]
    texts = [make(number) for number in range(count)]
    gc.collect()
    tracemalloc.start()
    try:
        drafter = RootsDrafter(1 << 30)
        for number, text in enumerate(texts):
            drafter.add(branch_of(f"request-{number}", text, salt=str(number) if kind == "salts" else None))
            drafter.work(ALL)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * used < drafter.num_bytes < 1.4 * used


def test_an_ended_branch_leaves_nothing_behind() -> None:
    drafter = drafter_with(TEXT)
    branch = branch_of("a", TEXT[:10])
    drafter.propose(branch, 5)
    drafter.drop(branch)
    assert not any(scope.places for scope in drafter._scopes.values())
    drafter.drop(branch)


# ---- in the scheduler ----


def kept_by(scheduler: Scheduler) -> RootsDrafter:
    roots = scheduler.state.speculation._roots
    assert roots is not None
    return roots


def scheduler_with_roots() -> Scheduler:
    return scheduler_of(max_steps_in_flight=1, speculation=SpeculationConfig(speculate="roots"))


def test_a_text_is_kept_when_its_branch_has_ended_or_was_aborted() -> None:
    scheduler = scheduler_with_roots()
    add_request(scheduler, "ended", 5, max_tokens=2)
    add_request(scheduler, "aborted", 5)
    add_request(scheduler, "failed", 5)
    step(scheduler)
    assert len(kept_by(scheduler)) == 0
    step(scheduler)
    add_request(scheduler, "never ran", 5)
    scheduler.abort_requests(["aborted", "never ran"])
    scheduler.fail_requests(["failed"], "it broke")
    assert set(kept_by(scheduler)._owner_of) == {"ended", "aborted"}
    assert scheduler.has_work_beside_step
    scheduler.work_beside_step()
    assert not scheduler.has_work_beside_step
    scheduler.forget_roots(["ended", "aborted", "another"])
    assert kept_by(scheduler).num_bytes == 0, "freed at once, where that takes little time"
    scheduler.check()


def test_nothing_is_kept_without_the_source() -> None:
    scheduler = scheduler_of(max_steps_in_flight=1)
    add_request(scheduler, "a", 5, max_tokens=1)
    step(scheduler)
    assert not scheduler.has_work_beside_step
    scheduler.forget_roots(["a"])


def test_choices_are_texts_of_their_own() -> None:
    scheduler = scheduler_with_roots()
    add_request(scheduler, "a", 5, n=2, max_tokens=2)
    step(scheduler)
    step(scheduler)
    assert set(kept_by(scheduler)._owner_of) == {"a", "a#1"}
    scheduler.forget_roots(["a", "a#1"])
    assert len(kept_by(scheduler)) == 0
