"""LLM: what goes in, what comes back, and what happens to the rest when something goes wrong."""

from __future__ import annotations

import os
import signal

import pytest

from ratoon.api.llm import LLM
from ratoon.core.errors import ConfigError, EngineError, RequestError, UnknownParentError
from ratoon.core.outputs import Continuation
from ratoon.core.params import BeamSearchParams, RequestOutputKind, SamplingParams


@pytest.fixture
def llm(client) -> LLM:
    return LLM("fake")


def texts(outputs) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", ["ba"]),
        ([97, 98], ["ba"]),
        ({"prompt_token_ids": [97, 98]}, ["ba"]),
        (["ab", "cd"], ["ba", "dc"]),
        ([[97, 98], "cd", {"prompt": "ef"}], ["ba", "dc", "fe"]),
        ([], []),
    ],
)
def test_one_prompt_or_many_come_back_in_their_order(llm, prompts, expected):
    assert texts(llm.generate(prompts)) == expected


def test_outputs_keep_the_prompts_order_when_they_finish_in_another(llm):
    outputs = llm.generate(["abcdef", "x", "abc"])
    assert texts(outputs) == ["fedcba", "x", "cba"]
    assert [output.prompt for output in outputs] == ["abcdef", "x", "abc"]


def test_params_are_one_for_all_or_one_for_each(llm):
    assert texts(llm.generate(["abc", "def"], SamplingParams(max_tokens=1))) == ["c", "f"]
    assert texts(llm.generate(["abc", "def"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])) == [
        "c",
        "fe",
    ]
    with pytest.raises(RequestError) as caught:
        llm.generate(["abc", "def"], [SamplingParams()])
    assert caught.value.field == "sampling_params"


def test_priorities_reach_the_engine(client):
    LLM("fake", policy="priority").generate(["a", "b"], priority=[3, -1])
    assert [request.priority for request in client.added] == [3, -1]


def test_a_priority_that_the_policy_would_ignore_is_refused(llm, client):
    with pytest.raises(RequestError, match="policy=") as caught:
        llm.generate(["a", "b"], priority=[0, 1])
    assert caught.value.field == "priority"
    assert not client.added


def test_a_chats_salt_reaches_the_engine(llm, client):
    llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), cache_salt="tenant")
    assert [request.cache_salt for request in client.added] == ["tenant"]


def test_without_params_the_models_defaults_are_used(llm, client):
    llm.generate("ab")
    assert client.added[0].params.temperature == 0.5
    assert llm.get_default_sampling_params().temperature == 0.5


@pytest.mark.parametrize("bad", ["", [], [5, -1], None, "a" * 64])
def test_a_bad_prompt_of_a_list_is_named_before_anything_starts(llm, client, bad):
    with pytest.raises(RequestError) as caught:
        llm.generate(["good", bad, "good"])
    assert caught.value.field.startswith("prompts[1].")
    assert client.added == []
    assert texts(llm.generate("ab")) == ["ba"]


def test_a_single_bad_prompt_is_named_without_an_index(llm):
    with pytest.raises(RequestError) as caught:
        llm.generate("")
    assert caught.value.field == "prompt"


def test_params_of_another_type_are_refused(llm):
    with pytest.raises(RequestError) as caught:
        llm.generate("ab", {"max_tokens": 5})
    assert caught.value.field == "sampling_params"


@pytest.mark.parametrize("by_output", [False, True], ids=["at once", "from another process"])
def test_a_request_that_the_engine_refuses_is_an_error_in_its_place(llm, client, by_output):
    client.refuses_by_output = by_output
    client.refuse = lambda request: RequestError("prompt", "never fits") if len(request.prompt_token_ids) == 3 else None
    good, bad, last = llm.generate(["ab", "abc", "cd"])
    assert (good.error, last.error) == (None, None)
    assert texts([good, last]) == ["ba", "dc"]
    assert "never fits" in bad.error
    assert (bad.outputs[0].finish_reason, bad.finished) == ("error", True)


@pytest.mark.parametrize("by_output", [False, True], ids=["at once", "from another process"])
def test_a_request_that_is_alone_and_refused_raises(llm, client, by_output):
    client.refuses_by_output = by_output
    client.refuse = lambda request: RequestError("prompt", "never fits")
    with pytest.raises(RequestError, match="never fits"):
        llm.generate("abc")
    client.refuse = lambda request: None
    assert texts(llm.generate("ab")) == ["ba"]


def test_an_exception_takes_the_calls_requests_back(llm, client):
    def fail() -> None:
        raise RuntimeError("device lost")

    client.on_step = fail
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(["ab", "cd"])
    assert sorted(client.aborted) == sorted(request.request_id for request in client.added)
    client.on_step = lambda: None
    assert texts(llm.generate("ab")) == ["ba"]


