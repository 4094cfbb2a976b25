"""Command-line options that several commands share, and what they turn into: an LLM, params. Errors name the option
that was typed: `--json-schema`, not `structured_output.json_schema`.

Only light modules are imported at the top: `ratoon --help` must be fast.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ratoon.api.adapter_options import settings_for_adapter
from ratoon.api.beam_options import (
    TOKEN_RULES,
    add_beam_options,
    beam_search_params,
    check_beam_options,
    given_options,
    leaves_search_open,
    wants_beam_search,
)
from ratoon.api.parser import leave_out, show_everyday
from ratoon.api.structured_options import add_structured_options, fields_of_option, structured_output
from ratoon.core.errors import ConfigError, RequestError
from ratoon.core.setting import Setting
from ratoon.core.settings import ENGINE_SETTINGS, FRONT_END_SETTINGS
from ratoon.core.sizes import format_size
from ratoon.core.vllm_names import NEGATED, NO_EFFECT, RENAMED, RULES, SPECIAL

if TYPE_CHECKING:
    from ratoon.api.llm import LLM
    from ratoon.core.params import GenerationParams

Subparsers = Any  # argparse has no public name for what add_subparsers returns

KINDS: dict[type, tuple[type, str]] = {int: (int, "N"), float: (float, "X"), dict: (str, "JSON")}
# Front-end settings of every command that starts an engine; the others are for `serve`.
OBSERVED_SETTINGS = tuple(
    setting
    for setting in FRONT_END_SETTINGS
    if setting.name in ("otlp_traces_endpoint", "max_total_hidden_states_bytes")
)
# Those that `--help` shows, with a short description.
EVERYDAY_SETTINGS = {
    "device": "auto, cpu, cuda or cuda:N",
    "dtype": "auto, float32, bfloat16 or float16",
    "quantization": "bits of weights: auto, none, int8, int4 or fp8",
    "max_model_len": "longest sequence, prompt and answer",
    "num_threads": "CPU threads",
    "kv_memory": "memory for the KV cache, such as 2GiB",
    "speculate": "drafts of next tokens: ngram, roots, … or off",
}
SAMPLING_OPTIONS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "stop", "n", "logprobs",
    "ignore_eos", *TOKEN_RULES,
)  # fmt: skip


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show tracebacks (also: RATOON_DEBUG=1)")


def add_engine_options(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Every setting of the engine. `without`: vLLM's names that mean something else to this command."""
    group = parser.add_argument_group("engine")
    for setting in (*ENGINE_SETTINGS, *OBSERVED_SETTINGS):
        action = add_setting_option(group, setting)
        if setting.name in EVERYDAY_SETTINGS:
            show_everyday(action, EVERYDAY_SETTINGS[setting.name])
    leave_out(group)
    add_vllm_options(parser, without)


def add_setting_options(group: argparse._ArgumentGroup, settings: Iterable[Setting]) -> None:
    """An option for each. Those that are not given are None, which leaves a setting to its default."""
    for setting in settings:
        add_setting_option(group, setting)


def add_setting_option(group: argparse._ArgumentGroup, setting: Setting, **how: Any) -> argparse.Action:
    names = [option_of(setting.name), *setting.options]
    default = shown_default(setting)
    help = setting.help if default is None or "default" in setting.help else f"{setting.help}; default {default}"
    if setting.kind is bool:
        how.setdefault(
            "action", argparse.BooleanOptionalAction if setting.default or setting.optional else "store_true"
        )
        return group.add_argument(*names, dest=setting.name, default=None, help=help, **how)
    if setting.kind is tuple:
        how.setdefault("action", "append")
    kind, metavar = KINDS.get(setting.kind, (str, "NAME"))
    if setting.size:
        kind, metavar = str, "SIZE"
    metavar = setting.metavar or metavar
    return group.add_argument(*names, dest=setting.name, type=kind, metavar=metavar, help=help, **how)


