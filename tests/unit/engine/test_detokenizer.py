"""Text comes out in pieces that join to the whole, never ends inside a character, never shows part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratoon.core.params import SamplingParams
from ratoon.engine.output.detokenizer import (
    LONGEST_STALL,
    Detokenizer,
    FastDetokenizer,
    SlowDetokenizer,
    StopStrings,
    make_detokenizer,
)
from ratoon.models.tokenizer import Tokenizer
from tests.unit.engine.fakes import END, SlowTokenizer, byte_tokenizer, sentencepiece_tokenizer

BYTES = byte_tokenizer()
TABLE = Tokenizer(byte_tokenizer().backend, {"eos_token": "<|end|>"})  # with a table of whole texts
PIECES = sentencepiece_tokenizer()
FORMS = {"fast": BYTES, "slow": SlowTokenizer(BYTES), "table": TABLE}


def byte_ids(text: str) -> list[int]:
    return list(text.encode())


def run(tokenizer, token_ids, params=None, prompt=(), step=1):
    """Feed tokens `step` at a time. Returns the pieces, the stop string, and the detokenizer."""
    detokenizer = make_detokenizer(tokenizer, list(prompt), params or SamplingParams())
    pieces, stop = [], None
    for start in range(0, len(token_ids), step):
        stop = detokenizer.update(token_ids[start : start + step])
        pieces.append(detokenizer.next_text(finished=stop is not None, delta=True))
        if stop is not None:
            return pieces, stop, detokenizer
    stop = detokenizer.finish()
    pieces.append(detokenizer.next_text(finished=True, delta=True))
    return pieces, stop, detokenizer


def test_the_form_follows_from_tokenizer_and_params():
    params = SamplingParams()
    assert type(make_detokenizer(None, [], params)) is Detokenizer
    assert type(make_detokenizer(BYTES, [], SamplingParams(detokenize=False))) is Detokenizer
    assert type(make_detokenizer(BYTES, [], params)) is FastDetokenizer
    assert type(make_detokenizer(SlowTokenizer(BYTES), [], params)) is SlowDetokenizer


def test_without_a_tokenizer_tokens_are_kept_and_text_is_empty():
    _, _, detokenizer = run(None, [5, 6, 7])
    assert detokenizer.token_ids == [5, 6, 7]
    assert detokenizer.next_text(finished=True, delta=False) == ""


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 257), max_size=60),
    prompt=st.text(max_size=5),
    step=st.integers(1, 4),
    skip=st.booleans(),
)
def test_pieces_join_to_the_full_decode_for_any_bytes(form, token_ids, prompt, step, skip):
    pieces, _, detokenizer = run(
        FORMS[form], token_ids, SamplingParams(skip_special_tokens=skip), prompt=byte_ids(prompt), step=step
    )
    assert "".join(pieces) == BYTES.decode(token_ids, skip_special_tokens=skip)
    assert detokenizer.next_text(finished=True, delta=False) == "".join(pieces)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=150, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 257), max_size=60),
    asked=st.sets(st.integers(0, 59)),
    skip=st.booleans(),
    spaces=st.booleans(),
    ended=st.booleans(),
)
def test_the_text_does_not_depend_on_when_it_is_asked_for(form, token_ids, asked, skip, spaces, ended):
    params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    texts = []
    for places in (set(range(60)), asked, set()):
        detokenizer = make_detokenizer(FORMS[form], byte_ids("a"), params)
        for place, token in enumerate(token_ids):
            detokenizer.update([token], ended_by_token=ended and place == len(token_ids) - 1)
            if place in places:
                detokenizer.next_text(finished=False, delta=bool(place % 2))
        detokenizer.finish()
        texts.append(detokenizer.text)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=30))
def test_no_piece_of_a_whole_text_holds_half_a_character(form, text):
    pieces, _, _ = run(FORMS[form], byte_ids(text))
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text


@pytest.mark.parametrize("form", FORMS)
def test_half_a_character_at_the_end_comes_out_as_a_replacement(form):
    pieces, _, _ = run(FORMS[form], [*byte_ids("a"), *byte_ids("あ")[:2]])
    assert pieces == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize("form", FORMS)
def test_a_long_run_of_broken_bytes_is_let_out_before_the_end(form):
    broken = [0xFF] * (4 * LONGEST_STALL)
    pieces, _, _ = run(FORMS[form], [*broken, *byte_ids("あb")])
    assert "".join(pieces) == BYTES.decode([*broken, *byte_ids("あb")])
    assert any(pieces[: 2 * LONGEST_STALL])


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_that_ends_inside_a_character_does_not_leak_into_the_text(form):
    pieces, _, _ = run(FORMS[form], byte_ids("yes"), prompt=[*byte_ids("secret"), 0xE3])
    assert "".join(pieces) == "yes"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab.あ", min_size=1, max_size=24),
    stops=st.lists(st.text(alphabet="ab.あ", min_size=1, max_size=4), max_size=3),
    step=st.integers(1, 5),
    include=st.booleans(),
    slow=st.booleans(),
)
def test_stop_strings_cut_the_text_at_the_same_place_however_it_arrives(text, stops, step, include, slow):
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    pieces, stop, detokenizer = run(FORMS["slow" if slow else "fast"], byte_ids(text), params, step=step)
    # By hand: read the text one character at a time until it ends with a stop string; the longest of those wins.
    expected, expected_stop = text, None
    for end in range(1, len(text) + 1):
        ended = [candidate for candidate in stops if text[:end].endswith(candidate)]
        if ended:
            expected_stop = max(ended, key=len)
            expected = text[:end] if include else text[: end - len(expected_stop)]
            break
    assert stop == expected_stop
    assert "".join(pieces) == expected == detokenizer.next_text(finished=True, delta=False)


@pytest.mark.parametrize(
    ("stops", "found"),
    [(["bcd", "c"], ("c", "ab")), (["abc", "bc"], ("abc", "")), (["bc", "abc"], ("abc", "")), (["x"], None)],
)
def test_in_a_piece_of_several_characters_the_stop_string_that_is_complete_first_wins(stops, found):
    assert StopStrings(stops, include_in_text=False).find("abcd", checked=0) == found


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none():
    pieces, stop, _ = run(BYTES, byte_ids("x</y</s>z"), SamplingParams(stop=["</s>"]))
    assert pieces == ["x", "", "", "</y", "", "", "", ""]
    assert stop == "</s>"


def test_nothing_is_held_back_when_the_stop_string_belongs_to_the_output():
    pieces, _, _ = run(BYTES, byte_ids("a</s>"), SamplingParams(stop=["</s>"], include_stop_str_in_output=True))
    assert pieces == ["a", "<", "/", "s", ">"]


def test_tokens_behind_a_stop_string_are_left_out():
    detokenizer = make_detokenizer(BYTES, [], SamplingParams(stop=["b"]))
    assert detokenizer.update(byte_ids("abcd")) == "b"
    assert detokenizer.token_ids == byte_ids("ab")


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, ".a"), (2, ".a"), (3, ".a.b")])
def test_stop_strings_count_only_after_min_tokens(min_tokens, text):
    pieces, stop, _ = run(BYTES, byte_ids(".a.b.c"), SamplingParams(stop=["."], min_tokens=min_tokens))
    assert "".join(pieces) == text
    assert stop == "."


@pytest.mark.parametrize(("include", "text"), [(False, "hi"), (True, "hi!")])
def test_a_stop_token_is_in_the_text_only_if_asked_for(include, text):
    detokenizer = make_detokenizer(BYTES, [], SamplingParams(include_stop_str_in_output=include))
    detokenizer.update(byte_ids("hi!"), ended_by_token=True)
    detokenizer.finish()
    assert detokenizer.next_text(finished=True, delta=False) == text
    assert detokenizer.token_ids == byte_ids("hi!")


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<|end|>b")])
def test_special_tokens_are_skipped_or_shown(skip, text):
    pieces, _, _ = run(BYTES, [*byte_ids("a"), END, *byte_ids("b")], SamplingParams(skip_special_tokens=skip))
    assert "".join(pieces) == text


@pytest.mark.parametrize("slow", [False, True])
def test_the_space_before_the_first_word_depends_on_the_prompt(slow):
    tokenizer = SlowTokenizer(PIECES) if slow else PIECES
    world = PIECES.backend.token_to_id("▁world")
    hello = PIECES.backend.token_to_id("▁hello")
    assert "".join(run(tokenizer, [world, hello], prompt=[hello])[0]) == " world hello"
    assert "".join(run(tokenizer, [world, hello])[0]) == "world hello"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([" hello", " world", "lo", "a", "あ", ".", "é", "😀", " a"]),
        min_size=1,
        max_size=20,
    ),
    st.booleans(),
)
def test_pieces_join_to_the_full_decode_with_byte_fallback(words, slow):
    token_ids = []
    for word in words:
        token = PIECES.backend.token_to_id(word.replace(" ", "▁"))
        token_ids += [token] if token is not None else [byte + 1 for byte in word.encode()]
    pieces, _, _ = run(SlowTokenizer(PIECES) if slow else PIECES, token_ids)
    assert "".join(pieces) == PIECES.decode(token_ids)
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("slow", [False, True])
def test_text_that_contradicts_what_is_out_does_not_end_the_stream(slow):
    """A byte run that turns out to be broken decodes differently as a whole: what is out stays, the rest goes on."""
    tokenizer = SlowTokenizer(PIECES) if slow else PIECES
    letter, broken, word = 0x41 + 1, 0xE3 + 1, PIECES.backend.token_to_id("lo")
    pieces, _, _ = run(tokenizer, [letter, broken, word, word])
    assert pieces[0] == "A"
    assert "".join(pieces).endswith("lolo")


def test_consecutive_special_tokens_are_glued_when_asked():
    backend = PIECES.backend
    end, word = backend.token_to_id("</s>"), backend.token_to_id("▁a")
    params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    text = "".join(run(PIECES, [end, end, word], params)[0])
    assert text == "</s></s> a"


def test_a_table_has_whole_characters_alone_and_only_where_texts_add_up():
    assert TABLE.whole_texts is not None
    assert TABLE.whole_texts[ord("a")] == "a"
    assert TABLE.whole_texts["é".encode()[0]] is None
    assert TABLE.whole_texts[99_999] is None
    assert TABLE.whole_texts[END] == "<|end|>"
    assert Tokenizer(PIECES.backend, {}).whole_texts is None


@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=200, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 257), max_size=60),
    prompt=st.lists(st.integers(0, 257), max_size=8),
    step=st.integers(1, 4),
)
def test_a_table_gives_the_text_that_the_decoder_gives(skip, token_ids, prompt, step):
    params = SamplingParams(skip_special_tokens=skip, spaces_between_special_tokens=True)
    expected = run(BYTES, token_ids, params, prompt, step)
    found = run(TABLE, token_ids, params, prompt, step)
    assert found[:2] == expected[:2]
    assert found[2].text == expected[2].text == "".join(found[0])
