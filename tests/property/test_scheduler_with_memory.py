"""The scheduler and its memory against a runner that notices every wrong slot, under random load."""

from __future__ import annotations

from hypothesis import given, settings

from tests.property.drive import Drive
from tests.property.loads import Load, loads
from tests.property.results import check_results


def examples(at_least: int) -> settings:
    return settings(max_examples=max(at_least, settings.default.max_examples))


def run(load: Load) -> None:
    drive = Drive(load)
    drive.run()
    check_results(drive)


@examples(400)
@given(loads())
def test_every_request_ends_with_the_tokens_it_would_get_alone(load: Load) -> None:
    run(load)


@examples(200)
@given(loads("rooted"))
def test_continuations_end_with_the_tokens_of_the_whole_text(load: Load) -> None:
    run(load)


@examples(300)
@given(loads("restarting"))
def test_requests_that_go_on_in_a_new_engine_end_with_the_same_tokens_each_once(load: Load) -> None:
    run(load)


@examples(300)
@given(loads("searching"))
def test_beam_searches_end_with_the_texts_they_would_find_alone(load: Load) -> None:
    run(load)


@examples(250)
@given(loads("reading"))
def test_extractions_end_with_the_states_of_their_own_sequence(load: Load) -> None:
    run(load)


@given(loads("rooted", "reading", "restarting"))
def test_extractions_begin_again_in_a_new_engine(load: Load) -> None:
    run(load)


@examples(200)
@given(loads("encoding"))
def test_branches_read_what_the_encoder_made_of_their_own_input_and_it_runs_no_oftener_than_it_must(load: Load) -> None:
    run(load)


@given(loads("swapping"))
def test_branches_that_were_swapped_go_on_where_they_were(load: Load) -> None:
    run(load)
