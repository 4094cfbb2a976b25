"""The parameters of a request (SamplingParams, BeamSearchParams, PoolingParams, …), their limits and validation.

Validation here needs no model: ranges and types. What depends on the model (vocabulary, lengths, words) is checked by
the InputProcessor, which also fills in the model's defaults.
"""

from __future__ import annotations

import enum
import math
from typing import Any, ClassVar, Literal, Self, TypeAlias

import msgspec

from ratoon.core.errors import RequestError
from ratoon.core.param_types import TypedParamsMeta
from ratoon.core.structured import FREE_TEXT, StructuredOutputField, structured_output, verify_structured_output

MAX_LOGPROBS = (
    64  # the declared size limit of `logprobs` and `prompt_logprobs`, unless the engine's config sets another
)
MAX_CHOICES = 256  # the same for `n`
MAX_STOP_STRINGS = 64
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS_CHARACTERS = 2**16  # of all `bad_words` together; each is tokenised twice
MAX_PREDICTION_CHARACTERS = 2**20
MAX_BEAM_WIDTH = 2048
MAX_BEAM_STOP_TOKENS = 16  # each costs a step `beam_width` more candidates
MAX_NGRAM_SIZE = 256  # of no_repeat_ngram_size and encoder_no_repeat_ngram_size: the cost of a step grows with it
MAX_BAD_WORD_TOKENS = 64  # in one entry of `bad_words_ids`: likewise
MAX_FORCED_TOKENS = 16
MAX_LENGTH_PENALTY = 16.0  # in absolute value: the longest text to this power stays far within float64
POOLING_KINDS = ("last", "mean", "first")
POOLING_ACTIVATIONS = ("softmax", "sigmoid", "none")
HIDDEN_STATES_DTYPES = ("float32", "bfloat16", "float16")
HIDDEN_STATES_SCOPES = ("all", "prompt", "output")
ENCODER = "encoder"
HIDDEN_STATES_SIDES = ("decoder", ENCODER)
MAX_DEADLINE = 86_400.0  # seconds
MAX_LENS = 20  # tokens of each state
MAX_LENS_ENTRIES = 2**17  # layers × positions × tokens of an answer
MAX_HIDDEN_STATES_BYTES = 256 * 2**20  # of one request, unless the engine's config sets another limit
LARGEST_FACTOR = 1e6  # of logits: far beyond practical use, and far within float32
SAMPLING_EPS = 1e-5  # a temperature below this is greedy


class RequestOutputKind(enum.IntEnum):
    CUMULATIVE = 0  # every output holds all text and tokens so far
    DELTA = 1  # every output holds what is new
    FINAL_ONLY = 2  # one output, at the end


class CommonParams(msgspec.Struct, metaclass=TypedParamsMeta, kw_only=True, omit_defaults=True, gc=False):
    """What sampling and beam search have in common: when a text ends, how it is returned, and rules over logits.

    In a beam search rules apply to log-probabilities, which are not renormalised afterwards: tokens that no rule
    changes keep their log-probability over the full vocabulary.
    """

    # Types that the constructor converts
    ALSO_ACCEPTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "forced_eos_token_id": (int,), "return_hidden_states": (bool,), "structured_output": (Any,)
    }  # fmt: skip

    n: int = 1  # texts to return; of a search, the best first
    min_tokens: int = 0  # stop tokens are suppressed until then
    max_tokens: int | None = 16
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    return_hidden_states: HiddenStatesParams | None = None  # of every text that is returned, with the last output
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    # Tokens that are never generated, and tokens that are not generated first. None: the model's own, []: none. Like
    # all forbidden tokens they affect sampling but not `logprobs`, which are the model's.
    suppressed_token_ids: list[int] | None = None
    suppressed_first_token_ids: list[int] | None = None
    timestamps: TimestampRules | None = None
    # Rules of transformers, under its names. None: the model's own, 0 or []: none. Prompt and output count as one text.
    no_repeat_ngram_size: int | None = None  # no n-gram of this size occurs twice
    encoder_no_repeat_ngram_size: int | None = None  # no n-gram of the encoder input (else: the prompt)
    # Or one id: the token forced at max_tokens. It adds nothing to the score of a beam.
    forced_eos_token_id: list[int] | None = None
    bad_words_ids: list[list[int]] | None = None  # token sequences that are never generated
    # Prompt and output together, as in transformers. They apply where `max_tokens` is None and `min_tokens` is 0.
    max_length: int | None = None
    min_length: int = 0  # lowered where `max_tokens` ends the text earlier
    # The text must match a schema, an expression, a grammar or one of some texts. It limits which tokens are possible,
    # so like all forbidden tokens it affects sampling but not `logprobs`.
    structured_output: StructuredOutputField = FREE_TEXT

    # Filled by the InputProcessor; a caller leaves them alone.
    bad_words_token_ids: list[list[int]] | None = None
    all_stop_token_ids: list[int] | None = None  # stop_token_ids and, unless ignore_eos, the model's eos tokens

    def __post_init__(self) -> None:
        self.forced_eos_token_id = _one_or_many(self.forced_eos_token_id)
        self.return_hidden_states = _hidden_states_params(self.return_hidden_states)
        self.structured_output = structured_output(self.structured_output)

    def clone(self) -> Self:
        """Returns a copy whose fields can be set; lists are shared and never changed in place."""
        return msgspec.structs.replace(self)

    def _verify_common(self, max_stop_tokens: int) -> None:
        _require_token_counts(self.min_tokens, self.max_tokens)
        _require_list("stop_token_ids", self.stop_token_ids, int, max_stop_tokens)
        _verify_hidden_states(self.return_hidden_states)
        _verify_rules(self)


