"""What the encoder of media has made: who holds it, what goes first when room is needed, and that counts agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratoon.core.media import EMBEDS, IMAGE, MediaInput
from ratoon.core.wire import WireTensor
from ratoon.memory.encoder_cache import EncoderCache, key_of_media


def picture(num_rows: int, modality: str = IMAGE) -> MediaInput:
    return MediaInput(modality, num_rows, WireTensor("uint8", (0,), b""))


def run(cache: EncoderCache) -> tuple[list[str], list[str]]:
    """The keys of a step's inputs, and those that are dropped before."""
    scheduled, freed = cache.take_scheduled(), cache.take_freed()
    cache.check()
    return list(scheduled), freed


def test_an_output_stays_for_later_sequences_and_is_run_once() -> None:
    cache = EncoderCache(10)
    assert not cache.hold("a", "cat")
    assert cache.schedule("a", "cat", picture(4))
    assert cache.hold("b", "cat"), "a sequence of the same step reads it too"
    assert cache.num_rows_to_run == 4
    assert run(cache) == (["cat"], [])
    cache.release("a")
    cache.release("b")
    cache.check()
    assert cache.hold("c", "cat") and run(cache) == ([], [])


def test_the_least_recently_used_output_that_no_sequence_holds_is_dropped_for_another() -> None:
    cache = EncoderCache(10)
    for name in ("a", "b", "c"):
        assert cache.schedule(name, name, picture(3))
    run(cache)
    for name in ("b", "c", "a"):
        cache.release(name)
    assert cache.hold("x", "b")  # used again, and held
    assert cache.schedule("y", "d", picture(4))
    assert run(cache) == (["d"], ["c"])
    assert "a" in cache and "c" not in cache


def test_what_is_held_is_never_dropped_and_an_input_without_room_changes_nothing() -> None:
    cache = EncoderCache(10)
    assert cache.schedule("a", "cat", picture(6)) and cache.schedule("b", "dog", picture(2))
    run(cache)
    cache.release("b")
    assert not cache.has_room(5) and not cache.schedule("c", "bird", picture(5))
    assert run(cache) == ([], []) and "dog" in cache
    assert cache.has_room(4) and cache.schedule("c", "bird", picture(4))
    assert run(cache) == (["bird"], ["dog"])


def test_an_input_that_no_sequence_needs_any_more_leaves_the_step() -> None:
    cache = EncoderCache(10)
    assert cache.schedule("a", "cat", picture(6)) and cache.schedule("a", "dog", picture(2))
    assert cache.hold("b", "dog")
    cache.release("a")
    assert cache.num_rows_to_run == 2 and cache.num_rows == 2
    assert run(cache) == (["dog"], [])


def test_a_release_may_spare_one_output() -> None:
    cache = EncoderCache(10)
    assert cache.schedule("a", "cat", picture(3)) and cache.schedule("a", "dog", picture(3))
    run(cache)
    cache.release("a", keep="dog")
    assert cache.keys_held_by("a") == {"dog"}
    assert not cache.schedule("b", "large", picture(8))


def test_rows_that_a_request_brought_take_room_and_no_run_of_the_encoder() -> None:
    cache = EncoderCache(10)
    assert cache.schedule("a", "words", picture(7, EMBEDS))
    assert cache.num_rows == 7 and cache.num_rows_to_run == 0
    assert not cache.schedule("b", "cat", picture(4))


def test_what_failed_steps_should_have_made_is_gone_and_is_dropped_by_the_runner_in_any_case() -> None:
    cache = EncoderCache(4)
    assert cache.schedule("a", "cat", picture(4))
    run(cache)
    cache.release("a")
    assert cache.schedule("b", "dog", picture(3))
    scheduled, freed = run(cache)
    assert (scheduled, freed) == (["dog"], ["cat"])
    cache.plan_failed(scheduled, freed)
    cache.check()
    assert "dog" not in cache and cache.keys_held_by("b") == frozenset()
    assert cache.schedule("b", "cat", picture(4))
    assert run(cache) == (["cat"], ["dog", "cat"]), "dropped, then made"


def test_what_a_failed_sequence_held_is_made_again_for_others() -> None:
    cache = EncoderCache(10)
    assert cache.schedule("a", "cat", picture(4)) and cache.hold("b", "cat")
    run(cache)
    cache.release("a", trusted=False)
    cache.check()
    assert "cat" not in cache and cache.num_holders == 0
    assert cache.schedule("b", "cat", picture(4)) and run(cache) == (["cat"], ["cat"])


def test_a_reset_drops_everything_and_is_refused_while_something_is_held() -> None:
    cache = EncoderCache(10)
    assert cache.schedule("a", "cat", picture(4))
    run(cache)
    with pytest.raises(AssertionError):
        cache.reset()
    cache.release("a")
    cache.reset()
    assert len(cache) == cache.num_rows == 0 and run(cache) == ([], ["cat"])


def test_a_salt_separates_outputs_and_no_hash_can_imitate_a_salted_one() -> None:
    keys = [key_of_media("h", None), key_of_media("h", "x"), key_of_media("h", "y"), key_of_media("hx", None)]
    assert len(set(keys)) == 4 and keys[0] == "h"
    assert key_of_media("ab", "c") != key_of_media("b", "ca")


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["want", "want", "want", "release", "fail", "step", "step", "failing step"]),
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(OPERATIONS, st.integers(6, 14))
def test_counts_agree_and_the_runner_always_has_what_is_held(operations: list[tuple[str, int, int]], room: int) -> None:
    cache = EncoderCache(room)
    there: set[str] = set()  # in the runner
    planned: set[str] = set()  # in the step being planned
    for name, holder, number in operations:
        key = f"{number}"
        if name == "want" and not cache.hold(holder, key):
            fits = cache.has_room(1 + number)
            assert cache.schedule(holder, key, picture(1 + number)) == fits
            if fits:
                planned.add(key)
        elif name == "release":
            cache.release(holder)
        elif name == "fail" and not cache.scheduled_keys():
            cache.release(holder, trusted=False)
        elif name in ("step", "failing step"):
            scheduled, freed = cache.take_scheduled(), cache.take_freed()
            assert scheduled.keys() <= planned
            there -= set(freed)
            assert there.isdisjoint(scheduled), "what is there is made again"
            if name == "step" or number % 2:
                there |= scheduled.keys()
            if name == "failing step":
                cache.plan_failed(scheduled, freed)
            held = set().union(*(cache.keys_held_by(one) for one in range(4)))
            assert held <= there, "held, and not there"
            planned = set()
        cache.check()