def test_ctrl_c_ends_the_call_between_steps_and_the_llm_goes_on(llm, client):
    finished_steps = []

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        finished_steps.append(True)  # not reached if the interrupt came through inside the step

    client.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abcdef")
    assert finished_steps == [True]
    assert client.aborted == [client.added[0].request_id]
    client.on_step = lambda: None
    assert texts(llm.generate("ab")) == ["ba"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stream_yields_pieces_that_join_to_the_text(llm):
    outputs = list(llm.stream("héllo", SamplingParams(max_tokens=20)))
    assert "".join(texts(outputs)) == llm.generate("héllo", SamplingParams(max_tokens=20))[0].outputs[0].text
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) > 3


def test_a_stream_that_is_left_takes_its_request_back(llm, client):
    stream = llm.stream("abcdef")
    next(stream)
    stream.close()
    assert client.aborted == [client.added[0].request_id]


def test_a_call_while_a_stream_is_open_disturbs_neither(llm):
    stream = llm.stream("abcdef")
    pieces = [next(stream).outputs[0].text]
    assert texts(llm.generate("xyz")) == ["zyx"]
    pieces += [output.outputs[0].text for output in stream]
    assert "".join(pieces) == "fedcba"


def test_choices_come_back_together(llm, client):
    client.script = lambda request, choice: [97 + choice, 256]
    (output,) = llm.generate("p", SamplingParams(n=3))
    assert [choice.text for choice in output.outputs] == ["a", "b", "c"]


