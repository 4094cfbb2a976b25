"""Adapters act as PEFT applies them, in any batch, and leave the rows of others alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.numpy import load_file

from ratoon.core.config import AdapterConfig
from ratoon.core.outputs import LogprobsLists, ModelRunnerOutput
from ratoon.core.params import BeamSearchParams, SamplingParams
from ratoon.core.plan import (
    BeamStep,
    BlockCopy,
    CachedRequestData,
    CaptureStep,
    EncoderStep,
    NewRequestData,
    SchedulerOutput,
)
from ratoon.execution.model_runner import ModelRunner
from ratoon.layers.native_ops import NativeOps
from ratoon.models.adapters import inspect
from tests.golden.adapter_driver import WITH_LOGPROBS, AdapterDriver, Answer, load_into
from tests.golden.encoder_engines import FAMILIES as ENCODER_FAMILIES
from tests.golden.encoder_engines import Source, build_core, decoder_prompt, source_of
from tests.golden.encoder_engines import tiny_model as tiny_encoder_model
from tests.golden.peft_oracle import PeftAdapter, logits_of
from tests.golden.tiny_decoder_models import DECODERS, tiny_gemma2
from tests.golden.tiny_models import (
    TinyModel,
    random_token_ids,
    tiny_gpt2,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
)
from tests.unit.execution.test_model_runner import NATIVE
from tests.unit.models.test_adapter_files import write_gguf

FAMILIES = {
    "llama": tiny_llama,
    "llama, tied": lambda: tiny_llama(tied=True, attention_bias=True, mlp_bias=True),
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": lambda: tiny_qwen3(tied=False, head_dim=32),
    "gpt2": tiny_gpt2,
    **DECODERS,
    "gemma2": lambda: tiny_gemma2(window=None, final_cap=50.0),  # the driver has one group of layers
}
# A linear layer of each; of other families: q_proj
LAYERS = {"gpt2": "c_attn", "phi3": "qkv_proj", "gpt_neox": "query_key_value", "falcon": "query_key_value"}
COUNT = 6
PROMPTS = [random_token_ids(length, seed=length) for length in (5, 17, 2, 9, 12, 3, 8, 20, 4)]


def check(answer: Answer, prompt: list[int], logits: torch.Tensor) -> None:
    """The oracle's logits are of the prompt and the answer: the same tokens, and their log-probabilities."""
    expected = logits.log_softmax(-1)[len(prompt) - 1 :]
    assert answer.tokens == expected.argmax(-1).tolist()[: len(answer.tokens)]
    for row, (_, found) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        ids, numbers = found.token_ids[0], found.logprobs[0]
        torch.testing.assert_close(torch.tensor(numbers), expected[row][list(ids)], atol=1e-4, rtol=0)


def check_all(
    driver: AdapterDriver, tiny: TinyModel, batch: list[tuple[list[int], int]], adapters: dict[int, PeftAdapter]
) -> list[Answer]:
    answers = driver.generate(batch, COUNT)
    for (prompt, slot), answer in zip(batch, answers, strict=True):
        text = prompt + answer.tokens[:-1]
        check(answer, prompt, logits_of(tiny.oracle, text) if slot < 0 else adapters[slot].logits(text))
    return answers


@pytest.mark.one_in(7)
@pytest.mark.parametrize("backend", ["torch", *NATIVE])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_gets_what_peft_gives_each_request(family: str, backend: str, tmp_path: Path) -> None:
    """All linear layers; low ranks and odd ones, numbers by layer, and rank-stable scaling."""
    tiny = FAMILIES[family]()
    layer = LAYERS.get(family, "q_proj")
    adapters = {
        0: PeftAdapter(tiny, tmp_path / "0", 0, r=1, lora_alpha=2),
        2: PeftAdapter(tiny, tmp_path / "2", 2, r=20, use_rslora=True, lora_alpha=3, size=0.15),
        3: PeftAdapter(tiny, tmp_path / "3", 3, target_modules=[layer]),
        5: PeftAdapter(tiny, tmp_path / "5", 5, r=4, rank_pattern={layer: 7}, alpha_pattern={layer: 30}, size=0.15),
    }
    driver = AdapterDriver(tiny, backend)
    report = driver.load({slot: adapter.inspect(tiny) for slot, adapter in adapters.items()})
    assert sorted(report.loaded) == [0, 2, 3, 5] and not report.failed
    batch = list(zip(PROMPTS, [0, -1, 2, 3, -1, 5, 0]))
    check_all(driver, tiny, batch, adapters)


