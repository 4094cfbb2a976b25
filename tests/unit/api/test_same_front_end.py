"""LLM and AsyncLLM have the same methods with the same parameters. What differs is listed here, with the reason."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest

from ratoon.api.llm import LLM
from ratoon.core.errors import EngineError, QueueFullError, RequestError, UnknownParentError
from ratoon.core.params import BeamSearchParams, HiddenStatesParams, RequestOutputKind, SamplingParams
from ratoon.engine.async_llm import AsyncLLM
from ratoon.engine.base_llm import BaseLLM
from ratoon.observe.metrics import EngineMetrics
from tests.unit.engine.fakes_async import FakeAsyncClient, fake_source, on_event_loop

LIFE = {"start", "shutdown", "close"}  # an LLM starts when it is built, and has nothing to drain
OF_A_SERVICE = {"add_replica", "drain_replica"}  # whose engines change while it runs
WATCHED = {"engine_maps", "end_leases", "find_running"}  # by others than the program whose requests run
ABOVE = {"transcribe"}  # transcription is in api/, above AsyncLLM: async_transcriber(llm) does the same
OF_A_BATCH = {"progress", "use_tqdm"}  # a bar for a call that waits for many
OF_THE_ENGINE = {"process", "client"}  # where the engine runs
OF_AN_EVENT_LOOP = {"take"}  # saves a change of tasks for each token
REQUESTS = ("generate", "stream", "beam_search", "chat", "generate_continuation", "embed", "extract_hidden_states")
SINGULAR = {"prompts": "prompt"}


def methods(kind: type) -> set[str]:
    return {name for name, member in inspect.getmembers(kind) if not name.startswith("_") and callable(member)}


def parameters(method: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults; keywords that are a TypedDict's one by one."""
    found = []
    for one in inspect.signature(method).parameters.values():
        if one.kind == inspect.Parameter.VAR_KEYWORD and method.__name__ in REQUESTS:
            hint = get_type_hints(method, include_extras=True)[one.name]
            keywords = get_type_hints(hint.__args__[0])
            found += [(name, one.kind, keywords[name]) for name in sorted(keywords) if name not in OF_A_BATCH]
        elif one.name not in OF_A_BATCH | OF_THE_ENGINE | OF_AN_EVENT_LOOP:
            found.append((SINGULAR.get(one.name, one.name), one.kind, one.default))
    return found


def test_both_have_the_same_methods() -> None:
    assert methods(LLM) ^ methods(AsyncLLM) <= LIFE | ABOVE | OF_A_SERVICE | WATCHED
    properties = {name for name, member in inspect.getmembers(BaseLLM) if isinstance(member, property)}
    for kind in (LLM, AsyncLLM):
        assert {name for name, member in inspect.getmembers(kind) if isinstance(member, property)} == properties


@pytest.mark.parametrize("name", [*sorted((methods(LLM) & methods(AsyncLLM)) - set(REQUESTS)), *REQUESTS, "__init__"])
def test_both_have_the_same_parameters(name: str) -> None:
    assert parameters(getattr(LLM, name)) == parameters(getattr(AsyncLLM, name))


@pytest.mark.parametrize("name", sorted(methods(LLM) & methods(AsyncLLM)))
def test_both_have_a_docstring_or_none(name: str) -> None:
    of_llm, of_async_llm = inspect.getdoc(getattr(LLM, name)), inspect.getdoc(getattr(AsyncLLM, name))
    assert name == "stats" or (of_llm is None) == (of_async_llm is None)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = fake_source()
    monkeypatch.setattr("ratoon.models.source.resolve_model", lambda name, *_: found)
    return found


GREEDY = SamplingParams(temperature=0, max_tokens=20, output_kind=RequestOutputKind.FINAL_ONLY)
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("generate", ("",), {}),
    ("generate", ("abc",), {"priority": 1}),
    ("generate", ("abc",), {"data_parallel_rank": 1}),
    ("generate", ("abc",), {"data_parallel_rank": True}),
    ("generate", ("abc",), {"lora_request": "x"}),
    ("generate", ("abc",), {"retain_kv": -1}),
    ("generate", ("abc",), {"cache_salt": ""}),
    ("generate", ("abc", "params"), {}),
    ("beam_search", ("abc", GREEDY), {}),
    ("stream", ("abc", SamplingParams(temperature=-1)), {}),
    ("chat", ([{"role": "user", "content": "x" * 100}],), {}),
    ("generate_continuation", ("gone",), {}),
    ("embed", ("abc",), {"priority": 1}),
    ("embed", ("",), {}),
    ("extract_hidden_states", (), {}),
    ("extract_hidden_states", ("abc",), {"original_request_id": "x"}),
    ("extract_hidden_states", (), {"original_request_id": "gone"}),
    ("extract_hidden_states", ("abc", HiddenStatesParams(layers=[99])), {}),
    ("forget", ("gone",), {}),
    ("find_parent", ("gone",), {}),
]


