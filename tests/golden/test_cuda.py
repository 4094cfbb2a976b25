"""The same engine on a CUDA device gives the greedy tokens of the CPU, in fp32. Runs where there is such a device."""

import sys

import msgspec
import numpy as np
import pytest
import torch

from ratoon import LLM, BeamSearchParams, SamplingParams
from ratoon.core.config import CacheConfig, EngineConfig, SchedulerConfig
from ratoon.core.errors import ModelError
from ratoon.core.request import EngineCoreRequest, Extraction
from ratoon.distributed.uniproc import UniProcExecutor
from ratoon.engine.core import EngineCore
from ratoon.execution import worker
from ratoon.observe.startup import StartupTimer
from tests.golden import encoder_engines, tiny_latent_models, tiny_mixtures, tiny_models
from tests.golden.draft_heads import random_head
from tests.golden.engines import engine_of_folder, model_folder, scheduler_of, tiny_model
from tests.golden.every_kind import PROMPTS, answers
from tests.golden.grammar_engines import forced_texts, grammar_engine, grammar_folder
from tests.golden.image_readers import IMAGE_FAMILIES, PLACEHOLDERS, image_reader, num_encoder_runs, picture
from tests.golden.nodes import beat_fast, running_node
from tests.golden.peft_oracle import PeftAdapter, logits_of
from tests.golden.test_model_logits import FAMILIES as DECODERS
from tests.golden.tiny_models import random_token_ids
from tests.golden.tiny_states import tiny_granite_hybrid, tiny_mamba2
from tests.ports import free_port

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

FAMILIES = [
    tiny_models.tiny_llama,
    tiny_models.tiny_mistral,
    tiny_models.tiny_qwen2,
    tiny_models.tiny_qwen3,
    tiny_models.tiny_gpt2,
]
# Those of the CPU's golden tests; what these compare with transformers is compared with the CPU here.
FURTHER_FAMILIES = {name: make for name, make in DECODERS.items() if make not in FAMILIES} | {
    "mixtral": tiny_mixtures.tiny_mixtral,
    "qwen2 moe": tiny_mixtures.tiny_qwen2_moe,
    "qwen3 moe": tiny_mixtures.tiny_qwen3_moe,
    "olmoe": tiny_mixtures.tiny_olmoe,
    "glm4 moe": tiny_mixtures.tiny_glm4_moe,
    "gpt-oss": tiny_mixtures.tiny_gpt_oss,
    "deepseek v2": tiny_latent_models.tiny_deepseek_v2,
    "deepseek v3": tiny_latent_models.tiny_deepseek_v3,
}
WITH_STATES = [tiny_mamba2, tiny_granite_hybrid]
LENGTHS = [1, 5, 16, 33, 40, 61]
WIDE = "qwen3 untied with heads that the native kernels take"  # layers of whole tiles of outputs


def core_of(tiny, device, **cache):
    config = EngineConfig(
        model="tiny",
        device=device,
        dtype="float32",
        max_model_len=96,
        cache=CacheConfig(num_blocks=200, **cache),
        scheduler=SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=32),
    )
    return EngineCore(config, UniProcExecutor(config, tiny.config, tiny.source, StartupTimer()))


def greedy(tiny, device, **cache):
    return greedy_tokens(core_of(tiny, device, **cache))


def greedy_tokens(core):
    for index, length in enumerate(LENGTHS):
        params = SamplingParams(temperature=0.0, max_tokens=24, n=1 + index % 2)
        core.add_request(EngineCoreRequest(str(index), random_token_ids(length, seed=index), params))
    tokens = {}
    while core.has_work():
        for output in core.step().outputs:
            assert output.error is None, output.error
            tokens.setdefault((output.request_id, output.choice), []).extend(output.new_token_ids)
    core.scheduler.check()
    return tokens


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_a_batch_on_cuda_gives_the_tokens_of_the_cpu(make):
    tiny = make()
    assert greedy(tiny, "cuda") == greedy(tiny, "cpu")