NAMES = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]
}
NAMES["gpt2"] = ["c_attn", "c_proj", "c_fc", "lm_head", "wte"]
NAMES["phi3"] = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
NAMES["gpt_neox"] = NAMES["falcon"] = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in NAMES.items() for name in names])
@pytest.mark.one_in(3)
def test_every_target_module_acts_alone(family: str, name: str, tmp_path: Path) -> None:
    tiny = FAMILIES[family]()
    adapters = {1: PeftAdapter(tiny, tmp_path / name, 1, target_modules=[name], r=3)}
    driver = AdapterDriver(tiny)
    assert driver.load({1: adapters[1].inspect(tiny)}).loaded == [1]
    answers = check_all(driver, tiny, [(PROMPTS[1], 1), (PROMPTS[1], -1)], adapters)
    assert answers[0].logprobs != answers[1].logprobs


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def test_a_gguf_adapter_acts_as_the_folder_that_it_was_converted_from(tmp_path: Path) -> None:
    tiny = FAMILIES["llama"]()
    layers = [name.rpartition(".")[2] for name in GGUF_NAMES]
    adapter = PeftAdapter(tiny, tmp_path / "folder", r=3, lora_alpha=8, target_modules=layers)
    heads = {"attn_q": tiny.config.num_heads, "attn_k": tiny.config.num_kv_heads}
    tensors = {}
    for name, tensor in load_file(adapter.folder / "adapter_model.safetensors").items():
        number, layer = name.removeprefix("base_model.model.model.layers.").split(".", 1)
        layer, matrix = layer.removesuffix(".weight").rsplit(".", 1)
        own = GGUF_NAMES[layer]
        if matrix == "lora_B" and own in heads:  # llama.cpp has the two coordinates of a rotation side by side
            tensor = tensor.reshape(heads[own], 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        tensors[f"blk.{number}.{own}.weight.{matrix.lower()}"] = np.ascontiguousarray(tensor)
    path = write_gguf(tmp_path / "adapter.gguf", tensors, alpha=8.0)
    driver = AdapterDriver(tiny)
    assert driver.load({0: inspect(path, tiny.source.shapes())}).loaded == [0]
    check_all(driver, tiny, [(PROMPTS[1], 0), (PROMPTS[3], -1)], {0: adapter})


@pytest.mark.parametrize("backend", NATIVE)
def test_numbers_do_not_depend_on_the_adapters_beside_them(backend: str, tmp_path: Path) -> None:
    """The model and eight adapters of all sizes in one batch, to the bit: each as it is alone, and as it is beside
    others."""
    tiny = FAMILIES["llama"]()
    adapters = {
        slot: PeftAdapter(tiny, tmp_path / str(slot), slot, r=rank, lora_alpha=rank, size=0.4 / rank**0.25)
        for slot, rank in enumerate((1, 2, 5, 16, 31, 64, 100, 256))
    }
    driver = AdapterDriver(tiny, backend, max_rank=256)
    assert len(driver.load({slot: adapter.inspect(tiny) for slot, adapter in adapters.items()}).loaded) == 8
    batch = list(zip(PROMPTS, [-1, *range(8)]))
    together = check_all(driver, tiny, batch, adapters)
    assert (driver.runner.recorded is not None and len(driver.runner.recorded) > 0) == (backend == "recorded")
    alone = [driver.generate([one], COUNT)[0] for one in batch]
    assert alone == together
    assert driver.generate(batch[::-1], COUNT) == together[::-1]
    plain = AdapterDriver(tiny, backend, num_slots=1)
    assert plain.generate(batch[:1], COUNT) == together[:1]


@pytest.mark.parametrize("family", ["llama", "llama, tied", "gpt2"])
@pytest.mark.parametrize("backend", ["torch", *NATIVE])
@pytest.mark.one_in(2)
def test_an_adapter_may_bring_its_own_embeddings_and_head(backend: str, family: str, tmp_path: Path) -> None:
    tiny = FAMILIES[family]()
    table = "wte" if family == "gpt2" else "embed_tokens"
    adapters = {
        0: PeftAdapter(tiny, tmp_path / "0", 0, modules_to_save=["lm_head"]),
        1: PeftAdapter(tiny, tmp_path / "1", 1, modules_to_save=[table]),
        2: PeftAdapter(tiny, tmp_path / "2", 2),
    }
    driver = AdapterDriver(tiny, backend)
    assert sorted(driver.load({slot: adapter.inspect(tiny) for slot, adapter in adapters.items()}).loaded) == [0, 1, 2]
    check_all(driver, tiny, list(zip(PROMPTS, [0, -1, 1, 2, 0, 1])), adapters)
    # The next adapter of a slot has none of what was there.
    adapters[0] = PeftAdapter(tiny, tmp_path / "3", 3, target_modules=["c_attn" if family == "gpt2" else "v_proj"])
    driver.load({0: adapters[0].inspect(tiny)})
    check_all(driver, tiny, list(zip(PROMPTS, [0, -1, 1])), adapters)


# ---- models with an encoder ----


def generate_with_encoder(
    runner: ModelRunner, asked: list[tuple[Source, list[int], int]], count: int
) -> list[list[LogprobsLists]]:
    """The log-probabilities of greedy tokens, of encoder inputs and prompts with their slots, all in one batch."""
    new, encoders, block = [], [], 1
    for index, (source, prompt, slot) in enumerate(asked):
        cross = list(range(block, block + -(-source.num_positions // 16)))
        block = cross[-1] + 1
        own = list(range(block, block + (len(prompt) + count) // 16 + 1))
        block = own[-1] + 1
        encoders.append(EncoderStep(f"r{index}", source.for_engine(), cross, adapter_slot=slot))
        new.append(
            NewRequestData(
                f"r{index}",
                prompt,
                len(prompt),
                WITH_LOGPROBS,
                0,
                (own,),
                0,
                cross_block_ids=cross,
                num_encoder_positions=source.num_positions,
                adapter_slot=slot,
            )
        )
    ids = [branch.req_id for branch in new]
    counts = {branch.req_id: len(branch.token_ids) for branch in new}
    plan = SchedulerOutput(
        scheduled_new_reqs=new, encoder_steps=encoders, num_scheduled_tokens=counts, sampled_req_ids=ids,
        total_num_scheduled_tokens=sum(counts.values()),
    )  # fmt: skip
    found: list[list[LogprobsLists]] = [[] for _ in ids]
    for step in range(count):
        runner.execute_model(plan)
        output = runner.sample_tokens()
        assert isinstance(output, ModelRunnerOutput) and not output.errors
        for req_id, of_request in zip(ids, found):
            of_request.append(output.logprobs[req_id])
        known = CachedRequestData(ids, [len(branch.token_ids) + step for branch in new], [None] * len(ids))
        plan = SchedulerOutput(
            scheduled_cached_reqs=known, num_scheduled_tokens=dict.fromkeys(ids, 1), sampled_req_ids=ids,
            total_num_scheduled_tokens=len(ids),
        )  # fmt: skip
    return found


@pytest.mark.parametrize("family", ENCODER_FAMILIES)
@pytest.mark.one_in(5)
def test_encoders_and_decoders_are_adapted_together(family: str, tmp_path: Path) -> None:
    """All linear layers of both sides: encoder states, and keys and values of cross-attention, are the adapter's."""
    tiny = tiny_encoder_model(family)
    adapters = {slot: PeftAdapter(tiny, tmp_path / str(slot), slot, size=0.1) for slot in range(2)}
    core = build_core(tiny, adapters=AdapterConfig(enable_lora=True, max_loras=2))
    runner = core.executor._worker.runner  # type: ignore[attr-defined]
    try:
        report = load_into(runner, {slot: adapter.inspect(tiny) for slot, adapter in adapters.items()})
        assert sorted(report.loaded) == [0, 1] and not report.failed
        sources = [source_of(family, length) for length in (7, 20, 7, 3)]
        asked = [(source, decoder_prompt(2 + i), slot) for i, (source, slot) in enumerate(zip(sources, (0, -1, 1, 0)))]
        found = generate_with_encoder(runner, asked, 3)
    finally:
        core.shutdown()
    for (source, prompt, slot), rows in zip(asked, found, strict=True):
        text = prompt + [row.token_ids[0][0] for row in rows[:-1]]
        key = "input_features" if family == "whisper" else "input_ids"
        inputs = {key: source.for_oracle()}
        logits = logits_of(tiny.oracle, text, **inputs) if slot < 0 else adapters[slot].logits(text, **inputs)
        expected = logits.log_softmax(-1)[len(prompt) - 1 :]
        for row, oracle_row in zip(rows, expected, strict=True):
            numbers = torch.tensor(row.logprobs[0])
            torch.testing.assert_close(numbers, oracle_row[list(row.token_ids[0])], atol=1e-4, rtol=0)


# ---- quantised weights, and the other kinds of rows ----


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("backend", NATIVE)
@pytest.mark.one_in(3)
def test_adapters_act_beside_quantised_weights(backend: str, bits: int, tmp_path: Path) -> None:
    """Base rows have the bits of a batch without adapters, adapted ones the same in any batch. What an adapter changes
    is what it changes in float32, but for the rounding of the weights."""
    tiny = FAMILIES["llama"]()
    adapters = {slot: PeftAdapter(tiny, tmp_path / str(slot), slot, r=5) for slot in (0, 3)}
    driver = AdapterDriver(tiny, backend, ops=NativeOps(bits=bits))
    base = [driver.generate([(prompt, -1)], COUNT)[0] for prompt in PROMPTS[:4]]
    driver.load({slot: adapter.inspect(tiny) for slot, adapter in adapters.items()})
    batch = list(zip(PROMPTS[:4], [-1, 0, -1, 3]))
    mixed = driver.generate(batch, COUNT)
    assert [mixed[0], mixed[2]] == [base[0], base[2]] and mixed[1] != base[1] and mixed[3] != base[3]
    assert [driver.generate([one], COUNT)[0] for one in batch] == mixed
    for (prompt, slot), answer, plain in [(batch[1], mixed[1], base[1]), (batch[3], mixed[3], base[3])]:
        ids = list(answer.logprobs[0].token_ids[0])
        adapted, alone = (
            logits.log_softmax(-1)[-1][ids]
            for logits in (adapters[slot].logits(prompt), logits_of(tiny.oracle, prompt))
        )
        found = torch.tensor(answer.logprobs[0].logprobs[0])
        assert (found - adapted).abs().max() < 0.5 * (adapted - alone).abs().max()
        assert plain.logprobs != answer.logprobs


@pytest.mark.parametrize("backend", ["torch", *NATIVE])
def test_prompt_logprobs_captures_and_beams_are_those_of_the_adapter(backend: str, tmp_path: Path) -> None:
    tiny = FAMILIES["llama"]()
    adapter = PeftAdapter(tiny, tmp_path / "one", 1, modules_to_save=["lm_head"])
    driver = AdapterDriver(tiny, backend)
    driver.load({2: adapter.inspect(tiny)})
    prompt = PROMPTS[1]
    expected = adapter.logits(prompt).log_softmax(-1)
    asked = replace(
        driver.new("a", prompt, 1, params=SamplingParams(temperature=0.0, prompt_logprobs=2)), adapter_slot=2
    )
    search = replace(driver.new("s", prompt, 11, params=BeamSearchParams(beam_width=2, max_tokens=4)), adapter_slot=2)
    tables = (list(range(21, 24)),)
    spans = [(0, len(prompt), True)]
    capture = CaptureStep("x", prompt, spans, tables, [len(prompt) - 1], [tiny.config.num_layers + 1], "float32")
    counts = {"a": len(prompt), "s": len(prompt)}
    output = driver.step(
        new=[asked, search], captures=[replace(capture, adapter_slot=2)], counts=counts, sampled=["a"],
        beam_steps=[BeamStep("s", num_candidates=4, scores=[0.0])], total_num_scheduled_tokens=3 * len(prompt),
    )  # fmt: skip
    own = [row[0] for row in output.prompt_logprobs["a"].rows.logprobs]
    assert own == pytest.approx([float(expected[i, prompt[i + 1]]) for i in range(len(prompt) - 1)], abs=1e-4)
    with torch.inference_mode():
        states = adapter.model.get_base_model().model(torch.tensor([prompt])).last_hidden_state[0, -1]
    found = np.frombuffer(output.hidden_states["x"].data, np.float32)
    np.testing.assert_allclose(found, states.numpy(), atol=2e-4)
    best = expected[-1].topk(4)
    candidates = output.candidates["s"]
    assert candidates.token_ids[:4] == best.indices.tolist()
    # Beams are rows of their own, with the slot of their trunk.
    tokens = best.indices.tolist()[:2]
    step = BeamStep(
        "s", 1, len(prompt), parents=[0, 0], token_ids=tokens, first_columns=[1], block_ids=([12, 31],),
        num_candidates=4, scores=[0.0, 0.0],
    )  # fmt: skip
    copies = [BlockCopy("s", 0, 1, 12, 31)]
    output = driver.step(beam_steps=[step], total_num_scheduled_tokens=2, block_copies=copies)
    of_beams = torch.stack([adapter.logits([*prompt, token]).log_softmax(-1)[-1] for token in tokens])
    expected_best = of_beams.flatten().topk(4)
    candidates = output.candidates["s"]
    assert list(candidates.scores[:4]) == pytest.approx(expected_best.values.tolist(), abs=1e-4)