def add_vllm_options(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Options of `vllm serve` that mean the same here. Those whose other values would not are refused with them."""
    group = parser.add_argument_group("options under vLLM's names")
    leave_out(group)
    settings = {setting.name: setting for setting in ENGINE_SETTINGS}
    for theirs, ours in RENAMED.items():
        add_setting_option(group, replace(settings[ours], name=theirs, default=None, help=option_of(ours)))
    for theirs, ours in NEGATED.items():
        help = f"--no-{ours.replace('_', '-')}"
        add_setting_option(group, replace(settings[ours], name=theirs, default=None, help=help))
    group.add_argument("--swap-space", type=float, metavar="GIB", help="--swap-memory in GiB")
    group.add_argument("--tokenizer", metavar="MODEL", help="only the model's own is accepted")
    group.add_argument("--kv-transfer-config", metavar="JSON", help="--kv-connector and --kv-connector-options")
    group.add_argument("--kv-events-config", metavar="JSON", help="--kv-events and its address for replay")
    group.add_argument("--speculative-config", metavar="JSON", help="--speculate and --speculate-tokens")
    rules = {name: (rule.kind, rule.expected) for name, rule in RULES.items()}
    no_effect = {name: (kind, "no effect") for name, kind in NO_EFFECT.items()}
    for name, (kind, help) in {**rules, **no_effect}.items():
        if name not in without:
            setting = Setting(name, name, help, None, kind, metavar="VALUE")
            add_setting_option(group, setting)


def option_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def shown_default(setting: Setting) -> str | None:
    """Returns the default as it is written on the command line. None: there is nothing to show."""
    default = setting.default
    if default in (None, (), {}) or isinstance(default, bool):
        return None
    if setting.size:
        return format_size(default).replace(".0 ", "").replace(" ", "") if default else "0"
    return f"{default:g}" if isinstance(default, float) else str(default)


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help=f"longest answer; default: the model's own, else {max_tokens}"
    )
    parser.set_defaults(usual_max_tokens=max_tokens)
    details = [group.add_argument("--min-tokens", type=int, metavar="N", help="the answer does not end before these")]
    group.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="0: the likeliest token; default: the model's own, else 0 (of a server: its own)",
    )
    group.add_argument("--top-p", type=float, metavar="X", help="sample from the likeliest that sum up to X")
    group.add_argument("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens")
    details += [
        group.add_argument("--typical-p", type=float, metavar="X", help="of these, the most typical that sum up to X"),
        group.add_argument("--min-p", type=float, metavar="X", help="drop tokens below X times the likeliest one"),
        group.add_argument(
            "--presence-penalty", type=float, metavar="X", help="less of tokens that the answer has, -2 to 2"
        ),
        group.add_argument(
            "--frequency-penalty", type=float, metavar="X", help="the same for each time that it has them, -2 to 2"
        ),
    ]
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: fewer repetitions")
    details += [
        group.add_argument("--no-repeat-ngram-size", type=int, metavar="N", help="no n-gram of N tokens occurs twice"),
        group.add_argument(
            "--encoder-no-repeat-ngram-size",
            type=int,
            metavar="N",
            help="no n-gram of N tokens of the encoder's input occurs (without an encoder: of the prompt)",
        ),
        group.add_argument(
            "--forced-eos-token-id", type=int, metavar="ID", help="the last token of an answer that --max-tokens ends"
        ),
    ]
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    details.append(
        group.add_argument(
            "--ignore-eos", action="store_true", default=None, help="continue after the model's end token"
        )
    )
    leave_out(*details)
    add_structured_options(parser)


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of commands that answer prompts, locally or by a server: the form of the answers, and how they
    are sampled."""
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
    """Keywords for LLM, from the options that were given."""
    names = [setting.name for setting in (*ENGINE_SETTINGS, *OBSERVED_SETTINGS)]
    return given_settings(args, [*names, *RENAMED, *NEGATED, *SPECIAL, *RULES])


def given_settings(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}


def check_generation_options(args: argparse.Namespace) -> None:
    """RequestError for values that no model accepts, before the model is loaded."""
    from ratoon.core.params import SamplingParams

    check_beam_options(args)
    structured_output(args)
    if not wants_beam_search(args):
        SamplingParams(**_given_sampling_options(args)).verify()


def generation_params(args: argparse.Namespace, llm: LLM, may_search: bool = True) -> GenerationParams:
    """The model's defaults, overridden by the options. A search by option takes no defaults of the model; one of the
    model's files is done if no option contradicts it, and if `may_search`."""
    from ratoon.engine.input.default_params import sets_length, with_given

    if wants_beam_search(args):
        return with_given(beam_search_params(args), _given_structure(args))
    given = _given_sampling_options(args)
    if args.max_tokens is None and sets_length(llm.source.generation_defaults):
        del given["max_tokens"]
    search = llm.get_default_beam_search_params()
    if search is not None and may_search and leaves_search_open(args):
        of_search = {name: value for name, value in given.items() if name in search.__struct_fields__}
        return with_given(search, of_search)
    # Sampling at temperature 1 suits few models; a model that names no temperature is run greedily.
    if "temperature" not in llm.source.generation_defaults:
        given.setdefault("temperature", 0.0)
    return with_given(llm.get_default_sampling_params(), given)


def _given_sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    return {**given_options(args, SAMPLING_OPTIONS), **_given_structure(args)}


def _given_structure(args: argparse.Namespace) -> dict[str, Any]:
    asked = structured_output(args)
    return {} if asked is None else {"structured_output": asked}


@contextmanager
def open_llm(args: argparse.Namespace, **settings: Any) -> Iterator[LLM]:
    """The LLM that the command line asks for. While it loads, a terminal shows a spinner."""
    with status(f"loading {args.model}"):
        from ratoon.api.llm import LLM

        # Without --seed, sampling differs from run to run, as is usual for commands.
        llm = LLM(args.model, **{"seed": None, **engine_settings(args), **settings_for_adapter(args), **settings})
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


# ---- errors name what was typed ----

POSITIONAL = ("model", "prompts", "files", "run")
# What the engine calls the tokens of a prompt
PROMPTS = {
    "prompt": "PROMPT",
    "prompt_token_ids": "PROMPT",
    "encoder_prompt": "PROMPT",
    "encoder_prompt_token_ids": "PROMPT",
    "decoder_prompt_token_ids": "--decoder-prompt",
}
IN_A_LIST = re.compile(r"(?P<place>prompts\[\d+\])\.(?P<field>.+)", re.DOTALL)
FIELD_OF_SERVER = re.compile(r"(?P<field>[a-z_]+[\w.\[\]]*): (?P<rest>.+)", re.DOTALL)


def in_terms_of_options(error: Exception, args: argparse.Namespace) -> Exception:
    """An error that names a field of a request, or a setting, names the option that was given for it. Any other error
    as it is."""
    if not isinstance(error, (RequestError, ConfigError)):
        return error
    listed = IN_A_LIST.fullmatch(error.field)
    field = listed["field"] if listed else error.field
    if field in PROMPTS:
        place = listed["place"] if listed else PROMPTS[field]
        return RequestError(place, error.problem, in_options(error.expected))
    option = option_for(field, args)
    if option is not None:
        kind = ConfigError if isinstance(error, ConfigError) else RequestError
        return kind(f"{listed['place']}, {option}" if listed else option, error.problem, error.expected)
    told = FIELD_OF_SERVER.fullmatch(error.problem)  # a server's message begins with the field
    option = None if told is None else option_for(told["field"], args)
    if told is None or option is None:
        return error
    return RequestError(error.field, f"{option}: {told['rest']}", error.expected)


def in_options(expected: str) -> str:
    """What an error suggests, on the command line: settings are options there."""
    return expected.replace("start the engine with a greater max_model_len", "give a greater --max-model-len")


def option_for(field: str, args: argparse.Namespace) -> str | None:
    """The option that was given for a field; None: none was."""
    for dest, value in vars(args).items():
        if value is None or value is False or dest in POSITIONAL:
            continue
        for name in (dest, *fields_of_option(dest)):
            if field == name or field.startswith((f"{name}.", f"{name}[")):
                return "--" + dest.replace("_", "-")
    return None
