"""The scheduler and its memory against a runner that notices every wrong slot, under random load."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given, settings

from ratoon.core.plan import SchedulerOutput
from ratoon.core.wire import Buffer, encode
from ratoon.memory import prefix_cache
from tests import seeds
from tests.property.drive import Drive
from tests.property.loads import Load, loads
from tests.property.results import check_results


@pytest.fixture(autouse=True, scope="module")
def late_registration() -> Iterator[None]:
    """The blocks of the short prompts here are registered after their step is planned, as those of long ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "MANY_BLOCKS", 2)
        yield


class RecordingDrive(Drive):
    def start(self) -> None:
        super().start()
        self.plans: list[Buffer] = []
        schedule = self.scheduler.schedule

        def record() -> SchedulerOutput:
            plan = schedule()
            self.plans.append(encode(plan)[0])
            return plan

        self.scheduler.schedule = record


def examples(in_full: int = seeds.EXAMPLES_IN_FULL) -> settings:
    """So many in `make test-all`. They are dear: `make test`, which repeats the same ones in each run, has a tenth of
    them, where other properties have a fifth. Runs with numbers of their own have a fifth here too."""
    chosen = settings.default.max_examples
    if seeds.asked() is None and chosen < seeds.EXAMPLES_IN_FULL:
        return settings(max_examples=in_full // 10)
    return settings(max_examples=max(seeds.examples(in_full), chosen))


def run(load: Load) -> None:
    drive = Drive(load)
    drive.run()
    check_results(drive)


@examples(400)
@given(loads())
def test_every_request_ends_with_the_tokens_it_would_get_alone(load: Load) -> None:
    run(load)


@examples(200)
@given(loads("guessing"))
def test_guesses_at_next_tokens_change_none(load: Load) -> None:
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


@examples()
@given(loads("rooted", "reading", "restarting"))
def test_extractions_begin_again_in_a_new_engine(load: Load) -> None:
    run(load)


@examples(200)
@given(loads("encoding"))
def test_branches_read_what_the_encoder_made_of_their_own_input_and_it_runs_no_oftener_than_it_must(load: Load) -> None:
    run(load)


@examples()
@given(loads("swapping"))
def test_branches_that_were_swapped_go_on_where_they_were(load: Load) -> None:
    run(load)


@examples()
@given(loads("searching", "swapping"))
def test_searches_that_were_swapped_go_on_where_their_beams_were(load: Load) -> None:
    run(load)


@examples(200)
@given(loads("adapted"))
def test_requests_with_more_adapters_than_slots_all_end_and_each_reads_its_own(load: Load) -> None:
    run(load)


@examples()
@given(loads("adapted", "rooted", "reading", "restarting"))
def test_continuations_and_readings_have_the_adapter_of_their_parent(load: Load) -> None:
    run(load)


@examples()
@given(loads("adapted", "owned", "swapping"))
def test_requests_with_adapters_that_were_preempted_go_on_where_they_were(load: Load) -> None:
    run(load)


@examples(400)
@given(loads("seeing"))
def test_prompts_read_the_rows_of_their_own_images(load: Load) -> None:
    run(load)


@examples()
@given(loads("seeing", "rooted", "reading", "restarting"))
def test_continuations_and_readings_have_the_images_of_their_parent(load: Load) -> None:
    run(load)


@examples()
@given(loads("seeing", "swapping", "searching"))
def test_requests_with_images_that_were_preempted_go_on_where_they_were(load: Load) -> None:
    run(load)


@examples()
@given(loads("seeing", "owned", "guessing"))
def test_owners_share_steps_in_which_images_run_whole(load: Load) -> None:
    run(load)


@examples()
@given(loads("owned"))
def test_requests_of_several_owners_all_end_with_the_tokens_they_would_get_alone(load: Load) -> None:
    run(load)


@examples()
@given(loads("owned", "swapping"))
def test_branches_that_gave_way_to_another_owner_go_on_where_they_were(load: Load) -> None:
    run(load)


@examples()
@given(loads("owned", "rooted", "reading", "restarting"))
def test_owners_share_leases_and_extractions_also_in_a_new_engine(load: Load) -> None:
    run(load)


@examples()
@given(loads("conversing", "rooted"))
def test_sessions_change_no_token(load: Load) -> None:
    run(load)


@examples()
@given(loads("conversing", "rooted", "swapping", "owned"))
def test_sessions_of_several_owners_share_little_memory(load: Load) -> None:
    run(load)


@pytest.mark.check
@examples(200)
@given(loads())
def test_one_owner_alone_is_planned_as_none_at_all(load: Load) -> None:
    """Step by step, the same plans."""
    plans = []
    for owners in ([None], ["ada"]):
        drive = RecordingDrive(dataclasses.replace(load, owners=owners))
        drive.run()
        plans.append(drive.plans)
    assert plans[0] == plans[1]


@examples(300)
@given(loads("stateful"))
def test_layers_with_states_go_on_from_the_state_behind_their_own_tokens(load: Load) -> None:
    run(load)


@examples(200)
@given(loads("stateful", "rooted", "reading"))
def test_continuations_and_readings_of_such_models_begin_at_states_that_were_kept(load: Load) -> None:
    run(load)


@examples(200)
@given(loads("stateful", "searching", "swapping"))
def test_beams_of_such_models_have_states_of_their_own_and_are_swapped_with_them(load: Load) -> None:
    run(load)