@pytest.mark.parametrize("family", FURTHER_FAMILIES)
def test_every_family_gives_the_tokens_and_hidden_states_of_the_cpu(family):
    tiny = FURTHER_FAMILIES[family]()
    assert greedy(tiny, "cuda") == greedy(tiny, "cpu")
    on_cuda, on_cpu = states(tiny, "cuda"), states(tiny, "cpu")
    for name in on_cpu:
        torch.testing.assert_close(on_cuda[name], on_cpu[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", WITH_STATES, ids=lambda make: make.__name__)
def test_a_model_with_states_on_cuda_gives_the_tokens_of_the_cpu_and_is_captured_in_graphs(make):
    tiny = make()
    core = core_of(tiny, "cuda", state_interval=16)
    assert greedy_tokens(core) == greedy(tiny, "cpu", state_interval=16)
    graphs = core.executor.stats.graphs
    assert graphs is not None and graphs.num_graphs > 0


def searches(tiny, device):
    """Beam searches of several widths beside sampled requests, and one that continues what was leased."""
    core = core_of(tiny, device)
    for index, length in enumerate(LENGTHS):
        sampled = SamplingParams(temperature=0.0, max_tokens=12, n=1 + index)
        params = BeamSearchParams(beam_width=2 + index, n=1 + index, max_tokens=12) if index % 2 else sampled
        request = EngineCoreRequest(str(index), random_token_ids(length, seed=index), params)
        core.add_request(msgspec.structs.replace(request, retain_kv=60.0))
    texts = run_to_the_end(core)
    for parent in ("2", "3#1"):  # a sampled one, and a beam's text
        request_id, _, choice = parent.partition("#")
        tokens = random_token_ids(LENGTHS[int(request_id)], seed=int(request_id)) + texts[request_id, int(choice or 0)]
        beams = BeamSearchParams(beam_width=4, n=4, max_tokens=3)
        child = EngineCoreRequest(f"after {parent}", [*tokens, 7, 8], beams)
        core.add_request(msgspec.structs.replace(child, continuation_of=parent, continuation_token_ids=[7, 8]))
    return texts | run_to_the_end(core)


def run_to_the_end(core):
    texts = {}
    while core.has_work():
        for output in core.step().outputs:
            assert output.error is None, output.error
            key = (output.request_id, output.choice)
            texts[key] = output.new_token_ids if output.replaces else texts.get(key, []) + output.new_token_ids
    core.scheduler.check()
    return texts


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_beam_searches_and_continuations_on_cuda_find_the_texts_of_the_cpu(make):
    tiny = make()
    assert searches(tiny, "cuda") == searches(tiny, "cpu")


def states(tiny, device):
    """All layers at all tokens of a prompt, and at some of a request that has ended, beside others that generate."""
    core = core_of(tiny, device)
    tokens = random_token_ids(33, seed=1)
    leased = EngineCoreRequest("leased", tokens, SamplingParams(temperature=0.0, max_tokens=9), retain_kv=60.0)
    core.add_request(leased)
    tokens = tokens + run_to_the_end(core)["leased", 0]
    layers = list(range(tiny.config.num_layers + 2))
    core.add_request(EngineCoreRequest("beside", random_token_ids(20, seed=2), SamplingParams(max_tokens=9, seed=0)))
    for name, parent, positions in (("prompt", None, range(40)), ("root", "leased", [0, 7, 8, 41])):
        request = EngineCoreRequest(name, tokens[: positions[-1] + 1], Extraction(list(positions), layers))
        request.continuation_of = parent
        core.add_request(request)
    parts = {"prompt": [], "root": []}
    while core.has_work():
        for output in core.step().outputs:
            assert output.error is None, output.error
            if output.hidden_states is not None:
                part = torch.frombuffer(bytearray(output.hidden_states.data), dtype=torch.float32)
                parts[output.request_id].append(part.view(output.hidden_states.shape))
    core.scheduler.check()
    return {name: torch.cat(found, dim=1) for name, found in parts.items()}


@pytest.mark.parametrize("make", [*FAMILIES, *WITH_STATES], ids=lambda make: make.__name__)
def test_hidden_states_on_cuda_are_those_of_the_cpu(make):
    tiny = make()
    on_cuda, on_cpu = states(tiny, "cuda"), states(tiny, "cpu")
    assert on_cuda.keys() == on_cpu.keys()
    for name in on_cpu:
        torch.testing.assert_close(on_cuda[name], on_cpu[name], atol=1e-4, rtol=1e-4)


def texts_over_encoders(family, device, num_blocks, **cache):
    """Several encoder inputs, one of them twice, sampled from and searched with beams. Also whether anything was
    swapped."""
    tiny = encoder_engines.tiny_model(family)
    config = EngineConfig(
        model="tiny",
        device=device,
        dtype="float32",
        cache=CacheConfig(num_blocks=num_blocks, **cache),
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=8, max_num_encoder_tokens=40),
    )
    core = EngineCore(config, UniProcExecutor(config, tiny.config, tiny.source, StartupTimer()))
    for index, length in enumerate((3, 33, 17, 33, 30)):
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        if index == 4:
            params = BeamSearchParams(beam_width=3, n=2, max_tokens=10, ignore_eos=True)
        request = EngineCoreRequest(
            str(index),
            encoder_engines.decoder_prompt(2 + 9 * index),
            params,
            encoder_input=encoder_engines.source_of(family, length).for_engine(),
        )
        core.add_request(request)
    swapped = []
    schedule = core.scheduler.schedule

    def watch():
        plan = schedule()
        swapped.extend(plan.loads)
        return plan

    core.scheduler.schedule = watch
    return run_to_the_end(core), bool(swapped)


@pytest.mark.long
@pytest.mark.parametrize("family", encoder_engines.FAMILIES)
def test_encoder_decoder_models_on_cuda_give_the_texts_of_the_cpu(family):
    on_cpu, _ = texts_over_encoders(family, "cpu", 100)
    assert texts_over_encoders(family, "cuda", 100)[0] == on_cpu
    on_cuda, swapped = texts_over_encoders(family, "cuda", 13, swap_bytes=2**22)
    assert on_cuda == on_cpu
    assert swapped, "there was memory enough: this tests nothing"


def answers_about_pictures(family, device):
    """The greedy tokens behind prompts of which some are computed in several steps, and the encoder's runs: two
    pictures, one of them with two choices, text alone, a continuation with a picture of its own, and a video where its
    frames are one input."""
    reader, settings = image_reader(family), {"device": device, "dtype": "float32", "quantization": "none"}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    several = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, n=2)
    text = "is it in {0} or in {0}?".format(PLACEHOLDERS[family])
    two = {"prompt": text, "multi_modal_data": {"image": [picture(0), picture(1)]}}
    prompts, wanted = [two, reader.prompt(1), {"prompt": "what is it"}], [params, several, params]
    if family == "qwen2_5_vl":
        frames = np.stack([np.asarray(picture(number).resize((48, 24))) for number in (0, 2, 0, 2)])
        small = {"min_pixels": 64, "max_pixels": 512}
        video = {"video": (frames, {"fps": 0.5})}
        prompts.append({"prompt": "a<video>what", "multi_modal_data": video, "mm_processor_kwargs": small})
        wanted.append(params)
    with engine_of_folder(
        reader.folder, skip_tokenizer=False, num_blocks=200, max_num_batched_tokens=32, max_num_seqs=8, **settings
    ) as llm:
        outputs = llm.generate(prompts, wanted, retain_kv=60, progress=False)
        assert len(outputs[0].prompt_token_ids) > 32, "one step computes all of it"
        outputs.append(llm.generate_continuation(outputs[0], reader.prompt(2, "and", "here"), several))
        assert [output.error for output in outputs] == [None] * len(outputs)
        scheduler_of(llm).leases.end_all()
        return [[list(one.token_ids) for one in output.outputs] for output in outputs], num_encoder_runs(llm)


