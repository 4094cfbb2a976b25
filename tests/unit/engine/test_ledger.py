"""The record of requests under way: what is replayed after an engine died, and who is blamed for it."""

from __future__ import annotations

from typing import Any

from ratoon.core.params import BeamSearchParams, HiddenStatesParams, SamplingParams
from ratoon.core.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Extraction,
    FinishReason,
)
from ratoon.core.wire import WireTensor
from ratoon.engine.processes.ledger import MAX_STRIKES, Ledger


def request(name: str, n: int = 1) -> EngineCoreRequest:
    return EngineCoreRequest(name, [1, 2, 3], SamplingParams(n=n, max_tokens=8))


def hand_over(ledger: Ledger, engine: int = 0) -> list[str]:
    entries = ledger.ready_to_go()
    for entry in entries:
        ledger.handed_over(entry, engine)
    return [entry.request.request_id for entry in entries]


def outputs(*items: EngineCoreOutput) -> EngineCoreOutputs:
    return EngineCoreOutputs(list(items))


def token(name: str, value: int, choice: int = 0, reason: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(name, [value], choice, reason)


def ledger_with(*names: str, n: int = 1) -> Ledger:
    ledger = Ledger()
    for name in names:
        ledger.add(request(name, n))
    return ledger


def test_a_request_is_handed_over_once():
    ledger = ledger_with("a", "b")
    assert hand_over(ledger) == ["a", "b"]
    assert hand_over(ledger) == []


def test_a_request_that_had_begun_goes_on_behind_its_tokens():
    ledger = ledger_with("a")
    hand_over(ledger)
    ledger.record(outputs(token("a", 7)))
    ledger.record(outputs(token("a", 8)))
    assert ledger.engine_died(0) == []
    (entry,) = ledger.ready_to_go()
    resumed = entry.current_request()
    assert [choice.token_ids for choice in resumed.resumed] == [[7, 8]]
    assert resumed.prompt_token_ids == [1, 2, 3] and resumed.params == entry.request.params


def test_a_request_without_a_token_is_sent_as_it_was():
    ledger = ledger_with("a")
    hand_over(ledger)
    ledger.engine_died(0)
    (entry,) = ledger.ready_to_go()
    assert entry.current_request() is entry.request


def test_what_is_replayed_does_not_change_under_the_senders_hands():
    ledger = ledger_with("a")
    hand_over(ledger)
    ledger.record(outputs(token("a", 7)))
    ledger.engine_died(0)
    sent = ledger.ready_to_go()[0].current_request()
    hand_over(ledger)
    ledger.record(outputs(token("a", 8)))
    assert sent.resumed[0].token_ids == [7]


def test_choices_that_are_done_are_marked_so():
    ledger = ledger_with("a", n=3)
    hand_over(ledger)
    ledger.record(outputs(*(token("a", 7, choice) for choice in range(3))))
    ledger.record(outputs(token("a", 8, 0, FinishReason.STOP), token("a", 9, 2)))
    assert ledger.abort(["a#1"]) == ({0: ["a#1"]}, [])  # a stop string ended it on this side
    ledger.engine_died(0)
    resumed = ledger.ready_to_go()[0].current_request().resumed
    assert [(choice.token_ids, choice.finished) for choice in resumed] == [
        ([7, 8], True),
        ([7], True),
        ([7, 9], False),
    ]


def test_a_request_is_forgotten_when_all_of_it_has_ended():
    ledger = ledger_with("a", n=2)
    hand_over(ledger)
    assert ledger.record(outputs(token("a", 7, 0, FinishReason.LENGTH), token("a", 7, 1))) == []
    (ended,) = ledger.record(outputs(token("a", 7, 1, FinishReason.STOP)))
    assert ended.request.request_id == "a" and ended.engine == 0
    assert len(ledger) == 0


def test_a_refused_request_is_forgotten_whatever_its_choices():
    ledger = ledger_with("a", n=4)
    hand_over(ledger)
    ledger.record(outputs(EngineCoreOutput("a", [], finish_reason=FinishReason.ERROR, error="too long")))
    assert len(ledger) == 0


def test_an_abort_names_the_engine_that_has_the_request():
    ledger = ledger_with("a", "b")
    for entry, engine in zip(ledger.ready_to_go(), (1, 0)):
        ledger.handed_over(entry, engine)
    ledger.add(request("c"))
    to_send, ended = ledger.abort(["b", "a", "c", "unknown", "b#7", "#", "b#x"])
    assert to_send == {0: ["b"], 1: ["a"]}
    assert [entry.request.request_id for entry in ended] == ["b", "a", "c"]
    assert len(ledger) == 0 and ledger.ready_to_go() == []


def test_a_request_has_ended_with_the_last_of_its_choices():
    ledger = ledger_with("a", n=2)
    hand_over(ledger)
    ledger.record(outputs(token("a", 7, 0), token("a", 7, 1)))
    assert ledger.abort(["a#1"])[1] == []
    assert [entry.request.request_id for entry in ledger.abort(["a#0"])[1]] == ["a"]
    assert len(ledger) == 0


def test_only_the_dead_engines_requests_wait_again_in_their_old_order():
    ledger = ledger_with("a", "b", "c")
    for entry, engine in zip(ledger.ready_to_go(), (0, 1, 0)):
        ledger.handed_over(entry, engine)
    ledger.record(outputs(token("a", 1), token("c", 1)))
    ledger.add(request("d"))
    ledger.engine_died(0)
    assert [entry.request.request_id for entry in ledger.ready_to_go()] == ["a", "c", "d"]


def test_suspects_are_let_in_one_at_a_time_and_the_innocent_with_them():
    ledger = ledger_with("busy", "silent", "poison")
    hand_over(ledger)
    ledger.record(outputs(token("busy", 1)))
    ledger.engine_died(0)
    assert hand_over(ledger) == ["busy", "silent"]
    assert hand_over(ledger) == []  # poison waits until silent is cleared
    ledger.record(outputs(token("silent", 1)))
    assert hand_over(ledger) == ["poison"]


def test_only_the_one_that_kills_the_engine_is_given_up():
    """poison kills every engine that runs it; the others end with all their tokens."""
    ledger = ledger_with("a", "b", "poison", "c")
    failed: list[str] = []
    given: dict[str, int] = {}
    inside: list[str] = []
    for _ in range(100):
        inside += hand_over(ledger)
        if "poison" in inside:
            failed += [output.request_id for output in ledger.engine_died(0)]
            inside = []
            continue
        for name in list(inside):
            given[name] = given.get(name, 0) + 1
            done = given[name] == 5
            ledger.record(outputs(token(name, given[name], 0, FinishReason.LENGTH if done else None)))
            if done:
                inside.remove(name)
        if not len(ledger):
            break
    assert failed == ["poison"]
    assert given == {"a": 5, "b": 5, "c": 5}


def test_an_engine_that_is_killed_while_requests_get_on_is_nobodys_fault():
    ledger = ledger_with("a", "b")
    for round_number in range(20 * MAX_STRIKES):
        assert hand_over(ledger) == ["a", "b"]
        ledger.record(outputs(token("a", round_number), token("b", round_number)))
        assert ledger.engine_died(0) == []
    assert len(ledger.ready_to_go()[0].current_request().resumed[0].token_ids) == 20 * MAX_STRIKES


# ---- requests that receive nothing before their end ----


def advance(ledger: Ledger, **counts: int) -> None:
    ledger.record(EngineCoreOutputs(advanced=counts))


def test_a_request_that_is_computed_without_output_is_not_blamed_for_kills():
    ledger = Ledger()
    for name in ("a", "b"):
        ledger.add(search(name))
    for round_number in range(3 * MAX_STRIKES):
        assert hand_over(ledger) == ["a", "b"]
        for _ in range(round_number + 1):
            advance(ledger, a=8, b=8)
        assert ledger.engine_died(0) == []


def test_kills_before_anything_is_computed_do_not_end_requests_that_were_not_alone():
    ledger = ledger_with("a", "b", "c")
    for _ in range(MAX_STRIKES):
        assert hand_over(ledger)
        assert ledger.engine_died(0) == []
    for _ in range(3):
        (name,) = hand_over(ledger)
        ledger.record(outputs(token(name, 1, reason=FinishReason.STOP)))
    assert len(ledger) == 0


def test_a_search_that_kills_engines_at_the_same_token_is_given_up_although_it_gets_that_far_each_time():
    ledger = Ledger()
    ledger.add(search("poison"))
    num_deaths, failed = 0, []
    while not failed and num_deaths < 10:
        assert hand_over(ledger) == ["poison"]
        for _ in range(5):
            advance(ledger, poison=8)
        num_deaths, failed = num_deaths + 1, ledger.engine_died(0)
    assert num_deaths == 1 + MAX_STRIKES and len(ledger) == 0


def test_a_search_that_tells_its_best_text_is_given_up_as_well():
    ledger = Ledger()
    ledger.add(search("poison"))
    num_deaths, failed = 0, []
    while not failed and num_deaths < 10:
        hand_over(ledger)
        ledger.record(outputs(found("poison", 7)))
        num_deaths, failed = num_deaths + 1, ledger.engine_died(0)
    assert num_deaths == 1 + MAX_STRIKES


def test_a_request_that_kills_engines_is_found_although_new_ones_arrive_all_the_time():
    ledger = ledger_with("poison")
    failed: list[str] = []
    num_deaths = number = 0
    while "poison" not in failed:
        number += 1
        assert num_deaths < 10, "it is never given up"
        ledger.add(request(f"new-{number}"))
        inside = hand_over(ledger)
        if "poison" in inside:
            num_deaths += 1
            failed += [output.request_id for output in ledger.engine_died(0)]
        else:
            ledger.record(outputs(*(token(name, 1) for name in inside)))
    assert failed == ["poison"]
    assert len(ledger) == number, "all others are still there"
    hand_over(ledger)
    assert not ledger.ready_to_go()


def test_a_request_under_strong_suspicion_is_tried_by_itself():
    ledger = ledger_with("poison")
    hand_over(ledger)
    ledger.engine_died(0)
    ledger.add(request("a"))
    assert hand_over(ledger) == ["poison"], "nothing else could be the cause of the next death"
    assert hand_over(ledger) == []
    ledger.abort(["poison"])
    assert hand_over(ledger) == ["a"], "others do not wait any longer"


def test_a_request_under_strong_suspicion_waits_until_those_inside_have_progressed():
    ledger = ledger_with("poison", "a")
    for entry, engine in zip(ledger.ready_to_go(), (0, 1)):
        ledger.handed_over(entry, engine)
    ledger.engine_died(0)
    ledger.add(request("b"))
    assert hand_over(ledger) == []
    ledger.record(outputs(token("a", 1)))
    assert hand_over(ledger) == ["poison"]
    ledger.record(outputs(token("poison", 1)))
    assert hand_over(ledger) == ["b"], "it was not the cause"


def test_giving_up_ends_every_choice_that_is_open():
    ledger = ledger_with("a", n=2)
    hand_over(ledger)
    ledger.record(outputs(token("a", 1, 0, FinishReason.STOP), token("a", 1, 1)))
    ends = ledger.fail_all("gone")
    assert [(output.request_id, output.choice, output.finish_reason) for output in ends] == [
        ("a", 1, FinishReason.ERROR)
    ]
    assert len(ledger) == 0


# ---- beam searches ----


def search(name: str, n: int = 2) -> EngineCoreRequest:
    beam_params = BeamSearchParams(beam_width=4, n=n, max_tokens=8)
    return EngineCoreRequest(name, [1, 2, 3], beam_params)


def found(name: str, *token_ids: int, choice: int = 0, reason: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(name, list(token_ids), choice, reason, replaces=True)


def test_a_beam_search_that_found_fewer_texts_has_ended_with_them():
    ledger = Ledger()
    ledger.add(search("a", n=3))
    hand_over(ledger)
    first = found("a", 7, reason=FinishReason.STOP)
    first.num_texts = 2
    assert ledger.record(outputs(first)) == []
    (ended,) = ledger.record(outputs(found("a", 8, choice=1, reason=FinishReason.STOP)))
    assert ended.request.request_id == "a" and len(ledger) == 0


def test_a_beam_search_is_replayed_from_its_beginning():
    ledger = Ledger()
    ledger.add(search("a"))
    hand_over(ledger)
    ledger.record(outputs(found("a", 7)))
    ledger.record(outputs(found("a", 8, 9)))
    assert ledger.engine_died(0) == []
    (entry,) = ledger.ready_to_go()
    assert entry.current_request() is entry.request and entry.request.resumed is None
    assert entry.choices[0].token_ids == [8, 9], "the best text, not all that there ever were"
    assert entry.strikes == 0


def test_a_beam_search_ends_with_the_last_of_its_texts():
    ledger = Ledger()
    ledger.add(search("a"))
    hand_over(ledger)
    assert ledger.record(outputs(found("a", 7, reason=FinishReason.LENGTH))) == []
    (entry,) = ledger.record(outputs(found("a", 8, 9, choice=1, reason=FinishReason.STOP)))
    assert [choice.token_ids for choice in entry.choices] == [[7], [8, 9]]
    assert len(ledger) == 0


def test_a_beam_search_that_fails_has_ended_whatever_it_told_before():
    ledger = Ledger()
    ledger.add(search("a", n=3))
    hand_over(ledger)
    ledger.record(outputs(found("a", 7, 8)))
    (entry,) = ledger.record(outputs(EngineCoreOutput("a", [], 0, FinishReason.ERROR, error="no")))
    assert entry.request.request_id == "a" and len(ledger) == 0


def test_a_beam_search_that_kills_engines_is_given_up_with_all_its_choices():
    ledger = Ledger()
    ledger.add(search("a"))
    for _ in range(MAX_STRIKES - 1):
        hand_over(ledger)
        assert ledger.engine_died(0) == []
    hand_over(ledger)
    assert [output.choice for output in ledger.engine_died(0)] == [0, 1]


def rows(name: str, first_row: int, reason: FinishReason | None = None) -> EngineCoreOutput:
    part = WireTensor("float32", (1, 1, 2), bytes(8))
    return EngineCoreOutput(name, [], finish_reason=reason, hidden_states=part, first_row=first_row)


def ledger_with_extraction() -> Ledger:
    ledger = ledger_with("a")
    asked = EngineCoreRequest("x", [1, 2, 3], Extraction([0, 2], [1]))
    ledger.add(asked)
    return ledger


def test_an_extraction_begins_again_and_is_no_suspect_once_a_part_has_come():
    ledger = ledger_with_extraction()
    hand_over(ledger)
    ledger.record(outputs(rows("x", 0)))
    assert ledger.engine_died(0) == []
    (x,) = [entry for entry in ledger.ready_to_go() if entry.request.request_id == "x"]
    assert x.strikes == 0 and x.current_request() is x.request
    hand_over(ledger)
    ended = ledger.record(outputs(rows("x", 0), rows("x", 1, FinishReason.STOP)))
    assert [entry.request.request_id for entry in ended] == ["x"] and len(ledger) == 1


def test_an_extraction_that_kills_every_engine_is_given_up():
    ledger = Ledger()
    ledger.add(EngineCoreRequest("x", [1], Extraction([0], [1])))
    for _ in range(MAX_STRIKES):
        assert hand_over(ledger) == ["x"]
        failed = ledger.engine_died(0)
    assert [(output.request_id, output.finish_reason) for output in failed] == [("x", FinishReason.ERROR)]
    assert len(ledger) == 0


def test_a_replayed_request_keeps_its_owner():
    """It takes its owner's turn in the next engine as well."""
    ledger = Ledger()
    ledger.add(EngineCoreRequest("r", [1, 2], SamplingParams(max_tokens=9), owner="ada"))
    (entry,) = ledger.ready_to_go()
    ledger.handed_over(entry, 0)
    ledger.record(EngineCoreOutputs([EngineCoreOutput("r", [7])]))
    ledger.engine_died(0)
    (entry,) = ledger.ready_to_go()
    again = entry.current_request()
    assert again.resumed is not None and again.owner == "ada"


# ---- hidden states that come with texts ----


def asking(n: int = 1, stop: list[str] | None = None) -> EngineCoreRequest:
    states = HiddenStatesParams(positions=[-1], layers_passed=[1])
    params = SamplingParams(n=n, max_tokens=8, stop=stop, return_hidden_states=states)
    return EngineCoreRequest("a", [1, 2, 3], params, owner="ada", cache_salt="s")


def ledger_that_asks(**how: Any) -> Ledger:
    ledger = Ledger()
    ledger.add(asking(**how))
    hand_over(ledger)
    return ledger


def test_a_reading_is_recorded_and_only_sent_if_its_engine_dies():
    ledger = ledger_that_asks()
    (ended,) = ledger.record(outputs(token("a", 7), token("a", 8, reason=FinishReason.LENGTH)))
    assert ended.request.request_id == "a" and len(ledger) == 1 and hand_over(ledger) == []
    ledger.record(outputs(rows("a.states", 0)))
    assert ledger.engine_died(0) == []
    (entry,) = ledger.ready_to_go()
    sent = entry.current_request()
    assert (sent.request_id, sent.prompt_token_ids, sent.params) == ("a.states", [1, 2, 3, 7, 8], Extraction([4], [1]))
    assert (sent.owner, sent.cache_salt, sent.continuation_of) == ("ada", "s", "a")
    hand_over(ledger)
    ledger.record(outputs(rows("a.states", 0, FinishReason.STOP)))
    assert len(ledger) == 0


def test_a_reading_that_ends_or_is_aborted_leaves_nothing():
    ledger = ledger_that_asks()
    ledger.record(outputs(token("a", 8, reason=FinishReason.LENGTH)))
    to_send, (entry,) = ledger.abort(["a.states"])
    assert to_send == {0: ["a.states"]} and entry.request.request_id == "a.states" and len(ledger) == 0
    for reason in (FinishReason.ERROR, FinishReason.ABORT):
        ledger = ledger_that_asks()
        ledger.record(outputs(token("a", 8), EngineCoreOutput("a", [], 0, reason)))
        assert len(ledger) == 0, "there is nothing to read"


def test_a_choice_that_was_read_in_time_is_not_read_again_with_the_others():
    ledger = ledger_that_asks(n=2)
    ledger.record(outputs(token("a", 7), token("a", 8, 1, FinishReason.LENGTH)))
    ledger.record(outputs(rows("a#1.states", 0, FinishReason.STOP)))
    ledger.engine_died(0)
    (entry,) = ledger.ready_to_go()
    assert [choice.finished for choice in entry.current_request().resumed] == [False, True]


def test_a_stop_string_that_was_found_here_cuts_the_text_that_is_read():
    ledger = ledger_that_asks(stop=["."])
    ledger.record(outputs(token("a", 7), token("a", 8), token("a", 9)))
    to_send, (ended,) = ledger.stop({"a": 2})
    assert to_send == {0: {"a": 2}} and ended.request.request_id == "a"
    ledger.record(outputs(token("a", 10, reason=FinishReason.LENGTH)))  # it did not know yet
    ledger.engine_died(0)
    (entry,) = ledger.ready_to_go()
    assert (entry.request.request_id, entry.request.prompt_token_ids) == ("a.states", [1, 2, 3, 7, 8])


def test_a_text_that_may_hold_a_stop_string_is_recorded_until_its_length_is_told():
    ledger = ledger_that_asks(stop=["."])
    assert ledger.record(outputs(token("a", 7), token("a", 8, reason=FinishReason.LENGTH))) == []
    assert len(ledger) == 1
    to_send, (ended,) = ledger.stop({"a": 2})
    assert to_send == {0: {"a": 2}} and ended.request.request_id == "a" and hand_over(ledger) == []
    assert len(ledger) == 1, "the reading"


def test_a_text_whose_length_is_told_after_its_engine_died_is_read_by_another():
    ledger = ledger_that_asks(n=2, stop=["."])
    ledger.record(outputs(token("a", 7), token("a", 8, 1, FinishReason.LENGTH)))
    ledger.engine_died(0)
    assert hand_over(ledger, 1) == ["a"]
    to_send, ended = ledger.stop({"a#1": 1})
    assert (to_send, ended) == ({}, []), "the new engine has not got that text"
    assert hand_over(ledger, 1) == ["a#1.states"]
    ledger = ledger_that_asks(stop=["."])
    ledger.record(outputs(token("a", 7), token("a", 8, reason=FinishReason.LENGTH)))
    ledger.engine_died(0)
    assert hand_over(ledger) == [], "there is nothing to generate"
    assert ledger.stop({"a": 1})[0] == {} and hand_over(ledger) == ["a.states"]
    assert len(ledger) == 1


def test_a_text_without_the_requested_positions_has_no_reading():
    ledger = ledger_that_asks()
    (entry,) = ledger._entries.values()
    entry.request.params.return_hidden_states.positions = [9]
    ledger.record(outputs(token("a", 8, reason=FinishReason.LENGTH)))
    assert len(ledger) == 0


def test_a_suspect_is_not_given_up_for_a_reading_that_kills_engines():
    ledger = Ledger()
    for new in (asking(), request("bystander")):
        ledger.add(new)
    hand_over(ledger)
    ledger.engine_died(0)  # neither has received anything
    assert hand_over(ledger) == ["a"]
    ledger.record(outputs(token("a", 7, reason=FinishReason.LENGTH)))  # now the engine reads its states
    failed: list[str] = []
    inside = [*hand_over(ledger), "a.states"]
    for _ in range(10):
        if "a.states" in inside:
            failed += [output.request_id for output in ledger.engine_died(0)]
            inside = []
        else:
            ledger.record(outputs(token("bystander", 1)))
        inside += hand_over(ledger)
    assert failed == ["a.states"]
