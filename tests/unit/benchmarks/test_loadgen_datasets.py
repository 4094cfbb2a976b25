"""What is sent: lengths, shared beginnings, turns, files; the same for the same seed."""

from __future__ import annotations

import json

import pytest

from ratoon.benchmarks.loadgen.datasets import (
    LengthRange,
    Shape,
    Sources,
    TextPrompts,
    TokenPrompts,
    multi_turn_sessions,
    random_sessions,
    read_jsonl,
    shared_prefix_sessions,
)
from ratoon.core.errors import RequestError

TOKENS = TokenPrompts([*range(100, 400), 100])
TEXT = TextPrompts(tokens_per_word=1.0)


def shape(**fields) -> Shape:
    lengths = {"input_len": LengthRange(10, 20), "output_len": LengthRange(3, 5)}
    return Shape(**{"num_requests": 12, **lengths, **fields})


@pytest.mark.parametrize("make", [random_sessions, shared_prefix_sessions, multi_turn_sessions])
@pytest.mark.parametrize("maker", [TOKENS, TEXT])
def test_the_same_seed_gives_the_same_requests_and_rounds_share_lengths_alone(make, maker):
    first, again, other_round = (
        make(shape(prefix_len=8), maker, Sources.of(3, purpose)) for purpose in ("round 0", "round 0", "round 1")
    )
    assert first == again
    for one, other in zip(first, other_round):
        for turn, other_turn in zip(one, other, strict=True):
            assert turn.prompt != other_turn.prompt
            assert turn.output_len == other_turn.output_len


def test_prompts_of_token_ids_have_exactly_the_wanted_length_and_only_known_tokens():
    sessions = random_sessions(shape(input_len=LengthRange(17, 17)), TOKENS, Sources.of(0, "x"))
    prompts = [turn.prompt for session in sessions for turn in session]
    assert {len(prompt) for prompt in prompts} == {17}
    assert {token for prompt in prompts for token in prompt} <= set(range(100, 400))
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 12


def test_lengths_are_spread_over_their_range():
    sessions = random_sessions(shape(num_requests=200), TOKENS, Sources.of(0, "x"))
    assert {len(session[0].prompt) for session in sessions} == set(range(10, 21))
    assert {session[0].output_len for session in sessions} == {3, 4, 5}


def test_text_has_as_many_words_as_make_the_wanted_tokens():
    sessions = random_sessions(shape(input_len=LengthRange(60, 60)), TextPrompts(1.5), Sources.of(0, "x"))
    assert {len(session[0].prompt.split()) for session in sessions} == {40}


@pytest.mark.parametrize("maker", [TOKENS, TEXT])
def test_groups_share_a_prefix_and_take_turns(maker):
    sessions = shared_prefix_sessions(shape(prefix_len=30, num_groups=3), maker, Sources.of(0, "x"))
    prompts = [turn.prompt if maker is TOKENS else turn.prompt.split() for (turn,) in sessions]
    prefixes = [tuple(prompt[:30]) for prompt in prompts]
    assert len(set(prefixes)) == 3
    assert prefixes[:3] == prefixes[3:6]
    assert all(40 <= len(prompt) <= 50 for prompt in prompts)


def test_conversations_have_so_many_turns_and_requests_in_all():
    sessions = multi_turn_sessions(shape(num_requests=10, num_turns=4), TEXT, Sources.of(0, "x"))
    assert [len(session) for session in sessions] == [4, 4, 2]


def test_a_file_may_hold_prompts_and_messages(tmp_path):
    path = tmp_path / "requests.jsonl"
    lines = [
        {"prompt": "Hi", "output_len": 7},
        {"prompt": [1, 2, 3], "max_tokens": 8, "something": "else"},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    turns = [turn for session in read_jsonl(str(path), default_output_len=99) for turn in session]
    assert [turn.output_len for turn in turns] == [7, 8, 99]
    assert [turn.prompt for turn in turns] == ["Hi", [1, 2, 3], None]
    assert turns[2].messages == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2"),
        ('{"prompt": "a"}\nnonsense', "line 2"),
        ('{"output_len": 3}', "either a prompt or messages"),
        ('{"prompt": "a", "messages": [{}]}', "either a prompt or messages"),
        ('{"prompt": "a", "output_len": 0}', "output_len 0"),
        ("\n", "no requests"),
        ('{"prompt": "\udcff"}', "line 1"),
    ],
)
def test_a_bad_file_is_said_with_the_line(tmp_path, text, part):
    path = tmp_path / "requests.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RequestError, match=part):
        read_jsonl(str(path), 16)
    with pytest.raises(RequestError, match="can't be read"):
        read_jsonl(str(tmp_path / "missing"), 16)