@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_pictures_on_cuda_give_the_tokens_of_the_cpu(family):
    found, right = answers_about_pictures(family, "cuda"), answers_about_pictures(family, "cpu")
    assert found == right
    assert len({tuple(tokens) for choices in found[0] for tokens in choices}) >= 4, "answers depend on the picture"


def test_smollm2_on_cuda_gives_the_tokens_of_the_cpu():
    prompts = ["The sea is", "Once upon a time", "def fibonacci(n):", "Water boils at a temperature of", "1, 2, 3, 4,"]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    settings = {"dtype": "float32", "quantization": "none", "max_model_len": 512, "num_blocks": 400}
    results = []
    try:
        for device in ("cpu", "cuda"):  # by default a CPU multiplies by the weights as they are stored
            with LLM("smollm2-135m", device=device, **settings) as llm:
                results.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    except ModelError as error:
        pytest.skip(str(error))
    assert results[0] == results[1]


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "calls"])
@pytest.mark.parametrize("others", [False, True], ids=["masks alone", "other rules"])
def test_text_without_a_choice_is_told_at_once_and_changes_no_token(others, cuda_graphs, monkeypatch):
    """Against an engine that looks for such text too, and samples its tokens one by one."""
    open_library = worker.open_grammar_library

    def open_and_prepare(*arguments):
        library = open_library(*arguments)
        library.finds_forced_text = True
        library.prepare()
        return library

    monkeypatch.setattr(worker, "open_grammar_library", open_and_prepare)
    settings = {"others": others, "device": "cuda", "dtype": "float32", "cuda_graphs": cuda_graphs}
    expected = forced_texts(jump_forward=False, **settings)
    assert expected.num_known == 0
    for in_flight in (1, 2, 3):
        found = forced_texts(jump_forward=True, max_steps_in_flight=in_flight, **settings)
        assert found.answers == expected.answers
        if not others:  # else a request without a grammar decides the number of steps, and masks that come late
            assert found.num_steps < expected.num_steps
        assert (found.num_known > 0) == (in_flight > 1)


