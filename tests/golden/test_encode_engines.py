"""Images that engines of their own encode: the same answers as of one engine, whose encoder the others never run, and
what becomes of requests when such an engine is not there."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ratoon import LLM, BeamSearchParams, HiddenStatesParams
from ratoon.core.config import FrontEndConfig
from ratoon.core.errors import ConfigError, RequestError
from ratoon.core.media import IMAGE, MediaFeature, MediaInput
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.core.settings import configure
from ratoon.core.wire import WireTensor
from ratoon.engine.processes.encodings import Encodings
from ratoon.engine.processes.moving_client import MovingClient
from tests.golden.engines import greedy, model_folder
from tests.golden.image_readers import image_reader
from tests.golden.test_images_compose import NUM_INPUTS
from tests.waiting import PATIENCE, wait_until

FAMILY = "qwen2_5_vl"
COMMON: dict[str, Any] = {"device": "cpu", "num_threads": 1, "dtype": "float32", "max_num_seqs": 8, "num_blocks": 96}
SPLIT = {"prefill_engines": 1, "decode_engines": 1, "prefill_threshold": 1, "swap_memory": "4MiB"}


def served(family: str = FAMILY, **settings: Any) -> LLM:
    return LLM(str(image_reader(family).folder), **(COMMON | settings))


def client_of(llm: LLM) -> MovingClient:
    client = llm._client._client
    assert isinstance(client, MovingClient)
    return client


def stats_of(llm: LLM) -> list[dict[str, Any]]:
    return llm._client._wait(client_of(llm).call_utility("stats"))


def ask(llm: LLM, family: str = FAMILY) -> list[Any]:
    reader, found = image_reader(family), []
    prompts = [reader.prompt(0), reader.prompt(1, "who is in ", "?"), reader.prompt(0, "now ", "?")]
    outputs = llm.generate(prompts, greedy(8, logprobs=2), progress=False)
    outputs += llm.beam_search(prompts[1], BeamSearchParams(beam_width=2, n=2, max_tokens=5), progress=False)
    (root,) = llm.generate(prompts[0], greedy(4), retain_kv=60, progress=False)
    outputs.append(llm.generate_continuation(root, reader.prompt(2, "and", "here"), greedy(4)))
    outputs += llm.generate(prompts[1], greedy(4), cache_salt="a tenant", progress=False)
    outputs += llm.generate([[5, 6, 7]], greedy(4), progress=False)  # without any
    assert [output.error for output in outputs] == [None] * len(outputs)
    found += [(list(one.token_ids), one.cumulative_logprob) for output in outputs for one in output.outputs]
    states = llm.extract_hidden_states(prompts[1], HiddenStatesParams(positions=[-1]))
    return [*found, states.tensor.tolist()]


@pytest.mark.parametrize(
    ("family", "settings"),
    [(FAMILY, {}), (FAMILY, SPLIT), pytest.param("idefics3", {}, marks=pytest.mark.full)],
    ids=["whole", "prompts apart", "tiles"],
)
def test_answers_are_those_of_one_engine_and_only_the_encoding_engine_encodes(
    family: str, settings: dict[str, Any]
) -> None:
    with served(family) as llm:
        right = ask(llm, family)
    with served(family, encode_engines=1, **settings) as llm:
        assert ask(llm, family) == right
        # Three pictures, and one of them again for a tenant whose salt has keys of its own.
        runs = [stats["num_media_runs"] for stats in stats_of(llm)]
        assert runs == [0] * (len(runs) - 1) + [4 * NUM_INPUTS[family]]
        encoding = client_of(llm)._encodings
        assert len(encoding) == 0 and not encoding._of_request and not any(encoding._num_rows.values())
        folder = Path(client_of(llm)._directory.path) / "encoded"
        assert len(list(folder.rglob("*.kv"))) == 4 * NUM_INPUTS[family]
        last = len(runs) - 1
        with pytest.raises(RequestError, match=f"engine {last} encodes images alone; .*leave it out"):
            llm.generate([[5, 6]], greedy(2), data_parallel_rank=last, progress=False)
        described = [replica.ready.description for replica in client_of(llm).replicas]
        assert described[-1]["weight_bytes"] < described[0]["weight_bytes"], "it has the encoder, and not all layers"
    assert not folder.exists()


@pytest.mark.full
@pytest.mark.slow
def test_outputs_of_encoders_are_in_the_files_and_outlive_the_service(tmp_path: Path) -> None:
    with served() as llm:
        right = ask(llm)
    for num_runs in (4 * NUM_INPUTS[FAMILY], 0):
        with served(encode_engines=1, kv_files=str(tmp_path), **SPLIT) as llm:
            assert ask(llm) == right
            assert [stats["num_media_runs"] for stats in stats_of(llm)] == [0, 0, num_runs]


@pytest.mark.slow
def test_requests_go_on_when_the_engine_that_encodes_has_died() -> None:
    with served() as llm:
        right = ask(llm)
    with served(encode_engines=1) as llm:
        pid = llm._client.health().engines[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it takes the request, and does nothing
        prompt, encodings = image_reader(FAMILY).prompt(0), client_of(llm)._encodings
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(llm.generate, prompt, greedy(4), progress=False)
            try:
                wait_until("its image is being encoded", lambda: len(encodings) == 1)
            finally:
                os.kill(pid, signal.SIGKILL)
            (output,) = asked.result(PATIENCE)
        assert output.error is None and list(output.outputs[0].token_ids) == right[0][0][:4]
        assert ask(llm) == right


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"encode_engines": -1}, "encode_engines: -1 is out of range"),
        (
            {"encode_engines": 1, "kv_connector": "lmcache", "swap_memory": "1MiB"},
            "encode_engines: kv_connector 'lmcache' moves no blocks",
        ),
        ({"encode_engines": 1, "tensor_parallel_size": 2}, "encode_engines: an engine that only encodes can't be 2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        configure("fake", settings)


def test_a_model_without_an_encoder_of_images_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="encode_engines: this model has no encoder of images"):
        LLM(str(model_folder("llama with grouped heads")), skip_tokenizer=True, encode_engines=1, **COMMON)


# ---- which engine encodes what ----


def request_with(name: str, *hashes: str, salt: str | None = None) -> EngineCoreRequest:
    media = MediaInput(IMAGE, 4, WireTensor("uint8", (0,), b""))
    features = [MediaFeature(0, 4, one, media) for one in hashes]
    return EngineCoreRequest(name, [1], SamplingParams(), mm_features=features, cache_salt=salt)


def test_inputs_are_encoded_once_by_the_engine_with_least_to_do() -> None:
    encodings = Encodings(range(2, 4))
    engine, sent = encodings.begin(request_with("a", "x", "y"), [2, 3])
    assert (engine, sent.request_id, len(sent.mm_features)) == (2, "a^e", 2)
    assert encodings.begin(request_with("b", "z"), [2, 3])[0] == 3
    assert encodings.begin(request_with("c", "u"), [2, 3])[0] == 3, "it has one input, the other has two"
    assert encodings.is_waited_for("a") and not encodings.is_waited_for("other")
    encodings.note_end("a^e", is_made=True)
    assert not encodings.is_waited_for("a")
    assert encodings.begin(request_with("a", "x", "y"), [2, 3]) is None, "it was tried"
    assert encodings.begin(request_with("d", "x"), [2, 3]) is None, "it is made"
    assert encodings.begin(request_with("e", "x", salt="s"), [2, 3]) is not None
    _, sent = encodings.begin(request_with("f", "x", "new"), [2, 3])
    assert [one.content_hash for one in sent.mm_features] == ["new"]
    encodings.note_end("b^e", is_made=False)
    assert encodings.begin(request_with("g", "z"), []) is None, "there is no engine for it"
    assert encodings.begin(request_with("h", "z"), [3]) is not None, "it failed before"
    assert encodings.give_up(3) >= 1 and not encodings.is_waited_for("h")
    assert encodings.forget("f") == (2, "f^e") and encodings.forget("f") is None


@pytest.mark.parametrize("outlive_engines", [True, False])
def test_what_was_made_is_found_at_its_engine_until_that_is_gone(outlive_engines: bool) -> None:
    encodings = Encodings(range(1, 3), outlive_engines)
    asked = request_with("a", "x", "y", salt="s")
    encodings.begin(asked, [2])
    assert encodings.made_by(asked.mm_features, "s") == {}
    encodings.note_end("a^e", is_made=True)
    assert encodings.made_by(asked.mm_features, "s") == {"x": 2, "y": 2}
    assert encodings.made_by(asked.mm_features, None) == {}
    encodings.give_up(1)
    assert encodings.made_by(asked.mm_features[1:], "s") == {"y": 2}
    encodings.give_up(2)
    again = encodings.begin(request_with("b", "x", salt="s"), [1, 2])
    assert (again is None) == outlive_engines


def test_the_number_of_engines() -> None:
    own = FrontEndConfig(prefill_engines=1, decode_engines=2, encode_engines=2)
    assert (own.num_engines, own.num_answering_engines, own.moves_blocks) == (5, 3, True)
    own = FrontEndConfig(num_replicas=2, encode_engines=1)
    assert (own.num_engines, own.num_answering_engines, own.moves_blocks) == (3, 2, True)