async def call(llm: AsyncLLM, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    result = getattr(llm, name)(*arguments, **options)
    return [one async for one in result] if inspect.isasyncgen(result) else await result


@pytest.mark.parametrize(("name", "arguments", "options"), BAD)
def test_both_refuse_the_same_in_the_same_words(
    client: Any, source: Any, name: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    llm = LLM("fake")
    with pytest.raises(RequestError) as of_llm:
        getattr(llm, name)(*arguments, **options)

    @on_event_loop
    async def ask() -> None:
        async with AsyncLLM("fake", client=FakeAsyncClient()) as async_llm:
            with pytest.raises(type(of_llm.value)) as of_async_llm:
                await call(async_llm, name, arguments, options)
            assert str(of_async_llm.value) == str(of_llm.value)

    with pytest.MonkeyPatch.context() as patch:
        import ratoon.models.source as models

        patch.setattr(models, "resolve_model", lambda name, *_: source)
        ask()


def test_an_llm_has_what_async_llm_had(client: Any) -> None:
    metrics = EngineMetrics("fake")
    with LLM("fake", metrics=metrics, max_total_hidden_states_bytes=200) as llm:
        (parent,) = llm.generate("abc", GREEDY, "mine", owner="me", retain_kv=5)
        assert (parent.request_id, parent.owner) == ("mine", "me")
        assert [root.request_id for root in llm.list_roots("me")] == ["mine"] and llm.list_roots() == []
        with pytest.raises(UnknownParentError):
            llm.generate_continuation(parent)  # another owner's
        child = llm.generate_continuation(parent, "!", GREEDY, "child", owner="me")
        assert child.request_id == "child" and child.owner == "me"
        llm.forget("mine", "me")
        assert client.calls[-1][0] == "end_leases"
        with pytest.raises(UnknownParentError):
            llm.find_parent("mine", owner="me")
        assert llm.health().ok and llm.num_unfinished_requests() == 0 and llm.eos_token_ids == (256,)
        held = llm.extract_hidden_states("abcdef", HiddenStatesParams(positions="all"))
        with pytest.raises(QueueFullError, match="max_total_hidden_states_bytes"):
            llm.extract_hidden_states("ab")
        del held
        llm.extract_hidden_states("ab")
        llm.sleep()
        llm.wake_up()
        assert [one[0] for one in client.calls[-2:]] == ["sleep", "wake_up"]
        with pytest.raises(RequestError):
            llm.generate("")
        assert metrics.finished["refused"] == 2


def test_ids_that_callers_bring_are_one_for_each(client: Any) -> None:
    llm = LLM("fake")
    outputs = llm.generate(["ab", "cd"], GREEDY, ["one", "two"])
    assert [output.request_id for output in outputs] == ["one", "two"]
    for ids in ("one", ["one"], ["same", "same"]):
        with pytest.raises(RequestError, match="request_id"):
            llm.generate(["ab", "cd"], GREEDY, ids)
    stream = llm.stream("abcdef", GREEDY, "open")
    next(stream)
    with pytest.raises(RequestError, match="'open' is in use"):
        llm.generate("ab", GREEDY, "open")
    assert [output.finished for output in stream][-1], "the other request has lost nothing"


@on_event_loop
async def test_async_llm_has_what_llm_had(source: Any) -> None:
    client = FakeAsyncClient()
    async with AsyncLLM("fake", client=client) as llm:
        deltas = [output async for output in llm.stream("abc", GREEDY)]
        assert len(deltas) > 1 and "".join(one.outputs[0].text for one in deltas) == "cba"
        answered = [one async for one in llm.chat([{"role": "user", "content": "hi"}], GREEDY)]
        assert answered[-1].prompt == "[user]hi\n[assistant]"
        found = [one async for one in llm.beam_search("abc", BeamSearchParams(beam_width=2, max_tokens=4))]
        assert found[-1].finished
        child = [one async for one in llm.generate_continuation(answered[-1], "!", GREEDY)]  # an output, as of LLM
        assert child[-1].continuation is not None
        assert (await llm.extract_hidden_states(answered[-1])).positions
        stream = llm.stream("abc", GREEDY)
        await anext(stream)
        await stream.aclose()
        assert llm.num_unfinished_requests() == 0
    with pytest.raises(EngineError, match="shut down"):
        await call(llm, "generate", ("abc",), {})
