"""Settings of speculative decoding: where drafts of next tokens come from, how long they are, and which are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratoon.core.errors import ConfigError
from ratoon.core.setting import at_least, json_object, number, one_of, setting, whole_between

OFF = "off"
PREDICTION = "prediction"  # the source that a request brings itself
MAX_DRAFT_TOKENS = 64
CPU_FREE_ROWS, GPU_FREE_ROWS = 16, 512
# Most tokens of a draft: with the newest token, as many rows of a sequence as kernels take at once
CPU_DRAFT_TOKENS, GPU_DRAFT_TOKENS = 15, 7
SOURCES = "ngram, roots, draft:MODEL or head:PATH, several with commas between them, or off"
NAMES_A_FILE = {"ngram": False, "roots": False, "draft": True, "head": True}  # sources; some have a model or file
SUPPORTED = ("ngram", "roots", "draft", "head")  # sources that scheduling/drafters/build.py makes


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A source of drafts, such as `ngram` or `draft:MODEL`."""

    kind: str
    path: str = ""  # the model or file, of sources that have one

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}" if self.path else self.kind


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    speculate: str = setting(
        OFF,
        "where drafts of next tokens come from, which a step then checks together: ngram (the request's own text), "
        "roots (texts that this engine has generated), draft:MODEL (a smaller model), head:PATH (a head that reads "
        "hidden states); several with commas between them, the first that has a draft is taken; off",
        metavar="SOURCES",
    )
    num_tokens: int | None = setting(
        None,
        "most tokens of a draft; it is shorter where fewer were right of late, or where many sequences run; default: "
        f"{CPU_DRAFT_TOKENS} on a CPU, {GPU_DRAFT_TOKENS} on a GPU",
        whole_between(1, MAX_DRAFT_TOKENS),
        name="speculate_tokens",
    )
    min_acceptance: float = setting(
        0.4,
        "a source is left out while a smaller share of what it guesses is right, by sequence; its guesses are still "
        "compared with what comes, which costs no step",
        number(lambda value: 0 <= value <= 1, "0 (always used) to 1"),
        name="speculate_min_acceptance",
    )
    max_seqs: int | None = setting(
        None,
        "nothing is drafted while more sequences run; default: by what further rows cost in recent steps",
        at_least(1),
        name="speculate_max_seqs",
    )
    ngram_min: int = setting(
        3,
        "last tokens of a text that must have occurred in it, for a draft from there",
        at_least(1),
        name="speculate_ngram_min",
    )
    ngram_max: int = setting(
        16,
        "last tokens that are compared to find the longest of several matches",
        at_least(1),
        name="speculate_ngram_max",
    )
    roots_bytes: int = setting(
        64 * 2**20,
        "memory for the texts of ended requests from which the source roots drafts; of the owner that has most of "
        "them, the least recently used text goes first",
        at_least(0),
        name="speculate_roots_memory",
        size=True,
    )
    roots_min_probability: float = setting(
        0.1,
        "a draft of the source roots ends where a smaller share of the texts that it comes from agrees with all of it",
        number(lambda value: 0 <= value <= 1, "0 to 1"),
        name="speculate_roots_min_probability",
    )
    roots_factor: float = setting(
        1.0,
        "how many times as long as the text that was found before it a draft of the source roots may be",
        number(lambda value: value > 0, "more than 0"),
        name="speculate_roots_factor",
    )
    acceptance: str = setting(
        "exact",
        "exact: a draft is kept where the token that is sampled is the same, so answers are those without drafts; "
        "rejection: by rejection sampling, for which a draft model or head draws what it guesses; more of that is kept "
        "at high temperatures, and of answers only the distribution",
        one_of("exact", "rejection"),
        name="draft_acceptance",
    )
    # Rows that take as long as the rest of a step, before any step was observed. Follows from the device.
    free_rows: int = CPU_FREE_ROWS

    @property
    def most_tokens(self) -> int:
        """The most tokens of a draft."""
        by_default = GPU_DRAFT_TOKENS if self.free_rows == GPU_FREE_ROWS else CPU_DRAFT_TOKENS
        return by_default if self.num_tokens is None else self.num_tokens

    @property
    def on_device(self) -> DraftSource | None:
        """The source that is a model or a head on the device."""
        return next((source for source in self.sources if NAMES_A_FILE[source.kind]), None)

    @property
    def sources(self) -> tuple[DraftSource, ...]:
        """The sources in the order of priority; none: it is off. Raises ConfigError."""
        return _parse_sources(self.speculate)

    @property
    def keeps_texts(self) -> bool:
        """Whether engines keep the texts of roots, and so must be told which roots are gone."""
        return any(source.kind == "roots" for source in self.sources)


