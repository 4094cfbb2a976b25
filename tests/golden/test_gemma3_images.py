"""Gemma 3 with images, by hand-written plans in every way to run a step: the logits of transformers at every position,
of which the rows of an image see each other, and windows bound what is before a row alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratoon.attention.segments import build_segment_attention
from ratoon.core.media import MediaInput
from ratoon.core.params import SamplingParams
from ratoon.core.plan import CaptureStep, EmbeddingSpan, InputOverrides, NewRequestData
from ratoon.models.source import resolve_model
from tests.golden.engines import engine_of_folder, greedy, run, tokens_of, write_word_tokenizer
from tests.golden.tiny_media_models import (
    IMAGE_TOKEN,
    TinyMediaModel,
    normalised,
    published,
    tile_input,
    tiny_gemma3_with_images,
)
from tests.golden.tiny_models import DictSource, random_token_ids
from tests.triton_interpreter import repair_interpreter
from tests.unit.execution.test_model_runner import Driver, interpreted, needs_kernels, token_of
from tests.unit.execution.test_row_inputs import RunAgain, logprobs_of

repair_interpreter()

TOLERANCE = 1e-4
ALL = SamplingParams(temperature=0.0, logprobs=97)
WITH_PROMPT = SamplingParams(temperature=0.0, logprobs=97, prompt_logprobs=97)
DRIVERS = [
    "torch",
    *[pytest.param(name, marks=needs_kernels) for name in ("native", "recorded")],
    *[pytest.param(name, marks=interpreted) for name in ("resident", "padded")],
]
TINY = tiny_gemma3_with_images()
PICTURES = [tile_input(TINY.config, 24, 24, seed) for seed in range(3)]
NUM_ROWS = 9
Prompt = Sequence[list[int] | MediaInput]


def text(length: int) -> list[int]:
    return [token % 90 for token in random_token_ids(length, seed=length)]


def ids_of(prompt: Prompt) -> list[int]:
    return [token for part in prompt for token in ([IMAGE_TOKEN] * NUM_ROWS if isinstance(part, MediaInput) else part)]


@torch.inference_mode()
def oracle_logprobs(prompt: Prompt, behind: Sequence[int] = ()) -> np.ndarray:
    """[T, vocabulary], of the prompt and tokens behind it."""
    ids = torch.tensor([[*ids_of(prompt), *behind]])
    pictures = [normalised(TINY.config, part) for part in prompt if isinstance(part, MediaInput)]
    arguments: dict[str, Any] = {"token_type_ids": (ids == IMAGE_TOKEN).int()}
    if pictures:
        arguments["pixel_values"] = torch.stack(pictures)
    return TINY.oracle(ids, use_cache=False, **arguments).logits[0].log_softmax(-1).numpy()


class ImageDriver(Driver):
    """Runs the encoder over pictures when a prompt first names them."""

    def __init__(self, tiny: TinyMediaModel, name: str) -> None:
        settings: dict[str, Any] = {"capture": RunAgain} if name == "padded" else {}
        super().__init__(tiny, "resident" if name == "padded" else name, **settings)  # type: ignore[arg-type]

    def with_pictures(self, req_id: str, prompt: Prompt, first_block: int, **options: Any) -> NewRequestData:
        new = self.new(req_id, ids_of(prompt), first_block, **options)
        new.overrides = InputOverrides(embeddings=self.spans_of(prompt))
        return new

    @torch.inference_mode()
    def spans_of(self, prompt: Prompt) -> list[EmbeddingSpan]:
        model, spans, start = self.runner.model, [], 0
        assert model.media_encoder is not None
        attend = build_segment_attention(model.device, model.dtype)
        for part in prompt:
            if isinstance(part, MediaInput):
                key = f"picture {next(index for index, one in enumerate(PICTURES) if one is part)}"
                self.runner.embeddings.put(key, model.media_encoder.encode([part], attend)[0])
                spans.append(EmbeddingSpan(start, NUM_ROWS, key))
            start += NUM_ROWS if isinstance(part, MediaInput) else len(part)
        return spans


def assert_logprobs(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


PROMPTS: dict[str, Prompt] = {
    "text only": [text(30)],
    "one image": [text(5), PICTURES[0], text(7)],
    "an image first": [PICTURES[1], text(3)],
    "an image last": [text(20), PICTURES[1]],
    "two images": [text(8), PICTURES[0], text(4), PICTURES[2], text(5)],
}


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.one_in(3)
def test_a_prompt_and_what_follows_it_have_the_logits_of_transformers(name: str, driver: str) -> None:
    prompt, runner = PROMPTS[name], ImageDriver(TINY, driver)
    num_prompt = len(ids_of(prompt))
    for round in range(3):  # a prompt that was seen before runs as a graph, if it does at all
        req_id = f"r{round}"
        new = runner.with_pictures(req_id, prompt, 1, params=ALL)
        output = runner.step(new=[new], finished_req_ids=[f"r{round - 1}"])
        tokens, found = [token_of(output, req_id)], [logprobs_of(output, req_id)]
        for index in range(3):
            output = runner.step(known={req_id: num_prompt + index})
            tokens.append(token_of(output, req_id))
            found.append(logprobs_of(output, req_id))
        assert_logprobs(np.stack(found), oracle_logprobs(prompt, tokens)[num_prompt - 1 : -1])
    if driver == "padded" and name == "one image":
        assert runner.runner.graphs is not None and runner.runner.graphs.stats.num_graphs >= 2


@pytest.mark.parametrize("driver", DRIVERS)
def test_every_position_of_a_prompt_has_the_logits_of_transformers(driver: str) -> None:
    prompt, runner = PROMPTS["two images"], ImageDriver(TINY, driver)
    output = runner.step(new=[runner.with_pictures("a", prompt, 1, params=WITH_PROMPT)])
    lists = output.prompt_logprobs["a"].rows
    found = np.full((len(lists.token_ids), 97), np.nan)
    np.put_along_axis(found, np.asarray(lists.token_ids), np.asarray(lists.logprobs), 1)
    expected = oracle_logprobs(prompt)[: len(found)]
    assert len(found) == len(ids_of(prompt)) - 1
    assert_logprobs(found, expected)
    plain = TINY.oracle(torch.tensor([ids_of(prompt)]), use_cache=False).logits[0].log_softmax(-1).detach().numpy()
    assert np.abs(found - plain[: len(found)]).max() > 100 * TOLERANCE, "images change something"


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_mixed_batch_of_images_text_and_decodes(driver: str) -> None:
    runner = ImageDriver(TINY, driver)
    first, image, two = PROMPTS["text only"], PROMPTS["one image"], PROMPTS["two images"]
    output = runner.step(new=[runner.with_pictures("text", first, 1, params=ALL)])
    tokens = [token_of(output, "text")]
    news = [runner.with_pictures("image", image, 4, params=ALL), runner.with_pictures("two", two, 25, params=ALL)]
    output = runner.step(new=news, known={"text": len(ids_of(first))})
    assert_logprobs(logprobs_of(output, "text"), oracle_logprobs(first, tokens)[-1])
    assert_logprobs(logprobs_of(output, "image"), oracle_logprobs(image)[-1])
    assert_logprobs(logprobs_of(output, "two"), oracle_logprobs(two)[-1])


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_prompt_may_be_cut_before_images_and_behind_them(driver: str) -> None:
    prompt, runner = PROMPTS["two images"], ImageDriver(TINY, driver)
    new = runner.with_pictures("a", prompt, 1, params=ALL)
    runner.step(new=[new], counts={"a": 8}, sampled=[])
    runner.step(known={"a": 8}, counts={"a": 11}, sampled=[])  # the image, and two tokens
    output = runner.step(known={"a": 19}, counts={"a": len(ids_of(prompt)) - 19})
    assert_logprobs(logprobs_of(output, "a"), oracle_logprobs(prompt)[-1])


def test_the_rest_of_an_image_whose_first_rows_are_cached_can_run_alone() -> None:
    """As behind a prefix that ends inside an image: its keys were computed with all of it."""
    prompt, runner = PROMPTS["one image"], ImageDriver(TINY, "torch")
    runner.step(new=[runner.with_pictures("a", prompt, 1, params=ALL)])
    again = runner.with_pictures("b", prompt, 1, params=WITH_PROMPT, computed=10)  # the same blocks
    output = runner.step(new=[again], finished_req_ids=["a"])
    assert_logprobs(logprobs_of(output, "b"), oracle_logprobs(prompt)[-1])


def test_an_image_that_is_cut_is_an_error() -> None:
    runner = ImageDriver(TINY, "torch")
    new = runner.with_pictures("a", PROMPTS["one image"], 1)
    with pytest.raises(ValueError, match=r"positions 0 to 7 end inside the image at 5 to 13"):
        runner.step(new=[new], counts={"a": 8}, sampled=[])


def test_embeddings_of_a_request_see_what_is_before_them_alone() -> None:
    runner = ImageDriver(TINY, "torch")
    ids = text(30)
    table = TINY.oracle.get_input_embeddings()(torch.tensor(ids)).detach()  # scaled
    runner.runner.embeddings.put("rows", table)
    new = runner.new("a", [0] * len(ids), 1, params=ALL)
    new.overrides = InputOverrides(embeddings=[EmbeddingSpan(0, len(ids), "rows", is_causal=True)])
    runner.step(new=[new], counts={"a": 11}, sampled=[])
    output = runner.step(known={"a": 11}, counts={"a": len(ids) - 11})
    assert_logprobs(logprobs_of(output, "a"), oracle_logprobs([ids])[-1])


@torch.inference_mode()
def test_hidden_states_of_rows_of_an_image_are_those_of_transformers() -> None:
    prompt, runner = PROMPTS["one image"], ImageDriver(TINY, "torch")
    ids = ids_of(prompt)
    capture = CaptureStep(
        "states", ids, [(0, len(ids), True)], ([1, 2, 3], [11, 12, 13]), [6, 13, 15], [1, 4], "float32",
        overrides=InputOverrides(embeddings=runner.spans_of(prompt)),
    )  # fmt: skip
    output = runner.step(captures=[capture], total_num_scheduled_tokens=len(ids))
    found = torch.frombuffer(bytearray(output.hidden_states["states"].data), dtype=torch.float32)
    tokens = torch.tensor([ids])
    expected = TINY.oracle(
        tokens, pixel_values=normalised(TINY.config, PICTURES[0])[None], token_type_ids=(tokens == IMAGE_TOKEN).int(),
        use_cache=False, output_hidden_states=True,
    ).hidden_states  # fmt: skip
    first = expected[1][0, [6, 13, 15]]
    torch.testing.assert_close(found.view(2, 3, -1)[0], first, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_weights_are_found_under_the_names_of_every_version_of_transformers() -> None:
    state = dict(TINY.oracle.state_dict())
    of_files = published(state)
    newer = {name.replace("vision_tower.vision_model.", "vision_tower."): tensor for name, tensor in of_files.items()}
    attend = build_segment_attention(torch.device("cpu"), torch.float32)
    rows = []
    for tensors in (of_files, newer, state):
        source = DictSource(tensors)
        model = TINY._replace(source=source).build()
        assert model.media_encoder is not None
        rows.append(model.media_encoder.encode(PICTURES[:1], attend)[0])
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], rows[2])


def test_an_engine_over_a_folder_that_transformers_saved_answers_texts(tmp_path: Path) -> None:
    TINY.oracle.save_pretrained(tmp_path)
    write_word_tokenizer(tmp_path)
    processor = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 0.5], "size": {"height": 24, "width": 24}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    config = resolve_model(str(tmp_path)).config
    assert config.media is not None
    assert (config.media.processor, config.media.std) == (processor, (0.25, 0.5, 0.5))
    prompts = [text(5), text(40), text(23)]
    with engine_of_folder(tmp_path) as llm:
        found = tokens_of(run(llm, prompts, greedy(8)))
    for prompt, tokens in zip(prompts, found, strict=True):
        expected = oracle_logprobs([prompt], tokens).argmax(-1)
        assert tokens == expected[len(prompt) - 1 : -1].tolist()
