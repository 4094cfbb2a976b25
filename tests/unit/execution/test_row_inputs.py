"""Rope positions and embeddings that a plan brings, by hand-written plans, in every way to run a step: transformers is
the oracle, and embeddings that are rows of the model's own table are the same to the bit as their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ratoon.core.config import RopeScaling
from ratoon.core.media import EMBEDS, MediaInput
from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import BeamStep, BlockCopy, CaptureStep, EmbeddingSpan, InputOverrides, NewRequestData
from ratoon.core.wire import WireTensor
from tests.golden.tiny_models import TinyModel, tiny_gpt2, tiny_qwen2
from tests.triton_interpreter import repair_interpreter
from tests.unit.execution.test_model_runner import (
    LLAMA,
    OTHER,
    PROMPT,
    Driver,
    interpreted,
    needs_kernels,
    oracle_greedy,
    token_of,
)

repair_interpreter()

TOLERANCE = 1e-4
ALL = SamplingParams(temperature=0.0, logprobs=97)
# "padded": small steps from fixed memory, as graphs have them
DRIVERS = [
    "torch",
    *[pytest.param(name, marks=needs_kernels) for name in ("native", "recorded")],
    *[pytest.param(name, marks=interpreted) for name in ("resident", "padded")],
]


class RunAgain:
    def __init__(self, function: Any) -> None:
        self.replay = function


def driver_of(tiny: TinyModel, name: str) -> Driver:
    return Driver(tiny, "resident", capture=RunAgain) if name == "padded" else Driver(tiny, name)


def packed(positions: Sequence[Sequence[int]]) -> bytes:
    return np.array(positions, np.int32).tobytes()


def logprobs_of(output: ModelRunnerOutput, req_id: str) -> np.ndarray:
    """[vocabulary], by token."""
    lists = output.logprobs[req_id]
    found = np.full(97, np.nan)
    found[lists.token_ids[0]] = lists.logprobs[0]
    return found


def run_branch(
    driver: Driver, new: NewRequestData, chunk: int, num_decodes: int, **rest: Any
) -> tuple[list[int], list[np.ndarray]]:
    """The prompt in two parts, the first of `chunk` tokens, then decodes: the sampled tokens and all
    log-probabilities."""
    num_prompt = len(new.token_ids)
    driver.step(new=[new], counts={new.req_id: chunk}, sampled=[], **rest)
    output = driver.step(known={new.req_id: chunk}, counts={new.req_id: num_prompt - chunk})
    tokens, logprobs = [token_of(output, new.req_id)], [logprobs_of(output, new.req_id)]
    for index in range(num_decodes):
        output = driver.step(known={new.req_id: num_prompt + index})
        tokens.append(token_of(output, new.req_id))
        logprobs.append(logprobs_of(output, new.req_id))
    return tokens, logprobs


# ---- rope positions ----


def with_rope_positions(tiny: TinyModel) -> TinyModel:
    return tiny._replace(config=replace(tiny.config, has_rope_positions=True))


@pytest.mark.parametrize("backend", DRIVERS)
@pytest.mark.parametrize("chunk", [5, 30])
@pytest.mark.one_in(3)
def test_heads_are_rotated_by_the_positions_of_the_plan_and_masks_go_by_the_sequence(backend: str, chunk: int) -> None:
    listed = [0, 0, 1, 1, 1, 7, 3, *range(8, 8 + len(PROMPT) - 7)]
    delta = -3
    driver = driver_of(with_rope_positions(LLAMA), backend)
    driver.step(new=[driver.new("beside", OTHER, 6)])
    new = driver.new("a", PROMPT, 1, params=ALL)
    new.overrides = InputOverrides(packed([listed]), delta)
    tokens, logprobs = run_branch(driver, new, chunk, num_decodes=6)
    whole = [*PROMPT, *tokens]
    positions = [*listed, *(place + delta for place in range(len(PROMPT), len(whole)))]
    ids = torch.tensor([whole])
    with torch.inference_mode():
        # The mask is given: without it, transformers takes positions that begin again for another sequence.
        expected = LLAMA.oracle(
            ids, position_ids=torch.tensor([positions]), attention_mask=torch.ones_like(ids), use_cache=False
        ).logits[0]
        plain = LLAMA.oracle_logits(whole)
    for index, found in enumerate(logprobs):
        row = expected[len(PROMPT) - 1 + index].log_softmax(-1).numpy()
        np.testing.assert_allclose(found, row, atol=TOLERANCE, rtol=0)
    last = plain[len(whole) - 2].log_softmax(-1).numpy()
    assert np.abs(logprobs[-1] - last).max() > 100 * TOLERANCE, "the positions of the sequence give something else"
    beside = driver.step(known={"beside": len(OTHER)})
    assert token_of(beside, "beside") == oracle_greedy(LLAMA, OTHER, 2)[1], "a branch without positions of its own"


def tiny_qwen2_vl_text(sections: list[int]) -> tuple[Any, TinyModel]:
    """The text part of Qwen2-VL, and a model of ours with its weights."""
    tiny = tiny_qwen2(tied=True)
    config = tiny.config
    oracle = transformers.Qwen2VLTextModel(
        transformers.Qwen2VLTextConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.norm_eps,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": config.rope_theta,
                "mrope_section": sections,
            },
        )
    ).eval()
    oracle.load_state_dict(tiny.oracle.model.state_dict(), strict=True)
    scaling = RopeScaling(sections=tuple(sections))
    return oracle, tiny._replace(config=replace(config, rope_scaling=scaling))


@pytest.mark.parametrize("backend", DRIVERS)
def test_positions_of_time_height_and_width_give_the_numbers_of_qwen2_vl(backend: str) -> None:
    half = tiny_qwen2().config.head_dim // 2
    oracle, tiny = tiny_qwen2_vl_text([half - 2 * (half // 3), half // 3, half // 3])
    # Five tokens of text, an image of 3 x 4, text from behind its largest position on
    image = [[5] * 12, [5 + row for row in range(3) for _ in range(4)], [5 + column for column in range(4)] * 3]
    num_text = len(PROMPT) - 17
    listed = [[*range(5), *axis, *range(9, 9 + num_text)] for axis in image]
    delta = 9 + num_text - len(PROMPT)
    driver = driver_of(tiny, backend)
    new = driver.new("a", PROMPT, 1, params=ALL)
    new.overrides = InputOverrides(packed(listed), delta)
    tokens, logprobs = run_branch(driver, new, chunk=11, num_decodes=5)
    whole = [*PROMPT, *tokens]
    decoded = [place + delta for place in range(len(PROMPT), len(whole))]
    positions = torch.tensor([[*axis, *decoded] for axis in listed])
    with torch.inference_mode():
        states = oracle(torch.tensor([whole]), position_ids=positions[:, None], use_cache=False).last_hidden_state[0]
        expected = (states @ oracle.embed_tokens.weight.T).log_softmax(-1)
    for index, found in enumerate(logprobs):
        np.testing.assert_allclose(found, expected[len(PROMPT) - 1 + index].numpy(), atol=TOLERANCE, rtol=0)
    # A branch without an image has the same position on all axes, and takes the row of the one that is dropped.
    output = driver.step(new=[driver.new("b", OTHER, 6)], finished_req_ids=["a"])
    assert token_of(output, "b") == oracle_greedy(tiny_qwen2(tied=True), OTHER, 1)[0]


def calls_of_decodes(tiny: TinyModel, listed: bytes = b"") -> list[list[tuple[str, list[int]]]]:
    """The kernels of each recorded pass with the numbers that are no addresses, of decodes of a text, and of one with
    the rope positions `listed`, in turns."""
    driver = Driver(tiny, "recorded")
    driver.step(new=[driver.new("text", OTHER, 6)])
    branches = {"text": OTHER}
    if listed:
        new = driver.new("picture", PROMPT, 1)
        new.overrides = InputOverrides(listed, 0)
        driver.step(new=[new])
        branches["picture"] = PROMPT
    for index in range(4):
        for req_id, prompt in branches.items():
            driver.step(known={req_id: len(prompt) + index})
    assert driver.runner.recorded is not None
    passes = [one.program for one in driver.runner.recorded._passes.values()]
    return [[(name, small_numbers(words)) for name, words in zip(one.names, one._words)] for one in passes]


def small_numbers(words: np.ndarray) -> list[int]:
    return [int(word) for word in words if abs(word) < 1 << 31]


@needs_kernels
def test_a_text_without_images_is_computed_by_the_kernels_of_a_model_of_text() -> None:
    half = tiny_qwen2().config.head_dim // 2
    tiny = tiny_qwen2_vl_text([half - 2 * (half // 3), half // 3, half // 3])[1]
    (text,) = calls_of_decodes(tiny_qwen2(tied=True))
    assert calls_of_decodes(tiny) == [text]
    both = calls_of_decodes(tiny, packed([range(len(PROMPT))] * 3))
    assert len(both) == 2, "a picture beside it leaves the text its recorded pass"
    assert text in both and both[0] != both[1]


def test_rope_positions_of_a_model_that_declares_none_are_an_error() -> None:
    driver = Driver()
    new = driver.new("a", PROMPT, 1)
    new.overrides = InputOverrides(packed([range(len(PROMPT))]))
    with pytest.raises(ValueError, match="the model declares none"):
        driver.step(new=[new])


@pytest.mark.parametrize(("positions", "delta"), [([[0, 128]], 0), ([[0, -1]], 0), ([[0, 1]], 127), ([[0, 1]], -3)])
def test_rope_positions_outside_of_the_table_of_angles_are_an_error(positions: list[list[int]], delta: int) -> None:
    driver = Driver(with_rope_positions(LLAMA))
    new = driver.new("a", PROMPT, 1)
    new.overrides = InputOverrides(packed(positions), delta)
    with pytest.raises(ValueError, match="positions must be below 128, and go on from 0 to 128"):
        driver.step(new=[new])


# ---- embeddings ----


def wire(tensor: torch.Tensor) -> WireTensor:
    return WireTensor("float32", tuple(tensor.shape), tensor.contiguous().numpy().tobytes())


def embeds(tensor: torch.Tensor) -> MediaInput:
    """Rows that a request brought."""
    return MediaInput(EMBEDS, len(tensor), wire(tensor))


def table_of(tiny: TinyModel) -> torch.Tensor:
    return tiny.oracle.get_input_embeddings().weight.detach()


@pytest.mark.parametrize("backend", DRIVERS)
@pytest.mark.parametrize(
    "make", [lambda: LLAMA, pytest.param(tiny_gpt2, marks=pytest.mark.slow)], ids=["llama", "gpt2"]
)
@pytest.mark.one_in(3)
def test_embeddings_that_are_rows_of_the_table_give_the_bits_of_their_ids(backend: str, make: Any) -> None:
    tiny = make()
    table = table_of(tiny)
    results = []
    for with_embeddings in (False, True):
        driver = driver_of(tiny, backend)
        found = []
        for round in range(4):  # later ones are replayed
            name = f"{round}"
            new = driver.new(name, PROMPT, 1, params=ALL)
            rest: dict[str, Any] = {"finished_req_ids": [f"{round - 1}"]}
            if with_embeddings:
                new.token_ids = [0] * 3 + PROMPT[3:6] + [0] * 20 + PROMPT[26:-1] + [0]
                rows = torch.tensor([*PROMPT[3:], *PROMPT[:3]])  # in another order than in the prompt
                places = [(0, 3, len(PROMPT) - 3), (6, 20, 3), (len(PROMPT) - 1, 1, len(PROMPT) - 4)]
                spans = [EmbeddingSpan(start, length, name, first) for start, length, first in places]
                new.overrides = InputOverrides(embeddings=spans)
                rest |= {
                    "scheduled_encoder_inputs": {name: embeds(table[rows])},
                    "free_encoder_mm_hashes": [f"{round - 1}"],
                }
            found.append(run_branch(driver, new, chunk=17, num_decodes=3, **rest))
        assert len(driver.runner.embeddings) == int(with_embeddings), "those of ended branches were freed"
        if backend == "recorded":
            assert driver.runner.recorded is not None and len(driver.runner.recorded) >= 2, "prompts and decodes"
        if backend == "padded":
            assert driver.runner.graphs is not None and driver.runner.graphs.stats.num_graphs >= 2
        results.append(found)
    for (tokens, logprobs), (expected_tokens, expected) in zip(*results, strict=True):
        assert tokens == expected_tokens
        assert all(np.array_equal(*pair) for pair in zip(logprobs, expected, strict=True))


@pytest.mark.parametrize("backend", DRIVERS)
def test_any_embeddings_give_the_numbers_of_transformers_beside_rows_of_ids(backend: str) -> None:
    embeddings = torch.randn(14, LLAMA.config.hidden_size)
    driver = driver_of(LLAMA, backend)
    new, beside = driver.new("a", PROMPT, 1, params=ALL), driver.new("b", OTHER, 6, params=ALL)
    new.overrides = InputOverrides(embeddings=[EmbeddingSpan(4, 14, "image")])
    output = driver.step(new=[beside, new], scheduled_encoder_inputs={"image": embeds(embeddings)})
    inputs = LLAMA.oracle.get_input_embeddings()(torch.tensor([PROMPT])).detach()
    inputs[0, 4:18] = embeddings
    with torch.inference_mode():
        expected = LLAMA.oracle(inputs_embeds=inputs, use_cache=False).logits[0, -1].log_softmax(-1)
    np.testing.assert_allclose(logprobs_of(output, "a"), expected.numpy(), atol=TOLERANCE, rtol=0)
    ids = LLAMA.oracle_logits(OTHER)[-1].log_softmax(-1)
    np.testing.assert_allclose(logprobs_of(output, "b"), ids.numpy(), atol=TOLERANCE, rtol=0)
    assert token_of(driver.step(known={"b": len(OTHER)}), "b") == oracle_greedy(LLAMA, OTHER, 2)[1]


@pytest.mark.parametrize("backend", DRIVERS)
def test_a_prompt_of_one_embedding_and_a_decode_beside_it(backend: str) -> None:
    """A step in which every request has one token: its inputs are kept from step to step."""
    driver = driver_of(LLAMA, backend)
    driver.step(new=[driver.new("b", OTHER, 6)])
    single = driver.new("a", [0], 1, params=ALL)
    single.overrides = InputOverrides(embeddings=[EmbeddingSpan(0, 1, "row")])
    row = table_of(LLAMA)[PROMPT[0]][None]
    output = driver.step(new=[single], known={"b": len(OTHER)}, scheduled_encoder_inputs={"row": embeds(row)})
    expected = LLAMA.oracle_logits(PROMPT[:1])[-1].log_softmax(-1)
    np.testing.assert_allclose(logprobs_of(output, "a"), expected.numpy(), atol=TOLERANCE, rtol=0)
    # A step of the same shape without embeddings
    driver.step(finished_req_ids=["a"], counts={}, total_num_scheduled_tokens=0)
    output = driver.step(new=[driver.new("c", PROMPT[1:2], 1, params=ALL)], known={"b": len(OTHER) + 1})
    expected = LLAMA.oracle_logits(PROMPT[1:2])[-1].log_softmax(-1)
    np.testing.assert_allclose(logprobs_of(output, "c"), expected.numpy(), atol=TOLERANCE, rtol=0)
    assert token_of(output, "b") == oracle_greedy(LLAMA, OTHER, 3)[2]


def test_hidden_states_are_read_out_of_rows_of_embeddings() -> None:
    driver = Driver()
    table = table_of(LLAMA)
    captured = []
    for key, ids, rows in (("ids", PROMPT, []), ("rows", [0] * len(PROMPT), PROMPT)):
        spans = [EmbeddingSpan(0, len(rows), key)] if rows else []
        capture = CaptureStep(
            key, ids, [(0, len(ids), True)], ([1, 2, 3],), [0, 5, 36], [1, 2], "float32",
            overrides=InputOverrides(embeddings=spans),
        )  # fmt: skip
        output = driver.step(
            captures=[capture],
            total_num_scheduled_tokens=len(ids),
            scheduled_encoder_inputs={key: embeds(table[torch.tensor(rows)])} if rows else {},
        )
        captured.append(output.hidden_states[key])
    assert captured[0] == captured[1]
    assert not driver.runner.input_batch.embeddings, "the rows of captures are given back"


def test_embeddings_that_the_runner_does_not_hold_are_named() -> None:
    driver = Driver()
    new = driver.new("a", PROMPT, 1)
    new.overrides = InputOverrides(embeddings=[EmbeddingSpan(2, 5, "picture", 1)])
    with pytest.raises(ValueError, match=r"embeddings 'picture' are not there, and rows 1 to 5 are to be read"):
        driver.step(new=[new])
    narrow = embeds(torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"'picture' have the shape \[5, 3\], not \[rows, 64\]"):
        driver.step(finished_req_ids=["a"], counts={}, scheduled_encoder_inputs={"picture": narrow})
    short = embeds(torch.zeros(5, LLAMA.config.hidden_size))
    with pytest.raises(ValueError, match=r"'picture' have 5 rows, and rows 1 to 5 are to be read"):
        driver.step(new=[new], finished_req_ids=["a"], scheduled_encoder_inputs={"picture": short})


def test_beams_rotate_by_the_delta_of_their_search() -> None:
    delta = -4
    driver = Driver(with_rope_positions(LLAMA))
    new = driver.new("s", PROMPT, 1)
    listed = [*range(len(PROMPT) + delta), *[len(PROMPT) + delta - 1] * -delta]
    new.overrides = InputOverrides(packed([listed]), delta)
    first = BeamStep("s", num_candidates=4, scores=[0.0])
    driver.step(new=[new], sampled=[], beam_steps=[first])
    copies = [BlockCopy("s", 0, 2, 3, 20), BlockCopy("s", 0, 2, 3, 21)]
    beams = BeamStep(
        "s", num_tokens=1, num_computed_tokens=len(PROMPT), parents=[0, 0], token_ids=[5, 6], first_columns=[2],
        block_ids=([20, 21],), num_candidates=4, scores=[0.0, 0.0],
    )  # fmt: skip
    output = driver.step(beam_steps=[beams], block_copies=copies, total_num_scheduled_tokens=2)
    rows = []
    for token in (5, 6):
        ids = torch.tensor([[*PROMPT, token]])
        positions = torch.tensor([[*listed, len(PROMPT) + delta]])
        with torch.inference_mode():
            logits = LLAMA.oracle(
                ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False
            ).logits
        rows.append(logits[0, -1].log_softmax(-1))
    best = torch.stack(rows).flatten().topk(4)
    found = output.candidates["s"]
    assert [beam * 97 + token for beam, token in zip(found.beams, found.token_ids)] == best.indices.tolist()
    assert found.scores == pytest.approx(best.values.tolist(), abs=TOLERANCE)