def without_waiting(function):
    """The function, which raises if it waits for the device. For methods of one runner, once it is built: while weights
    are loaded, another thread runs steps of a runner without memory, and the mode is that of the process."""

    def run(*arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return function(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


def test_launching_a_step_waits_for_nothing_on_the_device(monkeypatch):
    """The scheduler's next move may overlap with the device: `execute_model` must not contain a hidden wait."""
    core = core_of(tiny_models.tiny_qwen2(), "cuda")
    runner = core.executor._worker.runner
    monkeypatch.setattr(runner, "execute_model", without_waiting(runner.execute_model))
    assert greedy_tokens(core)


@pytest.mark.parametrize(("max_loras", "max_lora_rank"), [(3, 8), (8, 64)], ids=["joined", "apart"])
def test_requests_with_adapters_get_what_peft_gives_each(max_loras, max_lora_rank, tmp_path, monkeypatch):
    from ratoon.layers.triton.joined import TritonJoined

    calls, add = [], TritonJoined._add
    monkeypatch.setattr(TritonJoined, "_add", lambda *args: calls.append(1) or add(*args))
    tiny = tiny_model(WIDE)
    adapters = {name: PeftAdapter(tiny, tmp_path / name, seed=seed) for seed, name in enumerate("abcd")}
    names = [None, "a", "b", "c", "d", "a", None, "c"]
    prompts = [random_token_ids(5 + 7 * index, seed=index) for index in range(len(names))]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    settings = {"device": "cuda", "dtype": "float32", "num_blocks": 200, "max_lora_rank": max_lora_rank}
    folders = {name: str(adapter.folder) for name, adapter in adapters.items()}
    with LLM(str(model_folder(WIDE)), adapters=folders, max_loras=max_loras, **settings) as llm:
        texts = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(texts, params, adapter=names, progress=False)
    assert bool(calls) == (max_lora_rank == 8)
    for name, prompt, output in zip(names, prompts, outputs):
        tokens = list(prompt)
        for _ in range(8):
            logits = logits_of(tiny.oracle, tokens) if name is None else adapters[name].logits(tokens)
            tokens.append(int(logits[-1].argmax()))
        assert list(output.outputs[0].token_ids) == tokens[len(prompt) :], name


LLAMA = "llama with grouped heads"
DRAFTS = {"speculate_ngram_min": 1, "speculate_tokens": 4, "speculate_max_seqs": 64, "speculate_min_acceptance": 0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["true", "abc"]}}}