def _parse_sources(text: Any) -> tuple[DraftSource, ...]:
    if not isinstance(text, str):
        raise ConfigError("speculate", f"{text!r} is not text", SOURCES)
    if text.strip() in ("", OFF):
        return ()
    found: dict[str, DraftSource] = {}
    for part in text.split(","):
        kind, _, path = part.strip().partition(":")
        if kind not in NAMES_A_FILE:
            raise ConfigError("speculate", f"{part.strip()!r} is unknown", SOURCES)
        if bool(path) != NAMES_A_FILE[kind]:
            problem = f"{part.strip()!r} names no model or file" if NAMES_A_FILE[kind] else f"{kind!r} has no path"
            raise ConfigError("speculate", problem, SOURCES)
        source = DraftSource(kind, path)
        if str(source) in found:
            raise ConfigError("speculate", f"{str(source)!r} is there twice", "each source once")
        found[str(source)] = source
    return tuple(found.values())


def verify_speculation(config: SpeculationConfig) -> None:
    """Raises ConfigError for sources that do not exist, and for settings that contradict each other."""
    for source in config.sources:
        if source.kind not in SUPPORTED:
            expected = " or ".join((*SUPPORTED, OFF))
            raise ConfigError("speculate", f"{str(source)!r} is not supported yet", expected)
    on_device = [str(source) for source in config.sources if NAMES_A_FILE[source.kind]]
    if len(on_device) > 1:
        raise ConfigError("speculate", f"{' and '.join(on_device)} would both run on the device", "one of them")
    if config.ngram_min > config.ngram_max:
        problem = f"{config.ngram_min} is more than speculate_ngram_max ({config.ngram_max})"
        raise ConfigError("speculate_ngram_min", problem, "lower it, or raise speculate_ngram_max")


# ---- vLLM's object ----

METHODS = {
    "ngram": "ngram",
    "suffix": "roots,ngram",
    "draft_model": "draft",
    "eagle": "head",
    "eagle3": "head",
    "mtp": "head",
}
FIELDS = {
    "num_speculative_tokens": "speculate_tokens",
    "prompt_lookup_min": "speculate_ngram_min",
    "prompt_lookup_max": "speculate_ngram_max",
    "disable_by_batch_size": "speculate_max_seqs",
    "suffix_decoding_max_spec_factor": "speculate_roots_factor",
    "suffix_decoding_min_token_prob": "speculate_roots_min_probability",
}
# Of which the values have no effect here: one model, on the engine's own ranks; texts are limited by memory
NO_EFFECT = (
    "draft_tensor_parallel_size",
    "quantization",
    "max_model_len",
    "revision",
    "disable_padded_drafter_batch",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
)


def from_vllm(value: Any) -> dict[str, Any]:
    """Returns the settings that vLLM's `speculative_config` stands for. Raises ConfigError."""
    name = "speculative_config"
    given = dict(json_object(name, value))
    if not given:
        return {}
    model, method = given.pop("model", None), given.pop("method", None)
    if method is None:
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model" if model else None
    if method not in METHODS:
        raise ConfigError(f"{name}.method", f"{method!r} is not supported", f"one of {', '.join(METHODS)}")
    source = METHODS[method]
    if NAMES_A_FILE.get(source):
        if not isinstance(model, str) or not model:
            raise ConfigError(f"{name}.model", f"{model!r} names no model", f"the model of method {method}")
        source = f"{source}:{model}"
    settings: dict[str, Any] = {"speculate": source}
    for theirs, setting_of in given.items():
        if theirs in NO_EFFECT:
            continue
        if theirs not in FIELDS:
            known = ", ".join(("method", "model", *FIELDS))
            raise ConfigError(f"{name}.{theirs}", "is not supported", f"one of {known}")
        if setting_of is not None:
            settings[FIELDS[theirs]] = setting_of
    _complete_lookup(settings, given)
    return settings


def _complete_lookup(settings: dict[str, Any], given: Mapping[str, Any]) -> None:
    """One of vLLM's two limits of an n-gram alone is both of them."""
    limits = [given[name] for name in ("prompt_lookup_min", "prompt_lookup_max") if given.get(name) is not None]
    if len(limits) == 1:
        settings["speculate_ngram_min"] = settings["speculate_ngram_max"] = limits[0]
