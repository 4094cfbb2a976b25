"""Command-line options that several commands share, and what they turn into: an LLM, params.

Only argparse is imported here at the top: `ratoon --help` must not wait for anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ratoon.api.beam_options import (
    RULES,
    add_beam_options,
    beam_search_params,
    check_beam_options,
    given_options,
    leaves_search_open,
    wants_beam_search,
)

if TYPE_CHECKING:
    from ratoon.api.llm import LLM
    from ratoon.core.params import GenerationParams

Subparsers = Any  # argparse has no public name for what add_subparsers returns

# Option → keyword of LLM. Those left out on the command line are left to the LLM's own defaults.
ENGINE_OPTIONS = (
    "device", "dtype", "max_model_len", "block_size", "num_blocks", "kv_memory", "swap_memory",
    "max_num_batched_tokens", "max_num_encoder_tokens", "max_num_seqs", "policy", "num_threads", "attention_backend",
    "load_format", "lease_fraction", "max_lease_seconds",
    "hf_overrides", "rope_scaling", "gpu_memory_utilization", "tensor_parallel_size", "pipeline_parallel_size",
    "swap_space", "scheduling_policy", "kv_cache_memory_bytes", "num_gpu_blocks_override", "kv_cache_dtype",
    "quantization", "tokenizer", "revision", "enable_prefix_caching", "enable_chunked_prefill",
    "max_hidden_states_bytes", "max_roots", "executor",
)  # fmt: skip
SAMPLING_OPTIONS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "n", "logprobs", "ignore_eos", *RULES,
)  # fmt: skip


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show tracebacks (also: RATOON_DEBUG=1)")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--device", metavar="NAME", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--dtype", metavar="NAME", help="auto, float32, bfloat16 or float16")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest sequence, prompt and answer together")
    group.add_argument(
        "--rope-scaling", metavar="JSON", help='stretch positions: \'{"rope_type": "yarn", "factor": 4.0}\''
    )
    group.add_argument("--hf-overrides", metavar="JSON", help="an object in the place of what config.json says")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens in a block of the KV cache")
    group.add_argument("--num-blocks", type=int, metavar="N", help="blocks in the KV cache")
    group.add_argument("--kv-memory", metavar="SIZE", help="memory for the KV cache, such as 512MiB or 2GiB")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="token budget of a step")
    group.add_argument(
        "--swap-memory", metavar="SIZE", help="host memory for what requests hold that must give way; 0: none"
    )
    group.add_argument("--max-num-encoder-tokens", type=int, metavar="N", help="budget of a step for encoder inputs")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in a step")
    group.add_argument("--policy", metavar="NAME", help="fcfs or priority")
    group.add_argument("--no-prefix-caching", action="store_true", help="compute shared prefixes again")
    group.add_argument("--lease-fraction", type=float, metavar="X", help="of the KV cache for continuations, at most")
    group.add_argument("--max-lease-seconds", type=float, metavar="X", help="the longest that a request may ask for")
    group.add_argument("--max-roots", type=int, metavar="N", help="ended requests that can be continued; default 1024")
    group.add_argument("--threads", type=int, metavar="N", dest="num_threads", help="CPU threads")
    group.add_argument("--attention-backend", metavar="NAME", help="auto, or a backend's name")
    group.add_argument("--load-format", metavar="NAME", help="auto, or dummy: random weights of the right shape")
    group.add_argument(
        "--max-hidden-states-bytes", metavar="SIZE", help="the most hidden states that a request may ask for"
    )
    group.add_argument("--executor", metavar="NAME", help='uniproc, or another one as "module:Class"')
    add_vllm_options(parser)


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Options of `vllm serve` that mean the same here. Those whose other values would not are refused with them."""
    group = parser.add_argument_group("vLLM's names, for command lines that come from there")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="X", help="of a GPU, for weights and KV cache")
    group.add_argument("--kv-cache-memory-bytes", metavar="SIZE", help="--kv-memory")
    group.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="--num-blocks")
    group.add_argument("--swap-space", type=float, metavar="GIB", help="--swap-memory in GiB")
    group.add_argument("--scheduling-policy", metavar="NAME", help="--policy")
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help="on by default")
    group.add_argument("--enable-chunked-prefill", action=argparse.BooleanOptionalAction, help="on by default")
    group.add_argument("--tensor-parallel-size", "-tp", type=int, metavar="1", help="others are refused")
    group.add_argument("--pipeline-parallel-size", "-pp", type=int, metavar="1", help="others are refused")
    group.add_argument("--kv-cache-dtype", metavar="auto", help="others are refused")
    group.add_argument("--quantization", "-q", metavar="gguf", help="others are refused")
    group.add_argument("--tokenizer", metavar="MODEL", help="another than the model's is refused")
    group.add_argument("--revision", metavar="NAME", help="refused: the newest is used")
    for name in ("--enforce-eager", "--trust-remote-code"):
        group.add_argument(name, action="store_true", help="changes nothing")


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help=f"default: the model's own, else {max_tokens}")
    parser.set_defaults(usual_max_tokens=max_tokens)
    group.add_argument("--min-tokens", type=int, metavar="N")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0 takes the likeliest token; default: the model's own, else 0 (with --url: the server's)",
    )
    group.add_argument("--top-p", type=float, metavar="X", help="sample from the likeliest tokens that sum up to X")
    group.add_argument("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens")
    group.add_argument("--min-p", type=float, metavar="X", help="drop tokens below X times the likeliest one")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--no-repeat-ngram-size", type=int, metavar="N", help="no run of N tokens comes twice")
    group.add_argument(
        "--encoder-no-repeat-ngram-size",
        type=int,
        metavar="N",
        help="no run of N tokens of the encoder's input comes (without an encoder: of the prompt)",
    )
    group.add_argument(
        "--forced-eos-token-id", type=int, metavar="ID", help="the last token of an answer that --max-tokens ends"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on behind the model's end token")


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """For commands that answer prompts, wherever the model runs: the form of the answers, and how they are sampled."""
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    parser.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, help="print the answer as it comes (one prompt, one choice)"
    )
    add_sampling_options(parser, max_tokens=256)
    add_beam_options(parser)
    parser.add_argument("-n", "--n", type=int, metavar="N", help="choices for each prompt")
    parser.add_argument(
        "--logprobs", type=int, metavar="N", help="log-probabilities of the N likeliest tokens (--json)"
    )


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords for LLM, of what was given."""
    settings = {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name, None) is not None}
    if args.no_prefix_caching:
        settings["enable_prefix_caching"] = False
    return settings


def check_generation_options(args: argparse.Namespace) -> None:
    """RequestError for what no model can make sense of, before anyone waits for the model to load."""
    from ratoon.core.params import SamplingParams

    check_beam_options(args)
    if not wants_beam_search(args):
        SamplingParams(**_given_sampling_options(args)).verify()


def generation_params(args: argparse.Namespace, llm: LLM, may_search: bool = True) -> GenerationParams:
    """The model's own defaults, over them what was given. A search that was asked for has no defaults of the model's;
    one that the model's files ask for is done where nothing is said against it, and where `may_search`."""
    from ratoon.engine.default_params import sets_length, with_given

    if wants_beam_search(args):
        return beam_search_params(args)
    given = _given_sampling_options(args)
    if args.max_tokens is None and sets_length(llm.source.generation_defaults):
        del given["max_tokens"]
    search = llm.get_default_beam_search_params()
    if search is not None and may_search and leaves_search_open(args):
        of_search = {name: value for name, value in given.items() if name in search.__struct_fields__}
        return with_given(search, of_search)
    # Plain sampling at temperature 1 suits few models; one that names no temperature is asked for its likeliest answer.
    if "temperature" not in llm.source.generation_defaults:
        given.setdefault("temperature", 0.0)
    return with_given(llm.get_default_sampling_params(), given)


def _given_sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    return given_options(args, SAMPLING_OPTIONS)


@contextmanager
def open_llm(args: argparse.Namespace, **settings: Any) -> Iterator[LLM]:
    """The LLM that the command line asks for. While it loads, a terminal shows so."""
    with status(f"loading {args.model}"):
        from ratoon.api.llm import LLM

        # Without --seed, sampling differs from run to run, as people expect of a command.
        llm = LLM(args.model, **{"seed": None, **engine_settings(args), **settings})
    with llm:
        yield llm


@contextmanager
def status(text: str) -> Iterator[None]:
    """A spinner on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    from ratoon.observe.logging import live_display

    with live_display(), Console(stderr=True).status(text):
        yield