def test_a_conversation_goes_through_the_chat_template(llm):
    (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
    assert output.prompt == "[user]hi\n[assistant]"
    assert output.prompt_token_ids == list(output.prompt.encode())


def test_many_conversations_come_back_in_order(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b")]
    outputs = llm.chat(conversations, SamplingParams(max_tokens=1))
    assert [output.prompt for output in outputs] == ["[user]a\n[assistant]", "[user]b\n[assistant]"]


def test_a_conversation_is_read_as_the_server_reads_it(llm):
    from tests.unit.api.server.harness import byte_tokenizer

    template = "{% for m in messages %}{{ m.content or m.tool_calls[0].function.arguments.x }}{% endfor %}<end>"
    llm._tokenizer = byte_tokenizer(template)
    function = {"name": "f", "arguments": '{"x": "seen"}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    begun = {"role": "assistant", "content": "Well"}
    one_token = SamplingParams(max_tokens=1)
    assert llm.chat([call], one_token)[0].prompt == "seen<end>"
    assert llm.chat([call, begun], one_token, continue_final_message=True)[0].prompt == "seenWell"
    with pytest.raises(RequestError, match=r"messages\[1\]\[0\].role: 'usr' is no known role"):
        llm.chat([[begun], [{"role": "usr", "content": "x"}]])
    with pytest.raises(RequestError, match="add_generation_prompt: contradicts continue_final_message"):
        llm.chat([begun], add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize("messages", ["hi", 5, None])
def test_bad_messages_are_refused(llm, messages):
    with pytest.raises(RequestError) as caught:
        llm.chat(messages)
    assert "messages" in caught.value.field


def test_a_closed_llm_says_so_and_gives_the_engine_back(client):
    with LLM("fake") as llm:
        llm.generate("ab")
    assert client.closed
    for call in (lambda: llm.generate("ab"), lambda: llm.stream("ab"), lambda: llm.stats(), lambda: llm.list_roots()):
        with pytest.raises(EngineError, match="the engine is shut down"):
            call()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"policy": "random"}, "policy"),
        ({"kv_memory": "2 apples"}, "kv_memory"),
        ({"block_size": 0}, "block_size"),
        ({"max_model_len": 65}, "max_model_len"),
        ({"dtype": "int3"}, "dtype"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_senseless_settings_are_refused_by_name(client, settings, field):
    with pytest.raises(ConfigError) as caught:
        LLM("fake", **settings)
    assert caught.value.field == field


def test_settings_reach_the_config(client):
    config = LLM("fake", kv_memory="2MiB", policy="priority", max_num_seqs=4, enable_prefix_caching=False).config
    assert config.cache.memory_bytes == 2 * 2**20
    assert config.scheduler.policy.value == "priority"
    assert config.scheduler.max_num_seqs == 4
    assert not config.cache.enable_prefix_caching
    assert config.max_model_len == 64


def test_without_a_tokenizer_token_ids_still_work(client):
    llm = LLM("fake", skip_tokenizer=True)
    (output,) = llm.generate([97, 98])
    assert (output.outputs[0].text, list(output.outputs[0].token_ids)) == ("", [98, 97, 256])
    with pytest.raises(RequestError):
        llm.generate("text")


# ---- beam search ----


@pytest.fixture
def searching(client) -> LLM:
    client.script = lambda request, choice: [*request.prompt_token_ids, *b"xyz"[choice:], 256]
    return LLM("fake")


def found(outputs) -> list[list[str]]:
    return [[choice.text for choice in output.outputs] for output in outputs]


def test_a_beam_search_returns_the_best_texts_of_every_prompt(searching, client):
    params = BeamSearchParams(beam_width=4, n=2, max_tokens=9)
    assert found(searching.beam_search("a", params)) == [["axyz", "ayz"]]
    each = [params, BeamSearchParams(beam_width=2, max_tokens=2)]
    assert found(searching.beam_search(["a", "b"], each, retain_kv=5)) == [["axyz", "ayz"], ["bx"]]
    assert [request.retain_kv for request in client.added] == [None, 5, 5]
    assert found(searching.generate(["a"], params)) == [["axyz", "ayz"]]
    assert found(searching.chat([{"role": "user", "content": "hi"}], params)) == [["[user]hi\n"] * 2]


def test_sampled_requests_and_beam_searches_run_in_one_batch(searching):
    outputs = searching.generate(["a", "b"], [SamplingParams(max_tokens=2), BeamSearchParams(beam_width=2, n=2)])
    assert found(outputs) == [["ax"], ["bxyz", "byz"]]
    assert outputs[0].outputs[0].score is None and outputs[1].outputs[0].score == -0.5


def test_a_streamed_beam_search_tells_the_best_text_anew(searching):
    outputs = list(searching.stream("a", BeamSearchParams(beam_width=4, n=2, max_tokens=3)))
    assert found(outputs) == [["a"], ["ax"], ["axy", "ayz"]]
    assert [output.finished for output in outputs] == [False, False, True]


def test_the_kind_of_output_is_the_callers_own_to_get_wrong(searching):
    """`generate` and `stream` settle it."""
    params = BeamSearchParams(beam_width=2, max_tokens=3, output_kind=RequestOutputKind.DELTA)
    assert found(searching.beam_search("a", params)) == [["axy"]]
    assert len(list(searching.stream("a", params))) == 3


def test_a_beam_search_can_be_continued_and_can_continue(searching, client):
    params = BeamSearchParams(beam_width=4, n=2, max_tokens=9)
    (parent,) = searching.beam_search("a", params)
    child = searching.generate_continuation(parent, "!", params, choice=1)
    assert bytes(client.added[-1].prompt_token_ids[:4] + client.added[-1].prompt_token_ids[-1:]) == b"aayz!"
    assert client.added[-1].continuation_of == f"{client.added[0].request_id}#1"
    assert found([child])[0][0].endswith("xyz")


def test_a_beam_search_under_way_is_waited_for_and_not_forked(searching):
    stream = searching.stream("a", BeamSearchParams(beam_width=4, max_tokens=9))
    first = next(stream)
    with pytest.raises(RequestError, match="wait for its end"):
        searching.generate_continuation(first, wait=False)
    child = searching.generate_continuation(first, "", SamplingParams(max_tokens=1))
    assert child.prompt_token_ids == [*b"aaxyz", 256]
    assert [output.finished for output in stream][-1]


def test_a_prompt_stands_in_for_a_forgotten_parent(llm, client):
    (parent,) = llm.generate("abc", SamplingParams(max_tokens=3))
    known = llm.generate_continuation(parent, "!", SamplingParams(max_tokens=1), prompt="ignored")
    assert bytes(known.prompt_token_ids) == b"abccba!" and not (known.continuation and known.continuation.fallback)
    child = llm.generate_continuation("gone", "!", SamplingParams(max_tokens=3), prompt="abc", cache_salt="s")
    assert (child.outputs[0].text, child.prompt, client.added[-1].cache_salt) == ("cba", "abc", "s")
    assert child.continuation == Continuation("gone", 0, 3, "recomputed", fallback=True)
    with pytest.raises(UnknownParentError):
        llm.generate_continuation("gone", "!")


@pytest.mark.parametrize("params", [SamplingParams(), None, {"beam_width": 4}, [BeamSearchParams(beam_width=1), None]])
def test_beam_search_takes_nothing_but_its_own_params(searching, client, params):
    with pytest.raises(RequestError) as refused:
        searching.beam_search(["a", "b"], params)
    assert refused.value.field == "params" and not client.added


def test_bad_params_of_a_beam_search_name_the_field_and_in_a_list_the_prompt(searching, client):
    with pytest.raises(RequestError) as refused:
        searching.beam_search(["a", "b"], BeamSearchParams(beam_width=1, n=2))
    assert refused.value.field == "n"
    with pytest.raises(RequestError) as refused:
        searching.beam_search(["a", "b"], [BeamSearchParams(beam_width=1), BeamSearchParams(beam_width=1, n=2)])
    assert refused.value.field == "prompts[1].n" and not client.added
