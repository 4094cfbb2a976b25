"""Images with everything else that an engine does, through `LLM` on small random models of real families: the tokens
are those of transformers, and what was seen once is not encoded again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ratoon import LLM, BeamSearchParams, HiddenStatesParams, RequestOutput
from ratoon.attention.segments import attend_in_runs, attend_rounded
from ratoon.core.errors import ModelError, RequestError
from ratoon.core.media import MediaFeature, moved_features
from ratoon.models.adapters import inspect
from tests.adapter_folders import write_adapter
from tests.depths import both_depths
from tests.golden.engines import engine_of_folder, greedy, scheduler_of
from tests.golden.image_readers import IMAGE_FAMILIES, ImageReader, image_reader, num_encoder_runs, picture
from tests.golden.tiny_media_models import normalised

COUNT = 6
TOLERANCE = 1e-4
NUM_INPUTS = {"qwen2_5_vl": 1, "gemma3": 1, "idefics3": 3}  # that the encoder reads of one picture
SMALL_FRAMES = {"min_pixels": 64, "max_pixels": 512}

all_families = pytest.mark.parametrize("family", IMAGE_FAMILIES)


@contextmanager
def seeing(family: str, **settings: Any) -> Iterator[tuple[LLM, ImageReader]]:
    reader = image_reader(family)
    defaults = {"skip_tokenizer": False, "dtype": "float32", "num_blocks": 200, "block_size": 4, "max_num_seqs": 8}
    with engine_of_folder(reader.folder, **(defaults | settings)) as llm:
        yield llm, reader
        scheduler_of(llm).leases.end_all()


def ask(llm: LLM, prompt: Any, params: Any = None, **options: Any) -> RequestOutput:
    (output,) = llm.generate(prompt, params or greedy(COUNT), progress=False, **options)
    assert output.error is None
    return output


def tokens_of(output: RequestOutput, choice: int = 0) -> list[int]:
    return list(output.outputs[choice].token_ids)


def read(llm: LLM, prompt: Any) -> tuple[list[int], list[MediaFeature]]:
    """The tokens of a prompt, of which those of images are expanded, and its images."""
    request = llm.engine.input_processor.process("read", prompt, greedy(1))
    return request.prompt_token_ids, request.mm_features


def expected(llm: LLM, reader: ImageReader, prompt: Any, behind: Sequence[int] = (), count: int = COUNT) -> list[int]:
    """What transformers answers, behind further tokens of the prompt."""
    token_ids, features = read(llm, prompt)
    return reader.generate([*token_ids, *behind], features, count)[0]


@both_depths
@all_families
def test_greedy_tokens_are_those_of_transformers_however_the_prompt_is_cut(family: str) -> None:
    for budget in (32, 256):
        with seeing(family, max_num_batched_tokens=budget) as (llm, reader):
            prompts = [reader.prompt(0), reader.prompt(1, "", "abc"), reader.prompt(0, "who is in ", "?")]
            outputs = llm.generate(prompts, greedy(COUNT), progress=False)
            assert [tokens_of(one) for one in outputs] == [expected(llm, reader, prompt) for prompt in prompts]
            assert num_encoder_runs(llm) == 2 * NUM_INPUTS[family], "two pictures, each once"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_logits_of_mixed_batches_and_cut_prompts_are_those_of_transformers(family: str) -> None:
    """Prompts of several steps beside others that decode, with a picture that is cut. Those of Gemma 3 are compared in
    test_gemma3_images.py, step by step."""
    with seeing(family, max_num_batched_tokens=20, max_logprobs=97, quantization="none") as (llm, reader):
        prompts = [{"prompt": "who"}, reader.prompt(0), reader.prompt(1, "", "abc")]
        outputs = llm.generate(prompts, greedy(3, logprobs=97), progress=False)
        assert len(outputs[1].prompt_token_ids) > 20
        for prompt, output in zip(prompts, outputs):
            token_ids, features = read(llm, prompt)
            ids = torch.tensor([[*token_ids, *tokens_of(output)]])
            inputs = reader.inputs_of(ids, features) if features else {}
            with torch.inference_mode():
                logits = reader.tiny.oracle(ids, use_cache=False, **inputs).logits[0, len(token_ids) - 1 : -1]
            right = logits.log_softmax(-1)
            for row, found in zip(right, output.outputs[0].logprobs, strict=True):
                values = torch.tensor([found[token].logprob for token in range(97)])
                torch.testing.assert_close(values, row, atol=TOLERANCE, rtol=0)


@all_families
def test_several_choices_and_beams(family: str) -> None:
    with seeing(family) as (llm, reader):
        prompt = reader.prompt()
        right = expected(llm, reader, prompt)
        assert [list(one.token_ids) for one in ask(llm, prompt, greedy(COUNT, n=3)).outputs] == [right] * 3
        search = BeamSearchParams(beam_width=1, max_tokens=COUNT, ignore_eos=True)
        assert tokens_of(llm.beam_search(prompt, search, progress=False)[0]) == right
        wide = BeamSearchParams(beam_width=3, n=3, max_tokens=COUNT, ignore_eos=True)
        found = [list(one.token_ids) for one in llm.beam_search(prompt, wide, progress=False)[0].outputs]
        assert len({tuple(one) for one in found}) == 3
        assert found == reader.generate(*read(llm, prompt), COUNT, num_beams=3)
        assert num_encoder_runs(llm) == NUM_INPUTS[family]


@all_families
def test_a_continuation_equals_the_whole_prompt_and_runs_no_encoder_again(family: str) -> None:
    with seeing(family) as (llm, reader):
        prompt, suffix = reader.prompt(), [10, 11, 12]
        parent = ask(llm, prompt, retain_kv=60)
        child = llm.generate_continuation(parent, suffix, greedy(COUNT))
        assert child.continuation.source == "lease"
        behind = [*tokens_of(parent), *suffix]
        assert tokens_of(child) == expected(llm, reader, prompt, behind)
        grandchild = llm.generate_continuation(child, [13], greedy(COUNT))
        assert tokens_of(grandchild) == expected(llm, reader, prompt, [*behind, *tokens_of(child), 13])
        earlier = llm.generate_continuation(parent, [14, 15], greedy(COUNT), at=len(parent.prompt_token_ids) - 2)
        token_ids, features = read(llm, prompt)
        assert tokens_of(earlier) == reader.generate([*token_ids[:-2], 14, 15], features, COUNT)[0]
        assert num_encoder_runs(llm) == NUM_INPUTS[family]


def whole_text(reader: ImageReader, llm: LLM, parent: RequestOutput, suffix: Any) -> tuple[list[int], list[Any]]:
    """The tokens and the images of a request and of a suffix with a picture behind it, each read by itself."""
    token_ids = [*parent.prompt_token_ids, *tokens_of(parent)]
    new_ids, new_features = read(llm, suffix)
    root = llm.find_parent(parent.request_id)
    return [*token_ids, *new_ids], [*root.mm_features, *moved_features(new_features, len(token_ids))]


@all_families
def test_a_continuation_has_pictures_of_its_own(family: str) -> None:
    with seeing(family) as (llm, reader):
        parent = ask(llm, reader.prompt(), retain_kv=60)
        suffix = reader.prompt(1, "and", "here")
        child = llm.generate_continuation(parent, suffix, greedy(COUNT), retain_kv=60)
        assert child.continuation.source == "lease"
        token_ids, features = whole_text(reader, llm, parent, suffix)
        assert child.prompt_token_ids == token_ids
        assert tokens_of(child) == reader.generate(token_ids, features, COUNT)[0]
        assert num_encoder_runs(llm) == 2 * NUM_INPUTS[family], "the first picture is not encoded again"
        # A grandchild, and a second child of the same root that finds the picture that the first one brought
        further = reader.prompt(2, "", "there")
        grandchild = llm.generate_continuation(child, further, greedy(COUNT))
        token_ids, features = whole_text(reader, llm, child, further)
        assert tokens_of(grandchild) == reader.generate(token_ids, features, COUNT)[0]
        assert num_encoder_runs(llm) == 3 * NUM_INPUTS[family]
        twin = llm.generate_continuation(parent, reader.prompt(1, "or", "that"), greedy(COUNT))
        token_ids, features = whole_text(reader, llm, parent, reader.prompt(1, "or", "that"))
        assert tokens_of(twin) == reader.generate(token_ids, features, COUNT)[0]
        assert num_encoder_runs(llm) == 3 * NUM_INPUTS[family]
        states = llm.extract_hidden_states(twin, HiddenStatesParams(positions=[len(token_ids) - 1]))
        right = reader.last_state(token_ids, features)
        torch.testing.assert_close(states.tensor.reshape(-1), right, atol=TOLERANCE, rtol=TOLERANCE)


@all_families
def test_choices_beams_and_structured_output_behind_a_picture_of_a_continuation(family: str) -> None:
    with seeing(family) as (llm, reader):
        parent = ask(llm, reader.prompt(2))
        suffix = reader.prompt(1, "and", "here")
        token_ids, features = whole_text(reader, llm, parent, suffix)
        (right,) = reader.generate(token_ids, features, COUNT)
        choices = llm.generate_continuation(parent, suffix, greedy(COUNT, n=2))
        assert [list(one.token_ids) for one in choices.outputs] == [right] * 2
        wide = BeamSearchParams(beam_width=3, n=3, max_tokens=COUNT, ignore_eos=True)
        beams = llm.generate_continuation(parent, suffix, wide)
        found = [list(one.token_ids) for one in beams.outputs]
        assert found == reader.generate(token_ids, features, COUNT, num_beams=3)
        of_beam = llm.generate_continuation(beams, reader.prompt(0, "", "a"), greedy(COUNT), choice=1)
        new_ids, new_features = read(llm, reader.prompt(0, "", "a"))
        behind = [*token_ids, *found[1]]
        features = [*features, *moved_features(new_features, len(behind))]
        assert tokens_of(of_beam) == reader.generate([*behind, *new_ids], features, COUNT)[0]
        matching = greedy(40, structured_output={"regex": "(a cat|a dog), [0-9]{4}"})
        matching.ignore_eos = False
        text = llm.generate_continuation(parent, suffix, matching).outputs[0].text
        assert re.fullmatch("(a cat|a dog), [0-9]{4}", text)
        assert num_encoder_runs(llm) == 3 * NUM_INPUTS[family]


def test_pictures_of_a_continuation_and_of_its_parent_count_together() -> None:
    with seeing("idefics3", limit_mm_per_prompt={"image": 2}) as (llm, reader):
        parent = ask(llm, reader.prompt())
        assert len(llm.find_parent(parent.request_id).mm_features) == 3  # tiles of one picture
        child = llm.generate_continuation(parent, reader.prompt(1), greedy(2))
        problem = "has 3 of the kind image, and at most 2 are allowed; 2 of them are in the text"
        with pytest.raises(RequestError, match=problem) as caught:
            llm.generate_continuation(child, reader.prompt(0), greedy(2))
        assert caught.value.field == "continuation_suffix.multi_modal_data.image"
        # Behind the first token of the parent there is none of its pictures.
        llm.generate_continuation(parent, reader.prompt(0), greedy(2), at=1)
        llm.generate_continuation(child, "more", greedy(2))
        with pytest.raises(RequestError, match="has 1 placeholders of the kind image, and 0 are given") as caught:
            llm.generate_continuation(parent, "a<image>", greedy(2))
        assert caught.value.field == "continuation_suffix"
        with pytest.raises(RequestError, match="has 0 placeholders of the kind image, and 1 are given"):
            llm.generate_continuation(parent, {**reader.prompt(), "prompt": "no"}, greedy(2))
        with pytest.raises(RequestError, match="is neither text nor token ids"):
            llm.generate_continuation(parent, {"prompt_embeds": np.zeros((1, 8), np.float32)}, greedy(2))
        with pytest.raises(RequestError, match="int is not a prompt"):
            llm.generate_continuation(parent, 5, greedy(2))


@all_families
def test_a_picture_that_was_seen_is_found_in_the_prefix_cache(family: str) -> None:
    with seeing(family) as (llm, reader):
        first = ask(llm, reader.prompt())
        again = ask(llm, reader.prompt())
        assert tokens_of(again) == tokens_of(first)
        assert again.num_cached_tokens >= len(again.prompt_token_ids) - 4
        other = ask(llm, reader.prompt(behind="who"))
        assert tokens_of(other) == expected(llm, reader, reader.prompt(behind="who"))
        assert num_encoder_runs(llm) == NUM_INPUTS[family]
        ask(llm, reader.prompt(1))
        assert num_encoder_runs(llm) == 2 * NUM_INPUTS[family]


@pytest.mark.parametrize(("quantization", "attend"), [("int8", attend_rounded), ("none", attend_in_runs)])
def test_encoders_of_pictures_round_only_beside_weights_that_are_quantised(quantization: str, attend: Any) -> None:
    with seeing("idefics3", quantization=quantization) as (llm, reader):
        ask(llm, reader.prompt())
        assert llm._client.core.executor._worker.runner.media._attend is attend


@all_families
def test_structured_output_over_a_picture(family: str) -> None:
    with seeing(family) as (llm, reader):
        params = greedy(40, structured_output={"regex": "(a cat|a dog|no animal), [0-9]{4}"})
        params.ignore_eos = False
        answers = [ask(llm, reader.prompt(number), params).outputs[0].text for number in range(3)]
        assert all(re.fullmatch("(a cat|a dog|no animal), [0-9]{4}", answer) for answer in answers)
        assert len(set(answers)) > 1, "they depend on the picture"


@all_families
def test_hidden_states_and_embeddings_of_the_last_token(family: str) -> None:
    with seeing(family) as (llm, reader):
        prompt = reader.prompt()
        token_ids, features = read(llm, prompt)
        right = reader.last_state(token_ids, features)
        states = llm.extract_hidden_states(prompt, HiddenStatesParams(positions=[-1]))
        torch.testing.assert_close(states.tensor.reshape(-1), right, atol=TOLERANCE, rtol=TOLERANCE)
        (vector,) = llm.embed(prompt, progress=False)
        assert np.dot(vector.embedding, (right / right.norm()).numpy()) == pytest.approx(1.0, abs=1e-5)
        parent = ask(llm, prompt)
        last = HiddenStatesParams(positions=[len(token_ids) - 1])
        later = llm.extract_hidden_states(parent, last)
        torch.testing.assert_close(later.tensor.reshape(-1), right, atol=TOLERANCE, rtol=TOLERANCE)
        assert num_encoder_runs(llm) == NUM_INPUTS[family]


@both_depths
@all_families
def test_drafts_change_no_token(family: str) -> None:
    # Rows count as free while no more than eight run: what is drafted does not depend on how fast this machine is.
    drafts = {"speculate": "ngram", "speculate_ngram_min": 1, "speculate_min_acceptance": 0.0, "speculate_max_seqs": 8}
    with seeing(family, **drafts) as (llm, reader):
        prompts = [reader.prompt(number, behind="abcabcabc") for number in range(2)]
        outputs = llm.generate(prompts, greedy(16), progress=False)
        assert [tokens_of(one) for one in outputs] == [expected(llm, reader, one, count=16) for one in prompts]
        assert scheduler_of(llm).stats().drafts["ngram"].draft_tokens > 0


def shapes_of_text(reader: ImageReader) -> dict[str, tuple[int, ...]]:
    shapes = reader.tiny.source.shapes()
    return {name: shape for name, shape in shapes.items() if "vision" not in name and "visual" not in name}


@all_families
def test_an_adapter_of_the_text_side(family: str, tmp_path: Path) -> None:
    reader = image_reader(family)
    folder = write_adapter(tmp_path / "adapter", shapes_of_text(reader), seed=4)
    with seeing(family, enable_lora=True, max_lora_rank=8) as (llm, _):
        prompt = reader.prompt()
        plain = expected(llm, reader, prompt)
        with reader.with_adapter(folder):
            right = expected(llm, reader, prompt)
            then = expected(llm, reader, prompt, [*right, 5, 6])
        assert right != plain
        parent = ask(llm, prompt, adapter=folder, retain_kv=60)
        assert tokens_of(parent) == right
        assert tokens_of(ask(llm, prompt)) == plain
        assert tokens_of(llm.generate_continuation(parent, [5, 6], greedy(COUNT))) == then
        assert num_encoder_runs(llm) == NUM_INPUTS[family], "the encoder has no adapter"


@all_families
def test_an_adapter_with_matrices_for_the_encoder_is_refused_before_it_is_loaded(family: str, tmp_path: Path) -> None:
    reader = image_reader(family)
    folder = write_adapter(tmp_path / "adapter", reader.tiny.source.shapes())
    with pytest.raises(ModelError, match=r"vis.*, a layer of the encoder of images"):
        inspect(folder, reader.tiny.source.shapes())
    inspect(write_adapter(tmp_path / "other", shapes_of_text(reader)), reader.tiny.source.shapes())


@both_depths
@all_families
@pytest.mark.parametrize("swap_memory", [0, "1MiB"])
@pytest.mark.one_in(5)
def test_prompts_that_were_preempted_go_on_where_they_were(family: str, swap_memory: Any) -> None:
    with seeing(family) as (llm, reader):
        longest = len(ask(llm, reader.prompt()).prompt_token_ids)
    count = 24
    settings = {"num_blocks": 3 * -(-(longest + count) // 4), "swap_memory": swap_memory, "max_num_batched_tokens": 48}
    with seeing(family, enable_prefix_caching=False, **settings) as (llm, reader):
        prompts = [reader.prompt(number % 2, before=letter) for number, letter in enumerate("abcd")]
        outputs = llm.generate(prompts, greedy(count), progress=False)
        assert scheduler_of(llm).stats().num_preemptions > 0
        found = [tokens_of(output) for output in outputs]
        assert found == [expected(llm, reader, prompt, count=count) for prompt in prompts]


def test_a_video_whose_time_runs_ahead_of_its_tokens_gives_the_tokens_of_transformers() -> None:
    frames = np.stack([np.asarray(picture(0)), np.asarray(picture(2).resize((48, 24)))] * 2)
    with seeing("qwen2_5_vl", max_num_batched_tokens=32) as (llm, reader):
        media = {"video": (frames, {"fps": 0.1})}
        prompt = {"prompt": "a<video>what is it", "multi_modal_data": media, "mm_processor_kwargs": SMALL_FRAMES}
        request = llm.engine.input_processor.process("read", prompt, greedy(1))
        ids = torch.tensor([request.prompt_token_ids])
        listed = np.frombuffer(request.rope.packed, np.int32).reshape(3, -1)
        assert listed.max() > listed[:, -1].max(), "the time of the video is ahead of the text behind it"
        (feature,) = request.mm_features
        inputs = {"pixel_values_videos": normalised(reader.tiny.config, feature.data)}
        inputs["video_grid_thw"] = torch.tensor([feature.data.grid])
        inputs["second_per_grid_ts"] = torch.tensor([2 / 0.1])
        inputs["mm_token_type_ids"] = 2 * (ids == 91).int()
        reader.tiny.oracle.model.rope_deltas = None
        with torch.inference_mode():
            found = reader.tiny.oracle.generate(ids, max_new_tokens=COUNT, do_sample=False, **inputs)
        assert tokens_of(ask(llm, prompt)) == found[0, ids.shape[1] :].tolist()
        # The answer, of which no token stands for an image, has the same positions as a part of the next prompt.
        answer = ask(llm, prompt, greedy(COUNT, logit_bias={90: -100.0, 91: -100.0}), retain_kv=60)
        suffix = {**reader.prompt(1, "", "b"), "mm_processor_kwargs": SMALL_FRAMES}
        child = llm.generate_continuation(answer, suffix, greedy(COUNT))
        again: dict[str, Any] = {
            "prompt_token_ids": [*llm.get_tokenizer().encode("a<video>what is it", False), *tokens_of(answer)],
            "multi_modal_data": {**media, **reader.prompt(1)["multi_modal_data"]},
            "mm_processor_kwargs": SMALL_FRAMES,
        }
        again["prompt_token_ids"] += llm.get_tokenizer().encode("<image>b", False)
        whole = llm.engine.input_processor.process("whole", again, greedy(1))
        root = llm.find_parent(child.request_id)
        assert (root.prompt_token_ids, root.rope) == (whole.prompt_token_ids, whole.rope)


def test_crops_of_gemma_give_the_tokens_of_transformers() -> None:
    """A picture that is twice as wide as high is read whole, and as two squares beside each other."""
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16}
    with seeing("gemma3", max_num_batched_tokens=64, num_blocks=400) as (llm, reader):
        prompts = [{**reader.prompt(number, "", "a"), "mm_processor_kwargs": crops} for number in (0, 1)]
        outputs = llm.generate([*prompts, reader.prompt(0, "", "a")], greedy(COUNT), progress=False)
        assert [tokens_of(one) for one in outputs[:2]] == [expected(llm, reader, prompt) for prompt in prompts]
        assert len(read(llm, prompts[0])[1]) == 3 and num_encoder_runs(llm) == 6
        text = llm.get_tokenizer().decode(outputs[0].prompt_token_ids, skip_special_tokens=False)
        assert "and here are some crops to help you see better" in text
        assert len(outputs[2].prompt_token_ids) < len(outputs[0].prompt_token_ids)
        assert tokens_of(outputs[2]) == expected(llm, reader, reader.prompt(0, "", "a"))
    with seeing("gemma3", mm_processor_kwargs=crops, num_blocks=400) as (llm, reader):
        assert tokens_of(ask(llm, reader.prompt(1, "", "a"))) == tokens_of(outputs[1]), "also by the setting"


def video_prompt(*numbers: int, behind: str = "what is it") -> dict[str, Any]:
    """A video of pictures, one in each second."""
    frames = [picture(number).resize((48, 24)) for number in numbers]
    return {"prompt": f"a<video>{behind}", "multi_modal_data": {"video": (frames, {"fps": 1.0})}}


@pytest.mark.parametrize("budget", [32, 512])
def test_a_video_of_frames_with_times_gives_the_tokens_of_transformers(budget: int) -> None:
    """SmolVLM reads the frames of a video as pictures."""
    with seeing("idefics3", max_num_batched_tokens=budget, num_blocks=400) as (llm, reader):
        prompts = [video_prompt(0, 1, 2), video_prompt(3, 2), reader.prompt(4)]
        outputs = llm.generate(prompts, greedy(COUNT), progress=False)
        assert [tokens_of(one) for one in outputs] == [expected(llm, reader, prompt) for prompt in prompts]
        text = llm.get_tokenizer().decode(outputs[0].prompt_token_ids, skip_special_tokens=False)
        # The tokenizer has few capital letters.
        assert "series of three frames from a 0:00:02" in text and "rame from 00:01:<fake" in text
        assert num_encoder_runs(llm) == 4 + NUM_INPUTS["idefics3"], "a frame that two videos have runs once"
        assert ask(llm, prompts[0]).num_cached_tokens >= len(outputs[0].prompt_token_ids) - 4


def test_a_continuation_has_a_video_of_its_own_and_counts_videos_not_frames() -> None:
    with seeing("idefics3", num_blocks=600, limit_mm_per_prompt={"video": 2}) as (llm, reader):
        parent = ask(llm, video_prompt(0, 1), retain_kv=60)
        suffix = video_prompt(2, 3, behind="here")
        child = llm.generate_continuation(parent, suffix, greedy(COUNT))
        token_ids, features = whole_text(reader, llm, parent, suffix)
        assert child.prompt_token_ids == token_ids
        assert tokens_of(child) == reader.generate(token_ids, features, COUNT)[0]
        assert num_encoder_runs(llm) == 4
        with pytest.raises(RequestError, match="has 3 of the kind video, and at most 2 are allowed; 2 of them are in"):
            llm.generate_continuation(child, video_prompt(0), greedy(2))