def source_of_drafts(kind, folder):
    if kind == "model":
        return f"draft:{grammar_folder(WIDE)}"
    return f"head:{random_head('eagle3', tiny_model(LLAMA).config).save(folder)}" if kind == "head" else kind


def answers_of_every_kind(device, adapter, **settings):
    """Answers requests with and without an adapter at once: greedy and drawn ones, log-probabilities, and a grammar.
    Returns also how many drafts were checked, and how many of them kept."""
    asked = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=5, seed=4, n=2, max_tokens=30, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.8, seed=5, max_tokens=30, structured_output={"json_schema": SCHEMA}),
        SamplingParams(temperature=0.8, seed=6, frequency_penalty=0.5, max_tokens=30, ignore_eos=True),
    ]
    prompts = [{"prompt_token_ids": [*range(20, 30), *range(20, 24 + index)]} for index in range(len(asked))]
    names = [None] * len(asked) + ["a"] * len(asked)
    settings = {"device": device, "dtype": "float32", "batch_invariant": True, "max_lora_rank": 8, **settings}
    with grammar_engine(LLAMA, adapters={"a": str(adapter)}, **settings) as llm:
        outputs = llm.generate(prompts * 2, asked * 2, adapter=names, progress=False)
        stats = llm.stats().drafts.values()
    answers = [
        (one.token_ids, one.finish_reason, one.cumulative_logprob, one.logprobs)
        for output in outputs
        for one in output.outputs
    ]
    return answers, sum(one.draft_tokens for one in stats), sum(one.accepted_tokens for one in stats)


def check_that_drafts_change_nothing(device, kind, folder):
    adapter = PeftAdapter(tiny_model(LLAMA), folder / "adapter").folder
    source = source_of_drafts(kind, folder / "head")
    expected, num_drafts, _ = answers_of_every_kind(device, adapter)
    assert num_drafts == 0
    for depth in (1, 2, 3):
        settings = {**DRAFTS, "speculate": source, "max_steps_in_flight": depth}
        answers, num_drafts, num_accepted = answers_of_every_kind(device, adapter, **settings)
        assert answers == expected, f"with {depth} steps in flight"
        assert num_drafts > num_accepted, "drafts of random models are mostly wrong"


@pytest.mark.parametrize("kind", ["ngram", "model", "head"])
def test_drafts_change_no_bit_of_an_answer_with_batch_invariant(kind, tmp_path):
    check_that_drafts_change_nothing("cuda", kind, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="workers in processes need Linux")
@pytest.mark.parametrize("ranks", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_two_hosts_with_a_rank_each_on_one_gpu_give_the_tokens_of_one_worker(ranks, monkeypatch):
    """Rows and sums go by the connections between hosts, not by NCCL, which would refuse two ranks on one GPU."""
    beat_fast(monkeypatch, silence=30.0)
    folder, port = model_folder(WIDE), free_port()
    settings = {"device": "cuda", "dtype": "float32", "skip_tokenizer": True, "max_num_seqs": 8, "num_blocks": 96}
    with LLM(str(folder), **settings) as llm:
        right = answers(llm, PROMPTS)
    with (
        running_node(folder, port, device="cuda"),
        LLM(str(folder), master_port=port, nnodes=2, **{ranks: 2}, **settings) as llm,
    ):
        assert answers(llm, PROMPTS) == right
