"""Requests of encoder-decoder models, from prompt to output: continuations, hidden states, what is kept of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ratoon.core.encoder import features_for_encoder, tokens_for_encoder
from ratoon.core.errors import RequestError, TooLargeError, UnknownParentError
from ratoon.core.outputs import HiddenStatesOutput, RequestOutput
from ratoon.core.params import BeamSearchParams, HiddenStatesParams, SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.wire import WireTensor
from ratoon.engine.async_llm import AsyncLLM
from ratoon.engine.front_end import Prepared
from ratoon.engine.input.input_processor import InputProcessor
from ratoon.engine.llm_engine import LLMEngine
from ratoon.engine.output.output_processor import OutputProcessor
from ratoon.engine.output.roots import Root, RootTable
from ratoon.engine.processes.ledger import Ledger
from ratoon.models.log_mel import WINDOW_FRAMES
from tests.unit.engine.fakes import (
    AUDIO_POSITIONS,
    DECODER_START,
    ENCODER_LAYERS,
    END,
    HIDDEN_SIZE,
    NUM_MEL_BINS,
    OTHER,
    FakeClient,
    encoder_decoder_config,
    framing_tokenizer,
    hidden_state,
    model_config,
)
from tests.unit.engine.fakes_async import FakeAsyncClient, fake_source, on_event_loop
from tests.unit.engine.test_ledger import hand_over, outputs, token

TOKENIZER = framing_tokenizer()
FRAMED = [OTHER, 97, 98, END]
PAIR = {"encoder_prompt": "ab", "decoder_prompt": "x"}
OF_ENCODER = HiddenStatesParams(side="encoder", positions="all", layers="all")


def answer(request: EngineCoreRequest, choice: int) -> list[int]:
    return [121, 122, END]


def make(config: Any = None, client: FakeClient | None = None, **options: Any) -> LLMEngine:
    processor = InputProcessor(encoder_decoder_config() if config is None else config, TOKENIZER, **options)
    return LLMEngine(client or FakeClient(answer), processor, OutputProcessor(TOKENIZER, selector=processor.selector))


def run(engine: LLMEngine, request: EngineCoreRequest, *others: Any) -> Any:
    engine.submit(Prepared(request, *others))
    last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
    return last


def generate(engine: LLMEngine, request_id: str, prompt: Any, params: Any = None) -> RequestOutput:
    engine.add_request(request_id, prompt, params or SamplingParams(max_tokens=4))
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
    return last


def features(value: float = 0.0) -> np.ndarray:
    return np.full((NUM_MEL_BINS, WINDOW_FRAMES), value, np.float32)


# ---- outputs ----


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", (None, DECODER_START, "ab", FRAMED)),
        (PAIR, ("x", [*DECODER_START, 120], "ab", FRAMED)),
        ({"encoder_prompt": [1, 2], "decoder_prompt": [END, 5]}, (None, [END, 5], None, [1, 2])),
    ],
)
def test_outputs_have_both_prompts_and_both_token_lists(prompt, expected):
    output = generate(make(), "r", prompt)
    got = (output.prompt, output.prompt_token_ids, output.encoder_prompt, output.encoder_prompt_token_ids)
    assert got == expected
    assert output.outputs[0].text == "yz"


def test_audio_has_no_tokens_and_no_text():
    output = generate(make(encoder_decoder_config(NUM_MEL_BINS)), "r", {"features": features()})
    assert (output.encoder_prompt, output.encoder_prompt_token_ids) == (None, None)
    assert output.prompt_token_ids == DECODER_START


def test_models_without_an_encoder_have_no_encoder_prompt():
    output = generate(make(model_config()), "r", "ab")
    assert (output.prompt, output.encoder_prompt, output.encoder_prompt_token_ids) == ("ab", None, None)


def test_a_refused_request_shows_both_prompts():
    engine = make()
    request = engine.input_processor.process("r", PAIR, SamplingParams())
    output = engine._refuse(Prepared(request, "x", None, "ab"), RequestError("prompt", "no", "yes"))
    assert (output.prompt, output.encoder_prompt, output.encoder_prompt_token_ids) == ("x", "ab", FRAMED)


@on_event_loop
async def test_the_asynchronous_engine_tells_the_same(monkeypatch):
    source = fake_source()
    source.config, source.tokenizer = encoder_decoder_config(NUM_MEL_BINS), TOKENIZER
    monkeypatch.setattr("ratoon.models.source.resolve_model", lambda name, *_: source)
    client = FakeAsyncClient(answer)
    async with AsyncLLM("fake", client=client) as llm:
        pair = {"encoder_prompt": {"features": features()}, "decoder_prompt": "x"}
        async for output in llm.generate(pair, SamplingParams(max_tokens=4), "r"):
            last = output
        assert (last.prompt, last.prompt_token_ids) == ("x", [*DECODER_START, 120])
        assert [output async for output in llm.generate_continuation("r", [5], SamplingParams(max_tokens=4))]
        assert client.core.added[1].encoder_input == client.core.added[0].encoder_input
        states = await llm.extract_hidden_states(None, OF_ENCODER, original_request_id="r")
        assert states.tensor.shape == (ENCODER_LAYERS + 1, AUDIO_POSITIONS, HIDDEN_SIZE)
        with pytest.raises(RequestError, match="encoder_prompt: is text"):
            await anext(llm.generate({"encoder_prompt": "ab"}))


# ---- continuations ----


def test_a_continuation_reads_what_its_parent_read():
    engine = make()
    parent = generate(engine, "r", PAIR)
    root = engine.output_processor.find_root("r")
    request = engine.input_processor.process_continuation("c", root, "w", SamplingParams())
    assert request.encoder_input == tokens_for_encoder(FRAMED)
    assert request.prompt_token_ids == [*parent.prompt_token_ids, 121, 122, END, 119]
    output = run(engine, request, None)
    assert (output.encoder_prompt, output.encoder_prompt_token_ids) == (None, FRAMED)
    again = engine.output_processor.find_root("c")
    assert again.encoder_input == tokens_for_encoder(FRAMED)


def test_a_request_that_runs_can_be_continued_with_its_encoder_input():
    engine = make()
    engine.add_request("r", "ab", SamplingParams(max_tokens=4))
    assert engine.output_processor.find_root("r").encoder_input == tokens_for_encoder(FRAMED)


def test_a_replayed_request_keeps_its_encoder_input():
    ledger = Ledger()
    request = make().input_processor.process("a", PAIR, SamplingParams())
    ledger.add(request)
    hand_over(ledger)
    ledger.record(outputs(token(request.request_id, 7)))
    ledger.engine_died(0)
    (entry,) = ledger.ready_to_go()
    assert entry.current_request().resumed is not None
    assert entry.current_request().encoder_input == tokens_for_encoder(FRAMED)


def audio_root(name: str, num_bytes: int) -> Root:
    tensor = WireTensor("float32", (1, num_bytes // 4), bytes(num_bytes))
    return Root(name, f"{name}-12345678", [1], [[2]], encoder_input=features_for_encoder(tensor, 1))


def test_features_of_roots_are_bounded_in_bytes_and_the_oldest_go():
    table = RootTable(max_feature_bytes=1000)
    for name in ("a", "b"):
        table.add(audio_root(name, 400))
    table.add(Root("text", "text-12345678", [1], [[2]]))
    table.find("a")  # somebody asked for it, so that it is not the oldest
    table.add(audio_root("c", 400))
    assert {root.request_id for root in table.list()} == {"a", "c", "text"}
    with pytest.raises(UnknownParentError):
        table.find("b")


def test_features_of_roots_that_are_gone_do_not_count():
    table = RootTable(max_feature_bytes=1000)
    table.add(audio_root("a", 800))
    table.add(audio_root("a", 800))  # in the place of the first
    table.add(audio_root("b", 200))
    assert len(table) == 2
    table.remove("a")
    table.add(audio_root("c", 800))
    assert len(table) == 2


def test_a_root_that_is_larger_than_all_may_be_is_not_kept():
    table = RootTable(max_feature_bytes=1000)
    table.add(audio_root("a", 2000))
    assert len(table) == 0


# ---- hidden states ----


def extract(source: Any, params: HiddenStatesParams, engine: LLMEngine | None = None, **others: Any) -> Any:
    return (engine or make()).input_processor.process_extraction("x", source, params, **others)


def test_states_of_the_encoder_count_its_positions_and_layers():
    request, selection = extract("ab", HiddenStatesParams(side="encoder", positions=[-1, 0], layers=["pre_norm", -1]))
    assert request.params.of_encoder
    assert request.params.positions == [0, 3] and selection.positions == [3, 0]
    assert request.params.layers == [ENCODER_LAYERS, ENCODER_LAYERS + 1]
    assert request.encoder_input == tokens_for_encoder(FRAMED)
    assert request.prompt_token_ids == DECODER_START


def test_states_of_the_encoder_come_with_its_tokens():
    engine = make()
    request, selection = extract(PAIR, OF_ENCODER, engine)
    output = run(engine, request, None, selection)
    assert isinstance(output, HiddenStatesOutput) and output.error is None
    assert (output.positions, output.token_ids) == ([0, 1, 2, 3], FRAMED)
    assert output.layers == [*range(ENCODER_LAYERS + 1)]
    assert output.tensor.shape == (ENCODER_LAYERS + 1, 4, HIDDEN_SIZE)


def test_states_of_audio_have_no_tokens():
    engine = make(encoder_decoder_config(NUM_MEL_BINS))
    request, selection = extract({"features": features()}, OF_ENCODER, engine)
    output = run(engine, request, None, selection)
    assert (len(output.positions), output.token_ids) == (AUDIO_POSITIONS, [])


def test_states_of_the_decoder_read_the_pair():
    engine = make()
    request, selection = extract(PAIR, HiddenStatesParams(positions=[0, 1]), engine)
    assert not request.params.of_encoder
    assert request.prompt_token_ids == DECODER_START and request.encoder_input == tokens_for_encoder(FRAMED)
    assert run(engine, request, None, selection).token_ids == DECODER_START


def test_an_ended_request_has_states_on_both_sides():
    engine = make()
    generate(engine, "r", PAIR)
    root = engine.output_processor.find_original("r")
    request, _ = extract(root, OF_ENCODER, engine)
    assert request.params.of_encoder and request.encoder_input == root.encoder_input
    assert request.continuation_of is None  # nothing of the encoder's states is kept
    assert request.prompt_token_ids == [*DECODER_START, 120]
    request, _ = extract(root, HiddenStatesParams(), engine)
    assert request.continuation_of == root.branch_id(0) and request.encoder_input == root.encoder_input


def test_a_beam_search_that_runs_has_encoder_states_already():
    engine = make()
    engine.add_request("r", "ab", BeamSearchParams(beam_width=2, max_tokens=4))
    request, _ = extract(engine.output_processor.find_original("r"), OF_ENCODER, engine)
    assert request.encoder_input == tokens_for_encoder(FRAMED)


def test_states_that_come_with_an_answer_are_read_with_its_encoder_input():
    client = FakeClient(answer)
    output = generate(make(client=client), "r", "ab", SamplingParams(max_tokens=4, return_hidden_states=True))
    assert output.hidden_states[0].positions == [4]
    assert client.readings[0].encoder_input == tokens_for_encoder(FRAMED)


@pytest.mark.parametrize(
    ("params", "field", "part"),
    [
        (HiddenStatesParams(side="encoder", scope="prompt"), "scope", "prompt"),
        (HiddenStatesParams(side="middle"), "side", "middle"),
        (HiddenStatesParams(side="encoder", positions=4), "positions", "the encoder's input has 4 tokens"),
        (HiddenStatesParams(side="encoder", layers=ENCODER_LAYERS + 1), "layers", f"{ENCODER_LAYERS} layers"),
    ],
)
def test_encoder_states_that_do_not_exist_are_refused(params, field, part):
    with pytest.raises(RequestError) as caught:
        extract("ab", params)
    assert caught.value.field == field
    assert part in caught.value.problem


def test_the_size_of_encoder_states_is_checked_with_its_length():
    row = HIDDEN_SIZE * 4
    engine = make(max_hidden_states_bytes=3 * row)
    with pytest.raises(TooLargeError):
        extract("ab", HiddenStatesParams(side="encoder", positions="all"), engine)
    extract("a", HiddenStatesParams(side="encoder", positions="all"), engine)


def test_an_answer_does_not_bring_encoder_states():
    asked = SamplingParams(return_hidden_states=HiddenStatesParams(side="encoder"))
    with pytest.raises(RequestError, match=r"return_hidden_states\.side: an answer has no encoder states"):
        make().input_processor.process("r", "ab", asked)


def test_a_choice_that_the_root_has_not_is_refused_for_the_encoder_too():
    engine = make()
    generate(engine, "r", "ab")
    with pytest.raises(RequestError) as caught:
        extract(engine.output_processor.find_original("r"), OF_ENCODER, engine, choice=1)
    assert caught.value.field == "choice"


def test_models_without_an_encoder_have_no_encoder_states():
    for config in (model_config(), model_config(causal=False)):
        with pytest.raises(RequestError) as caught:
            extract("ab", OF_ENCODER, make(config))
        assert caught.value.field == "side"


def test_where_every_token_sees_all_the_whole_prompt_is_run_and_only_what_was_asked_for_is_given():
    engine = make(model_config(causal=False))
    request, selection = extract("ab", HiddenStatesParams(positions=[1, 0]), engine)
    assert request.prompt_token_ids == FRAMED
    assert request.params.positions == [0, 1, 3]
    output = run(engine, request, None, selection)
    assert (output.positions, output.token_ids) == ([1, 0], [97, OTHER])
    assert output.tensor[0].tolist() == [hidden_state(1, 4), hidden_state(0, 4)]