class SamplingParams(CommonParams, kw_only=True, omit_defaults=True, gc=False, tag="sampling"):
    """How to choose tokens and when to stop. Field meanings follow OpenAI's and vLLM's."""

    ALSO_ACCEPTED: ClassVar[dict[str, tuple[Any, ...]]] = {**CommonParams.ALSO_ACCEPTED, "stop": (str,)}

    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0  # of what the others leave, the tokens nearest to the expected surprise that sum up to this
    seed: int | None = None
    stop: list[str] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # alternatives per generated token; 0 = the sampled token's alone
    prompt_logprobs: int | None = None
    # False: no drafts of its tokens are made, if the engine makes some. They change how fast tokens come, not which.
    speculate: bool = True
    # What the answer is expected to be for the most part, as text or token ids: drafts come from it first. Also in an
    # engine that makes no others.
    prediction: str | list[int] | None = None

    # Filled by the InputProcessor; a caller leaves them alone.
    prediction_token_ids: list[int] | None = None
    eos_token_ids: list[int] | None = None  # suppressed by min_tokens together with stop_token_ids

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.top_k == -1:
            self.top_k = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SAMPLING_EPS

    def verify(self, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Raises RequestError, naming the field, for any value that has no meaning."""
        _require_int("n", self.n, 1, MAX_CHOICES)
        _require_number("temperature", self.temperature, 0.0, LARGEST_FACTOR)
        _require_int("top_k", self.top_k, 0, None, hint="0 or -1 means all tokens")
        _require_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("typical_p", self.typical_p, 0.0, 1.0, above=True)
        if self.seed is not None:
            _require_int("seed", self.seed, -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require_int(name, value, 0, max_logprobs, hint="the engine's max_logprobs")
        self._verify_common(MAX_LOGIT_BIAS)
        _verify_prediction(self.prediction)
        _require_list("stop", self.stop, str, MAX_STOP_STRINGS)
        for text in self.stop or ():
            if not text:
                raise RequestError("stop", "holds an empty string", "every stop string needs at least one character")
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop", "stop strings need text, but detokenize is off", "use stop_token_ids, or detokenize=True"
            )


class BeamSearchParams(CommonParams, kw_only=True, omit_defaults=True, gc=False, tag="beam_search"):
    """How to search for the most probable texts. Field meanings follow those of transformers' beam search.

    The score of a finished text is the sum of its log-probabilities divided by (its length ** length_penalty).
    `early_stopping` says when to stop, once there are as many finished texts as beams. True: at once; False: when the
    best beam's current score is no better than the worst of them; "never": when no beam can become better.
    """

    beam_width: int
    length_penalty: float = 1.0  # above 0 favours long texts, below 0 short ones
    early_stopping: bool | Literal["never"] = False
    # CUMULATIVE: after every step the best text so far, which may replace that of the step before. There is no DELTA.
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    # Filled by the InputProcessor; a caller leaves it alone.
    num_forced_tokens: int = 0  # at the end of the prompt, counted as output by the length penalty

    def verify(self) -> None:
        """Raises RequestError, naming the field, for any value that has no meaning."""
        _require_int("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        _require_int("n", self.n, 1, self.beam_width, hint="no more than beam_width")
        _require_number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError("early_stopping", f"{self.early_stopping!r} is unknown", 'true, false or "never"')
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos", f"{self.ignore_eos!r} is neither true nor false", "true or false")
        if self.output_kind not in (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY):
            raise RequestError(
                "output_kind",
                "the best text may change from step to step, so there is nothing to add to",
                "CUMULATIVE or FINAL_ONLY",
            )
        self._verify_common(MAX_BEAM_STOP_TOKENS)


GenerationParams: TypeAlias = SamplingParams | BeamSearchParams


class TimestampRules(
    msgspec.Struct, metaclass=TypedParamsMeta, kw_only=True, omit_defaults=True, frozen=True, gc=False
):
    """Whisper's rules for texts with timestamps, which are the tokens from `first_token_id` on. A text begins with a
    timestamp. Timestamps never decrease, and come in pairs (end of one segment, start of the next), or singly before
    the end. If all timestamps together are more probable than any other token, a timestamp is sampled.
    """

    first_token_id: int  # 0.00 seconds; every id from here on is a timestamp
    no_timestamps_token_id: int  # for texts without them; never generated
    end_token_id: int  # text tokens are below it
    max_initial_index: int | None = None  # the latest first timestamp, counted from first_token_id; None: any

    def verify(self) -> None:
        _require_int("first_token_id", self.first_token_id, 2, None)
        below = self.first_token_id - 1
        hint = "below first_token_id"
        _require_int("no_timestamps_token_id", self.no_timestamps_token_id, 0, below, hint)
        _require_int("end_token_id", self.end_token_id, 1, below, hint)
        if self.max_initial_index is not None:
            _require_int("max_initial_index", self.max_initial_index, 0, 2**31 - 1)


class PoolingParams(
    msgspec.Struct, metaclass=TypedParamsMeta, kw_only=True, omit_defaults=True, gc=False, tag="pooling"
):
    """How the hidden states of a prompt become one vector."""

    # last, first: the state of that token; mean: over all tokens. None: the model's own, filled in by the front end.
    pooling: str | None = None
    normalize: bool = True  # to length 1
    dimensions: int | None = None  # truncate to this many; None: all
    # Give what the model's head that classifies makes of the pooled state: a number for each label, and no vector
    classify: bool = False
    activation: str | None = None  # of the head's logits: softmax, sigmoid or none; None: the model's own

    def verify(self) -> None:
        if self.pooling is not None and self.pooling not in POOLING_KINDS:
            raise RequestError("pooling", f"{self.pooling!r} is unknown", " or ".join(POOLING_KINDS))
        if not isinstance(self.normalize, bool):
            raise RequestError("normalize", f"{self.normalize!r} is neither true nor false", "true or false")
        if self.dimensions is not None:
            _require_int("dimensions", self.dimensions, 1, None)
        if not isinstance(self.classify, bool):
            raise RequestError("classify", f"{self.classify!r} is neither true nor false", "true or false")
        if self.activation is not None and self.activation not in POOLING_ACTIVATIONS:
            raise RequestError("activation", f"{self.activation!r} is unknown", " or ".join(POOLING_ACTIVATIONS))
        if self.classify and self.dimensions is not None:
            raise RequestError("dimensions", "a head gives a number for each label", "None with classify")
        if not self.classify and self.activation is not None:
            raise RequestError("activation", "only a head's logits have one", "None without classify")


class HiddenStatesParams(msgspec.Struct, metaclass=TypedParamsMeta, kw_only=True, omit_defaults=True, gc=False):
    """Which hidden states of a sequence to return.

    `positions` counts in the part that `scope` names: one number, a list of numbers and of pairs [start, stop), or
    "all"; negative ones count from its end, and a stop of None means its end. `layers` are entries of
    transformers' `hidden_states`, one, a list or "all": 0 is the embeddings, l the output of layer l, and L, -1 or
    "norm" the output of the last of L layers after the final norm; "pre_norm" is that output before it.
    """

    positions: Any = -1
    scope: str = "all"  # all, prompt or output
    layers: Any = None  # None: the last entry, after the final norm
    dtype: str = "float32"
    deadline: float | None = None  # seconds
    side: str = "decoder"  # encoder: positions are those of the encoder's input, and layers the encoder's
    # Instead of the states, their norms, and for each the most probable tokens, so many, if it were the last state:
    # the final norm and the model's head over it (a logit lens)
    lens: int | None = None
    # Instead of states, weights of cross-attention: of each of these heads, a pair [layer, head], both counted from 0,
    # how much a position attends to each of the encoder's positions. In the tensor heads are in the place of layers,
    # and the encoder's positions in that of the numbers of a state. `layers` is None
    cross_heads: Any = None
    # Positions and layers named several times are returned once, at the place of the first
    each_once: bool = False
    # Filled in for a request with an answer: the layers as the engine counts them (Extraction.layers)
    layers_passed: list[int] | None = None

    def verify(self) -> None:
        """Ranges and types only; limits of the sequence and the model are checked elsewhere."""
        if self.side not in HIDDEN_STATES_SIDES:
            raise RequestError("side", f"{self.side!r} is unknown", " or ".join(HIDDEN_STATES_SIDES))
        if self.side == ENCODER and self.scope != "all":
            raise RequestError("scope", f"{self.scope!r} is no part of an encoder's input", "all")
        if self.scope not in HIDDEN_STATES_SCOPES:
            raise RequestError("scope", f"{self.scope!r} is unknown", " or ".join(HIDDEN_STATES_SCOPES))
        if self.dtype not in HIDDEN_STATES_DTYPES:
            raise RequestError("dtype", f"{self.dtype!r} is unknown", " or ".join(HIDDEN_STATES_DTYPES))
        if self.deadline is not None:
            _require_number("deadline", self.deadline, 0.0, MAX_DEADLINE, above=True)
        if self.lens is not None:
            _require_int("lens", self.lens, 1, MAX_LENS)
            if self.side == ENCODER:
                raise RequestError("lens", "states of an encoder are no beginnings of tokens", "the decoder's side")
            if self.dtype != "float32":
                raise RequestError("dtype", f"{self.dtype!r} has no meaning with lens", "float32, or leave it out")
        if self.cross_heads is not None:
            self._verify_cross_heads(self.cross_heads)

    def _verify_cross_heads(self, heads: Any) -> None:
        expected = "a list of pairs [layer, head], each once"
        if not isinstance(heads, (list, tuple)):
            raise RequestError("cross_heads", f"{heads!r} is not a list", expected)
        if not heads:
            raise RequestError("cross_heads", "is empty", expected)
        pairs = [tuple(pair) if isinstance(pair, (list, tuple)) else () for pair in heads]
        for index, pair in enumerate(pairs):
            if len(pair) != 2 or not all(isinstance(one, int) and not isinstance(one, bool) for one in pair):
                raise RequestError(f"cross_heads[{index}]", f"{heads[index]!r} is no pair of whole numbers", expected)
        if len(set(pairs)) < len(pairs):
            raise RequestError("cross_heads", "names a head twice", expected)
        if self.side == ENCODER:
            raise RequestError("cross_heads", "only a decoder attends to an encoder", "the decoder's side")
        if self.layers is not None or self.lens is not None:
            other = "layers" if self.lens is None else "lens"
            raise RequestError(other, "has no meaning with cross_heads", "leave it out")


def _verify_prediction(prediction: Any) -> None:
    if isinstance(prediction, str):
        if len(prediction) > MAX_PREDICTION_CHARACTERS:
            expected = f"{MAX_PREDICTION_CHARACTERS} at most"
            raise RequestError("prediction", f"has {len(prediction)} characters", expected)
        return
    _require_list("prediction", prediction, int, MAX_PREDICTION_CHARACTERS)


def _hidden_states_params(asked: Any) -> Any:
    """True means the default HiddenStatesParams."""
    if isinstance(asked, bool):
        return HiddenStatesParams() if asked else None
    return asked


def _verify_hidden_states(params: Any) -> None:
    if params is None:
        return
    if not isinstance(params, HiddenStatesParams):
        raise RequestError(
            "return_hidden_states", f"{type(params).__name__} is not HiddenStatesParams", "a HiddenStatesParams"
        )
    try:
        params.verify()
    except RequestError as error:
        raise error.inside("return_hidden_states") from None


def _one_or_many(token_ids: Any) -> Any:
    """A single token id becomes a list."""
    return [token_ids] if isinstance(token_ids, int) and not isinstance(token_ids, bool) else token_ids


def _verify_rules(params: CommonParams) -> None:
    """Verify the fields that are rules over logits."""
    _require_number("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _require_number("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _require_number("repetition_penalty", params.repetition_penalty, 0.0, LARGEST_FACTOR, above=True)
    if params.repetition_penalty < 1 / LARGEST_FACTOR:
        raise RequestError("repetition_penalty", f"{params.repetition_penalty} is too small", "1 changes nothing")
    _verify_bias(params.logit_bias)
    _require_list("allowed_token_ids", params.allowed_token_ids, int, None)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise RequestError("allowed_token_ids", "is empty", "name at least one token, or leave it out")
    _require_list("bad_words", params.bad_words, str, MAX_LOGIT_BIAS)
    num_characters = sum(map(len, params.bad_words or ()))
    if num_characters > MAX_BAD_WORDS_CHARACTERS:
        problem = f"has {num_characters} characters in all"
        raise RequestError("bad_words", problem, f"{MAX_BAD_WORDS_CHARACTERS} at most")
    for name in ("suppressed_token_ids", "suppressed_first_token_ids"):
        _require_list(name, getattr(params, name), int, None)
    for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):
        if getattr(params, name) is not None:
            _require_int(name, getattr(params, name), 0, MAX_NGRAM_SIZE, hint="0 means none")
    _require_list("forced_eos_token_id", params.forced_eos_token_id, int, MAX_FORCED_TOKENS)
    _require_list("bad_words_ids", params.bad_words_ids, list, MAX_LOGIT_BIAS)
    for index, word in enumerate(params.bad_words_ids or ()):
        field = f"bad_words_ids[{index}]"
        _require_list(field, word, int, MAX_BAD_WORD_TOKENS)
        if not word:
            raise RequestError(field, "is empty", "at least one token id")
    if params.max_length is not None:
        _require_int("max_length", params.max_length, 1, None)
    _require_int("min_length", params.min_length, 0, None)
    verify_structured_output(params.structured_output)
    rules: Any = params.timestamps
    if rules is None:
        return
    if not isinstance(rules, TimestampRules):
        raise RequestError("timestamps", f"{type(rules).__name__} is not TimestampRules", "a TimestampRules")
    try:
        rules.verify()
    except RequestError as error:
        raise error.inside("timestamps") from None


def _verify_bias(logit_bias: Any) -> None:
    if logit_bias is None:
        return
    if not isinstance(logit_bias, dict):
        raise RequestError("logit_bias", "is not a mapping", "map token ids to numbers from -100 to 100")
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError("logit_bias", f"has {len(logit_bias)} entries", f"{MAX_LOGIT_BIAS} at most")
    for token, bias in logit_bias.items():
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError("logit_bias", f"key {token!r} is not a token id", "keys are whole numbers")
        _require_number("logit_bias", bias, -100.0, 100.0)


def _require_int(field: str, value: Any, low: int | None, high: int | None, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        problem = f"{value!r} is not a whole number"
    elif (low is not None and value < low) or (high is not None and value > high):
        problem = f"{value} is out of range"
    else:
        return
    wanted = _range_text("a whole number", low, high, above=False) + (f" ({hint})" if hint else "")
    raise RequestError(field, problem, wanted)


def _require_number(field: str, value: Any, low: float, high: float | None, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        problem = f"{value!r} is not a finite number"
    elif value < low or (above and value == low) or (high is not None and value > high):
        problem = f"{value} is out of range"
    else:
        return
    raise RequestError(field, problem, _range_text("a number", low, high, above))


def _require_token_counts(min_tokens: Any, max_tokens: Any) -> None:
    _require_int("min_tokens", min_tokens, 0, None)
    if max_tokens is None:
        return
    _require_int("max_tokens", max_tokens, 1, None)
    if min_tokens > max_tokens:
        raise RequestError(
            "min_tokens", f"{min_tokens} is above max_tokens ({max_tokens})", "lower it or raise max_tokens"
        )


def _require_list(field: str, value: Any, kind: type, longest: int | None) -> None:
    if value is None:
        return
    if not isinstance(value, (list, tuple)):
        raise RequestError(field, f"{type(value).__name__} is not a list", f"a list of {kind.__name__}")
    if longest is not None and len(value) > longest:
        raise RequestError(field, f"has {len(value)} entries", f"{longest} at most")
    for item in value:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise RequestError(field, f"{item!r} is not of type {kind.__name__}", f"a list of {kind.__name__}")


def _range_text(what: str, low: float | None, high: float | None, above: bool) -> str:
    if low is None:
        return what
    lower = f"above {low:g}" if above else f"of at least {low:g}"
    return f"expected {what} {lower}" + (f" and at most {high:g}" if high is not None else "")
