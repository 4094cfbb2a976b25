"""Settings, and what a model is. A field declared with `setting(…)` is one that users can set (setting.py)."""

from __future__ import annotations

import enum
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ratoon.core.errors import ConfigError
from ratoon.core.media import MediaConfig
from ratoon.core.params import MAX_HIDDEN_STATES_BYTES, MAX_LOGPROBS
from ratoon.core.setting import (
    ABOVE_ZERO_TO_ONE,
    Check,
    at_least,
    number,
    one_of,
    setting,
    verify_settings,
    whole_between,
)
from ratoon.core.speculation import GPU_FREE_ROWS, SpeculationConfig, verify_speculation

MAX_ROOTS = 1024  # ended requests that can be continued, unless the engine's config sets another limit


class SchedulingPolicy(enum.StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions turn into angles. `kind` is default, linear, dynamic, llama3, yarn or longrope."""

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope: short for sequences within the original length, long beyond it
    long_factors: tuple[float, ...] = ()
    # Ministral 3: queries are multiplied with 1 + beta · log(1 + floor(position / original_max_position))
    query_beta: float | None = None
    # M-RoPE: how many pairs of a head turn by the position on each axis (time, height, width); none: there is one axis
    sections: tuple[int, ...] = ()


class PositionKind(enum.StrEnum):
    """Where a model takes the order of tokens from."""

    ROTARY = "rotary"  # angles, computed for any position
    TABLE = "a table of vectors"  # one per position, up to max_position
    RELATIVE = "relative"  # a learned bias per distance
    IMPLICIT = "implicit"  # the order in which layers with a state read them


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The encoder beside a decoder. Its hidden size is the decoder's."""

    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int  # the most states it produces for one input
    num_mel_bins: int | None = None  # set: it reads audio instead of tokens, always 30 s as `max_position` states
    vocab_size: int | None = None  # of its own; None: the decoder's
    # It reads samples as they are, up to 30 s, and `num_mel_bins`, which is 1, stands for their one channel
    reads_waveform: bool = False
    activation: str | None = None  # None: the decoder's


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """T5's relative position bias: attention scores get a learned bias per bucket of distances; buckets widen with
    distance."""

    num_buckets: int
    max_distance: int


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    """The head of a model that gives labels, or scores, to texts and pairs of texts."""

    labels: tuple[str, ...]  # by their index among the head's logits
    pooling: str  # the states that it reads: "first", "last" or "mean"
    activation: str = "softmax"  # by which logits become probabilities of labels: softmax, sigmoid or none
    score_activation: str = "sigmoid"  # by which they become scores of pairs, where there is one label
    dense_activation: str = "tanh"  # behind the head's first product, for families that have two
    dense_bias: bool = True
    # Instead of weights of its own, two tokens ("no", "yes"): its logit is that of the second less that of the first
    tokens: tuple[str, str] | None = None
    token_ids: tuple[int, int] | None = None  # filled in from the tokenizer
    # The text that is made of a pair, with {instruction}, {query} and {document}; None: the tokenizer joins pairs
    template: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """A mixture of experts in the place of the feed-forward half of layers."""

    num_experts: int
    top_k: int  # experts of each row
    inner_size: int  # of an expert
    layers: tuple[bool, ...] | None = None  # which layers have experts; None: all
    scoring: str = "softmax"  # of the router's logits, or "sigmoid"
    renormalise: bool = False  # the scores of the chosen experts are divided by their sum
    scale: float = 1.0  # of these
    num_groups: int = 1  # of experts, of which the best `top_groups` are chosen from
    top_groups: int = 1
    shared_size: int = 0  # the inner size of experts that every row goes to; 0: there are none
    gate_limit: float | None = None  # gate and up are limited to it (gpt-oss); None: a plain activation

    def is_in_layer(self, layer: int) -> bool:
        return self.layers is None or self.layers[layer]


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Latent attention (MLA): keys and values of all heads are products of one vector of a token, which alone is kept.
    The model's `head_dim` is the size of what is kept, and its `num_kv_heads` is 1."""

    kv_rank: int  # the size of the vector
    rope_dim: int  # numbers beside it that are rotated, and are a part of every head's key
    nope_dim: int  # the other part of a head's key, which is a product of the vector
    value_dim: int  # of a head
    q_rank: int | None = None  # queries are products of a vector of this size; None: of the hidden state


@dataclass(frozen=True, slots=True)
class StateSpaceConfig:
    """State-space layers (Mamba-2) in the place of attention."""

    num_heads: int
    head_dim: int
    state_size: int  # for each number of a head
    num_groups: int  # of heads, which share what they read from the state and write to it
    conv_width: int  # tokens that the convolution reads, the row's own included
    layers: tuple[bool, ...] | None = None  # which layers have states; None: all
    conv_bias: bool = True
    proj_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, math.inf)

    def is_in_layer(self, layer: int) -> bool:
        return self.layers is None or self.layers[layer]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's hyperparameters under one set of names for all families and file formats. Unprefixed fields are the
    decoder's; in an encoder-only model, the encoder's."""

    architecture: str  # a key of the model registry, such as "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    position_kind: PositionKind = PositionKind.ROTARY
    norm_eps: float = 1e-6
    activation: str = "silu"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    rotary_dim: int | None = None  # None: all of head_dim
    local_rope_theta: float | None = None  # the base in layers with the window, without scaling; None: the same in all
    attention_scale: float | None = None  # what scores are multiplied with; None: head_dim ** -0.5
    attention_soft_cap: float | None = None  # scores become cap · tanh(score / cap)
    final_soft_cap: float | None = None  # the same of logits
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] | None = None  # which layers use the window; None: all, when there is one
    checkpoint_dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    causal: bool = True  # False: attention is bidirectional, so nothing is generated (BERT)
    encoder: EncoderConfig | None = None  # set: an encoder-decoder model
    relative_positions: RelativePositions | None = None
    scale_embedding: bool = False  # token embeddings are multiplied by the root of the hidden size
    embedding_multiplier: float | None = None  # by this number instead
    residual_multiplier: float = 1.0  # of what a layer's halves add to the residual stream
    logits_multiplier: float = 1.0
    parallel_residual: bool = False  # both halves of a layer read the stream before either is added to it
    rotary_layers: tuple[bool, ...] | None = None  # which layers rotate heads; None: all, where the family does
    interleaved_rotary: bool = False  # the pairs that are rotated are neighbours in the checkpoint's heads, not halves
    norm_bias: bool = True  # of layer norms
    num_unused_positions: int = 0  # rows of the table of positions before that of the first token
    num_token_types: int = 0  # BERT's segments; a text is segment 0, and the second of a pair segment 1
    has_lm_head: bool = True  # False: a decoder without a head over its vocabulary, which generates nothing
    classifier: ClassifierConfig | None = None  # set: it has a head that gives labels or scores
    matryoshka: tuple[int, ...] | None = None  # lengths to which its vectors may be cut; empty: any; None: unknown
    experts: ExpertConfig | None = None  # set: a mixture of experts
    latent: LatentConfig | None = None  # set: its attention is latent
    state_space: StateSpaceConfig | None = None  # set: some layers, or all, have a state in the place of attention
    head_norms: bool = False  # query and key heads are normed, in a family that has both forms (GLM-4.5)
    attention_sinks: bool = False  # each head has a score that takes its share of the softmax, and no value
    gated_mlp: bool = False  # for a family that has both forms (T5)
    decoder_start_token_id: int | None = None  # the first token of every decoder prompt
    forced_bos_token_id: int | None = None  # the token after it, unless the caller gives a decoder prompt
    suppressed_token_ids: tuple[int, ...] = ()  # never generated
    suppressed_first_token_ids: tuple[int, ...] = ()  # not as the first token

    has_rope_positions: bool = False  # requests may bring positions of their own for the rotation of heads
    media: MediaConfig | None = None  # set: it reads images
    # Set: it runs as a module of the Transformers library, which reads this text, a config.json; None: it is native
    library: str | None = None

    @property
    def generates(self) -> bool:
        """Whether it can generate text."""
        return self.causal and self.has_lm_head

    @property
    def rope_axes(self) -> int:
        """The axes of the positions that requests may bring for the rotation of heads. 0: they bring none, and heads
        are rotated by the positions in the sequence."""
        return len(self.rope_scaling.sections) or int(self.has_rope_positions)

    @property
    def sees_ahead(self) -> bool:
        """Whether the rows of an image see those behind them."""
        return self.media is not None and self.media.attends_both_ways

    def window_of_layer(self, layer: int) -> int | None:
        if self.sliding_window is None:
            return None
        if self.sliding_layers is not None and not self.sliding_layers[layer]:
            return None
        return self.sliding_window


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = setting(
        16, "tokens in a block of the KV cache; on a CPU a multiple of 16, or the slow reference is used", at_least(1)
    )
    state_interval: int | None = setting(
        None,
        "tokens between two checkpoints of the states of a state-space or hybrid model, at which prefixes are shared; "
        "a multiple of block_size, by default 512 or the next one; no effect on other models",
        at_least(1),
    )
    num_blocks: int | None = setting(
        None, "blocks in the KV cache; takes precedence over settings of its memory", at_least(2)
    )
    memory_bytes: int | None = setting(
        None, "memory for the KV cache, such as 512MiB or 2GiB", name="kv_memory", size=True
    )
    memory_fraction: float | None = setting(
        None,
        "share of the memory that is free once the weights are loaded; default 0.85 on a GPU, less what the largest "
        "step needs, 0.4 and at most 4GiB on a CPU",
        ABOVE_ZERO_TO_ONE,
        name="kv_memory_fraction",
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "share of a GPU's memory for weights, the largest step and KV cache together; no effect on a CPU",
        ABOVE_ZERO_TO_ONE,
    )
    kv_cache_dtype: str = setting(
        "auto",
        "auto: keys and values are kept in the dtype of the model; in float16 on a CPU if products are computed with "
        "quantised weights. fp8 or fp8_e4m3: as 8-bit floats, for GPUs; float32, float16, or int8 with a scale for "
        "each head of a token: for CPUs. Fewer bits take less memory; 8 bits lose a little",
        one_of("auto", "fp8", "fp8_e4m3", "float32", "float16", "int8"),
    )
    enable_prefix_caching: bool = setting(
        True, "share computed prefixes between requests", options=("--prefix-caching",)
    )
    encoder_cache_size: int = setting(
        16384,
        "rows of embeddings of images, videos and prompt_embeds that are kept on the device, for prompts that read "
        "them now or later; an input with more is refused",
        at_least(1),
    )
    lease_fraction: float = setting(
        0.5,
        "share of the KV cache that is kept for continuations, at most",
        number(lambda value: 0 <= value <= 1, "0 (no leases) to 1"),
    )
    max_lease_seconds: float = setting(
        3600.0,
        "the longest retain_kv that a request may ask for",
        number(lambda value: value > 0, "more than 0"),
    )
    swap_bytes: int = setting(
        0,
        "host memory for the blocks of preempted sequences, and for those that the KV cache evicts and later requests "
        "may need; 0: they are computed again",
        name="swap_memory",
        size=True,
    )
    preemption_mode: str = setting(
        "auto",
        "what becomes of a preempted sequence if there is swap_memory: swap, recompute (the memory is not used then), "
        "or auto: whichever takes less time, by what was measured at start-up; on a CPU nothing is measured, and auto "
        "is swap",
        one_of("auto", "swap", "recompute"),
    )
    kv_connector: str | None = setting(
        None,
        "a tier for blocks behind host memory: lmcache (docs/tiers.md); peers or nixl, which move blocks between "
        "engines (docs/prefill-decode.md) and may be given beside kv_files; or one that a package registers by this "
        "name (docs/plugins.md); needs swap_memory, through which its blocks pass",
    )
    kv_connector_options: dict[str, Any] = setting({}, "an object of what the connector is given")
    kv_files: str | None = setting(
        None,
        "a folder in which the blocks of ended texts are kept as files, for later runs of the engine and for others of "
        "this host; with it, roots outlive the process (docs/tiers.md)",
        metavar="FOLDER",
    )
    encoder_folder: str | None = None  # for outputs of media encoders alone, where engines of one client share them
    encoder_folder_bytes: int = 2**30  # that they take at most
    # Set: outputs of media encoders go between the hosts of one client. An engine that only encodes listens at this
    # address, tcp://HOST:PORT; others fetch from such engines
    encoder_listen: str | None = None
    rank_folder: str | None = None  # a private one, in which ranks reach what moves their blocks to other engines
    num_sharers: int = 1  # workers of this host that divide the device's free memory, if memory_fraction is not set
    kv_files_bytes: int = setting(
        16 * 2**30, "that the files of kv_files take at most, such as 100GiB", name="kv_files_size", size=True
    )
    kv_files_io: str = setting(
        "system",
        "what reads and writes the files of kv_files: system (calls of the operating system), or nixl (the POSIX "
        "backend of NIXL, which the extra nixl brings)",
        one_of("system", "nixl"),
    )

    kv_events: str | None = setting(
        None,
        "an address such as tcp://127.0.0.1:5557 on which events of the KV cache are published in vLLM's format; of "
        "several engines, engine i has a port that is higher by i",
        metavar="ADDRESS",
    )
    kv_events_replay: str | None = setting(
        None, "an address on which subscribers of kv_events ask for what they missed", metavar="ADDRESS"
    )
    kv_events_topic: str = setting("", "the first frame of messages of kv_events")
    tells_client: bool = False  # the client of the engine's process is sent events too, by the connection that it has

    @property
    def host_bytes(self) -> int:
        """Host memory for blocks. Those of files pass through it, so there is some where nothing was said of it."""
        return self.swap_bytes or (0 if self.kv_files is None else HOST_BYTES_FOR_FILES)

    @property
    def connectors(self) -> list[tuple[str, dict[str, Any]]]:
        """The names of connectors and what they are given. None: blocks go to host memory at most. Two: the first moves
        blocks between engines, and the second keeps them."""
        found = []
        if self.kv_connector is not None:
            inner = {} if self.rank_folder is None else {"rank_folder": self.rank_folder}
            found.append((self.kv_connector, {**self.kv_connector_options, **inner}))
        if self.kv_files is not None:
            options = {"folder": self.kv_files, "max_bytes": self.kv_files_bytes, "io": self.kv_files_io}
            found.append(("files", options))
        return found

    @property
    def moves_blocks(self) -> bool:
        """Whether the connector moves blocks between engines that run."""
        return self.kv_connector in MOVING_CONNECTORS


MOVING_CONNECTORS = ("peers", "nixl")
HOST_BYTES_FOR_FILES = 2**30  # of memory through which blocks of files pass, where swap_memory is not given

MAX_LORA_RANK = 256  # that kernels are made for


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """How many adapters (LoRA) an engine holds beside the model, and how large they may be. Under vLLM's names."""

    enable_lora: bool = setting(
        False, "keep memory for adapters (LoRA), which requests name; on where adapters are named at the start"
    )
    max_loras: int = setting(
        8,
        "slots for adapters in memory: the most that one step computes with; others are read from their files when "
        "requests need them",
        whole_between(1, 1024),
    )
    max_lora_rank: int = setting(
        64, "highest rank of an adapter; each slot has memory for it", whole_between(1, MAX_LORA_RANK)
    )
    max_adapters: int = setting(4096, "adapters that requests may name at a time, in memory or not", at_least(1))

    @property
    def num_slots(self) -> int:
        """Slots that the engine has; 0: it serves the model alone."""
        return self.max_loras if self.enable_lora else 0


MAX_MEDIA_PER_PROMPT = {"image": 8, "video": 1, "audio": 1}  # unless the settings say otherwise
LIMIT_OF_MEDIA = Check(
    lambda limits: all(
        modality in MAX_MEDIA_PER_PROMPT and isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
        for modality, limit in limits.items()
    ),
    f"an object of whole numbers for {', '.join(MAX_MEDIA_PER_PROMPT)}",
    "has an unknown name or number",
)


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """What a request may bring besides text, and how it is prepared. The first two have vLLM's names."""

    limit_mm_per_prompt: dict[str, Any] = setting(
        {}, "an object of how many images, videos and recordings a prompt may have; default: 8, 1 and 1", LIMIT_OF_MEDIA
    )
    mm_processor_kwargs: dict[str, Any] = setting(
        {},
        "an object of options for the preprocessing of images and videos, under the names of the model's processor, "
        "such as max_pixels; those of a request take precedence",
    )
    max_image_pixels: int = setting(
        2**26, "most pixels of an image, and of a frame of a video, before it is resized", at_least(1)
    )
    max_video_frames: int = setting(128, "most frames of a video that are given to a model", at_least(1))
    max_media_bytes: int = setting(128 * 2**20, "most bytes of an encoded image or video", size=True)

    def limit_of(self, modality: str) -> int:
        return int({**MAX_MEDIA_PER_PROMPT, **self.limit_mm_per_prompt}[modality])


TOKEN_BUDGET = 2048  # of a step, unless another is set
STEPS_IN_FLIGHT = 2  # unless another number is set, or there are more stages
LARGE_GPU_BYTES, LARGE_GPU_TOKEN_BUDGET = 60 * 2**30, 8192


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_batched_tokens: int | None = setting(
        None, "token budget of a step; default: 2048, on a GPU of 60 GiB or more 8192", at_least(1)
    )
    max_num_seqs: int = setting(256, "sequences in a step; each choice of a request is one", at_least(1))
    max_prefill_chunk: int | None = setting(
        None, "most tokens of one prompt in a step; default: the token budget", at_least(1)
    )
    max_steps_in_flight: int | None = setting(
        None,
        "steps that are planned before the result of the first is known; 1: the device waits for plans; default: 2, or "
        "the stages of a pipeline if these are more, and on a GPU one more while its steps are short",
        at_least(1),
    )
    max_num_encoder_tokens: int = setting(
        16384,
        "budget of a step for encoder inputs: positions of text or audio, rows of embeddings of images; one that is "
        "longer runs alone",
        at_least(1),
    )
    policy: SchedulingPolicy = setting(SchedulingPolicy.FCFS, "fcfs, or priority: by the priority of requests")
    enable_chunked_prefill: bool = setting(True, "compute a long prompt in several steps")
    jump_forward: bool | None = setting(
        None,
        "tokens for which structured output leaves no choice are computed together with the next one, not by a step "
        "of their own, and are those of the tokenizer; default: on a CPU. On a GPU it is worth its search for few "
        "requests with much such text; with --no-jump-forward a CPU gives the same answers",
    )
    whole_prompts: bool = False  # attention is not causal, so a sequence must be computed in one step
    whole_images: bool = False  # rows of an image see each other in both directions, so it is computed in one step
    # Steps in flight of which each needs the token that the one before it samples for the same branch. With 1, a branch
    # waits for its token, which its next plan then carries. None: as many as are in flight; workers feed tokens back.
    max_steps_of_branch: int | None = None
    num_rounds: int = 1  # steps that run at the same time, each in another stage: branches are spread over them

    @property
    def num_in_flight(self) -> int:
        """The steps that may be in flight, as far as the settings say."""
        return self.max_steps_in_flight or max(STEPS_IN_FLIGHT, self.num_rounds)

    @property
    def token_budget(self) -> int:
        return self.max_num_batched_tokens or TOKEN_BUDGET

    @property
    def plans_ahead(self) -> bool:
        """Whether a branch can be planned before its last token is known."""
        return min(self.num_in_flight, self.max_steps_of_branch or self.num_in_flight) > 1


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All settings of one engine. Those left at None or auto are resolved from the model and the machine."""

    model: str
    device: str = setting("auto", "auto, cpu, cuda or cuda:N; or the name of a device of a plugin")
    dtype: str = setting(
        "auto",
        "auto, float32, bfloat16 or float16; auto: float32 on a CPU, the checkpoint's on CUDA",
        one_of("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = setting(None, "longest sequence, prompt and answer together; default: the model's")
    attention_backend: str = setting("auto", "auto, or a backend's name")
    batch_invariant: bool = setting(
        False,
        "compute a row to the same bits in any batch, chunk and continuation, which costs time on a GPU; in float32 on "
        "a CPU it is always so",
    )
    quantization: str = setting(
        "auto",
        "auto: on a CPU with float32, a quantised file (GGUF, GPTQ, AWQ, compressed-tensors) stays in its own bits; "
        "int8, int4: the same, and weights that are floats are kept in 8 or 4 bits; none: all are decoded to dtype, "
        "and products of encoders are not rounded to 16 bits where the processor has AMX; fp8: on CUDA beside "
        "bfloat16, linear layers in 8 bits. With weights in few bits, activations are rounded to 8",
        one_of("auto", "none", "int8", "int4", "fp8"),
        options=("-q",),
    )
    measure_kernels: bool = setting(
        True,
        "on a CPU, measure at the first start which kernels multiply quantised weights fastest, by shape and number of "
        "rows, and keep that for this processor in the cache folder; otherwise the choice is fixed. Results are equal",
    )
    cuda_graphs: bool = setting(True, "capture small steps as CUDA graphs once a size occurs again; no effect on a CPU")
    num_threads: int | None = setting(
        None, "CPU threads; default: the cores that this process may use", at_least(1), options=("--threads",)
    )
    max_logprobs: int = setting(MAX_LOGPROBS, "most log-probabilities of a token that a request may ask for")
    max_hidden_states_bytes: int = setting(
        MAX_HIDDEN_STATES_BYTES, "most hidden states that a request may ask for", size=True
    )
    max_roots: int = setting(MAX_ROOTS, "ended requests that can be continued", at_least(0))
    load_format: str = setting("auto", "auto, or dummy: random weights of the right shape", one_of("auto", "dummy"))
    hf_overrides: dict[str, Any] = setting({}, "an object of fields that override those of config.json")
    model_backend: str = setting(
        "auto",
        "auto: a family that Ratoon declares runs natively, any other decoder of the installed Transformers library "
        "through that, which is slower; native: only the former; transformers: through the library in any case",
        one_of("auto", "native", "transformers"),
    )
    executor: str = setting(
        "auto",
        "auto: uniproc for one rank, mp for several; uniproc: one worker in the engine's process; mp: a process for "
        'each rank; ray: an actor of a Ray cluster for each rank; or "module:Class" with the same interface',
    )
    tensor_parallel_size: int = setting(
        1, "ranks among which every layer's weights are divided", at_least(1), options=("-tp",)
    )
    pipeline_parallel_size: int = setting(
        1,
        "stages among which the layers are divided; ranks are as many as tensor_parallel_size times these",
        at_least(1),
        options=("-pp",),
    )
    enable_expert_parallel: bool = setting(
        False,
        "each of several ranks has some of the experts of a mixture whole, not a part of every expert; no effect on "
        "other models",
    )
    expert_parallel_dispatch: str = setting(
        "auto",
        "how the results of such experts come together: all_reduce: summed over all rows on all ranks; all_to_all: in "
        "large steps each rank adds up some of the rows, and gets for them only what experts have computed; auto: the "
        "latter where it sends less (docs/experts.md)",
        one_of("auto", "all_reduce", "all_to_all"),
    )
    expert_metrics: bool = setting(
        False, "count the rows that the router of each layer sends to each expert, for /metrics (docs/experts.md)"
    )
    nnodes: int = setting(
        1, "hosts of one engine, each with equally many ranks; the others are started with --node-rank", at_least(1)
    )
    node_rank: int = setting(
        0, "this host among them; 0 has the engine, `ratoon serve` of another one runs its ranks alone", at_least(0)
    )
    master_addr: str = setting("127.0.0.1", "the name or address of node 0, where it listens for the others")
    master_port: int = setting(29501, "the port of node 0 for the other hosts", whole_between(1, 65535))
    cluster_secret_file: str | None = setting(
        None, "a file with the secret of the hosts; default: the variable RATOON_CLUSTER_SECRET", metavar="FILE"
    )
    data_parallel_lockstep: bool = setting(
        False,
        "while one of several engines has work, the others run empty steps beside it: for models whose engines "
        "exchange data in every step. Dense models need none of it",
    )
    encodes_only: bool = False  # an engine that runs the encoder of media for others, and nothing else
    # Which of how many engines of this host it is: their ranks share its devices, cores and memory
    index_on_host: int = 0
    num_on_host: int = 1
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    media: MediaSettings = field(default_factory=MediaSettings)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def with_(self, **changes: Any) -> EngineConfig:
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FrontEndConfig:
    """Settings of the front end (the process that takes requests), in addition to those of the engine."""

    seed: int | None = setting(None, "seed of requests that have none; default: random (LLM: 0)")
    skip_tokenizer: bool = setting(False, "work with token ids alone")
    max_total_hidden_states_bytes: int | None = setting(
        None, "limit on hidden states held for all requests; default: no limit, 1GiB in serve", size=True
    )
    disable_log_stats: bool = setting(False, "do not log the throughput every ten seconds of work (LLM: on)")
    otlp_traces_endpoint: str | None = setting(
        None, "send spans of requests to this OpenTelemetry collector", metavar="URL"
    )
    num_replicas: int = setting(
        1,
        "engines, each with the whole model, that share the requests; several are in processes of their own",
        at_least(1),
        options=("--replicas", "--data-parallel-size", "-dp"),
    )
    prefill_engines: int = setting(
        0,
        "engines that only compute prompts, whose keys and values go to the engines of decode_engines while they are "
        "computed; 0: each engine does both (docs/prefill-decode.md)",
        at_least(0),
        options=("--prefill",),
    )
    decode_engines: int = setting(
        0,
        "engines that generate, beside prefill_engines; in the place of num_replicas",
        at_least(0),
        options=("--decode",),
    )
    encode_engines: int = setting(
        0,
        "engines that only run the encoder of images and videos, whose outputs the other engines read; 0: each engine "
        "runs it for its own requests (docs/prefill-decode.md)",
        at_least(0),
        options=("--encode",),
    )
    prefill_threshold: int = setting(
        64,
        "tokens of a prompt, without those that the engine that generates has in its cache, from which on one of "
        "prefill_engines computes it",
        at_least(1),
    )
    move_roots: bool = setting(
        False,
        "a continuation whose engine has more to do than another one goes to that one, together with its keys and "
        "values; on with prefill_engines",
    )
    data_parallel_external_lb: bool = setting(
        False,
        "the caller chooses the engine of a request (data_parallel_rank), or they take turns; default: a request goes "
        "to the engine with the least work for it",
    )
    balance_by_events: bool | None = setting(
        None,
        "choose the engine of a request by what engines tell of their prefix caches, and not by what was sent to them "
        "(docs/tiers.md); default: with kv_events",
    )
    adapters: dict[str, Any] = setting(
        {}, "an object of names that requests may use for adapters (LoRA), and the folders or .gguf files of these"
    )
    ray: bool = setting(False, "run the engines on the nodes of a Ray cluster (AsyncLLM and serve)")

    @property
    def num_engines(self) -> int:
        return self.num_answering_engines + self.encode_engines

    def balances_by_events(self, cache: CacheConfig) -> bool:
        """Returns whether engines tell the balancer which blocks are in their caches. ConfigError: they have no block
        that could be found."""
        if self.balance_by_events and not cache.enable_prefix_caching:
            problem = "no block can be found without a prefix cache"
            raise ConfigError("balance_by_events", problem, "leave enable_prefix_caching on")
        wanted = cache.kv_events is not None if self.balance_by_events is None else self.balance_by_events
        return wanted and not self.data_parallel_external_lb

    @property
    def num_answering_engines(self) -> int:
        """The engines with the whole model. Those that only run its encoder come behind them."""
        return self.prefill_engines + self.decode_engines if self.prefill_engines else self.num_replicas

    @property
    def moves_blocks(self) -> bool:
        """Whether engines send each other keys and values, or outputs of encoders."""
        has_other_kinds = self.prefill_engines > 0 or self.encode_engines > 0
        return has_other_kinds or (self.move_roots and self.num_replicas > 1)


def fit_to_device(config: EngineConfig, gpu_bytes: int) -> EngineConfig:
    """Resolve settings whose defaults depend on the GPU's memory; 0: there is no GPU. A large one computes long prompts
    faster in large steps, and has the memory for them."""
    if gpu_bytes:
        config = replace(config, speculation=replace(config.speculation, free_rows=GPU_FREE_ROWS))
    if config.scheduler.max_num_batched_tokens is not None or gpu_bytes < LARGE_GPU_BYTES:
        return config
    return replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=LARGE_GPU_TOKEN_BUDGET))


def fit_to_model(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Override settings that the model rules out: without causal attention neither chunked prefill nor prefix caching
    is possible, and images that are attended to in both directions are not cut."""
    if model.library is not None:
        _verify_library(config, model)
    if model.media is not None and model.media.attends_both_ways:
        config = replace(config, scheduler=replace(config.scheduler, whole_images=True))
    if model.state_space is not None and config.speculation.sources:
        problem = "drafts can't be taken back from a model with states, which tokens overwrite"
        raise ConfigError("speculate", problem, "leave it out")
    if model.causal:
        return config
    longest = resolve_max_model_len(config.max_model_len, model)
    budget = max(config.scheduler.token_budget, longest)
    scheduler = replace(
        config.scheduler, enable_chunked_prefill=False, whole_prompts=True, max_num_batched_tokens=budget
    )
    return replace(config, scheduler=scheduler, cache=replace(config.cache, enable_prefix_caching=False))


def _verify_library(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError for what a model that runs through the Transformers library can't do."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(config, name)) > 1:
            problem = f"{size} ranks can't share {model.architecture}, which runs through the Transformers library"
            raise ConfigError(name, problem, "1; several engines with the whole model: data_parallel_size")


def fit_to_stages(config: EngineConfig) -> EngineConfig:
    """Override settings that stages rule out: only the last one knows the tokens."""
    if config.pipeline_parallel_size == 1:
        return config
    scheduler = replace(config.scheduler, max_steps_of_branch=1, num_rounds=config.pipeline_parallel_size)
    return replace(config, scheduler=scheduler)


def resolve_max_model_len(asked: int | None, model: ModelConfig) -> int:
    """The longest sequence: `asked`, if the model supports it; None means the model's limit."""
    if asked is None:
        return model.max_position
    if asked < 1:
        raise ConfigError("max_model_len", f"{asked} is out of range", "at least 1")
    if asked > longest_model_len(model):
        raise _too_long(asked, model)
    return asked


def longest_model_len(model: ModelConfig) -> int:
    """The most positions: the model's own limit, or the original length extended by its rope scaling."""
    scaling = model.rope_scaling
    if model.position_kind != PositionKind.ROTARY or scaling.kind == "default":
        return model.max_position
    original = scaling.original_max_position or model.max_position
    return max(model.max_position, int(original * scaling.factor))


def _too_long(asked: int, model: ModelConfig) -> ConfigError:
    problem = f"{asked} is more than the model's {model.max_position} positions"
    scaling = model.rope_scaling
    expected = "lower it or leave it out"
    if model.position_kind == PositionKind.TABLE:
        problem += ", each of which is a vector in its weights"
    elif model.position_kind == PositionKind.RELATIVE:
        expected += f', or allow more: hf_overrides={{"n_positions": {asked}}}'
    elif scaling.kind == "default":
        factor = math.ceil(asked / model.max_position)
        expected += f', or stretch them: rope_scaling={{"rope_type": "yarn", "factor": {factor}.0}}'
    else:
        problem = (
            f"{asked} is more than the {longest_model_len(model)} positions that rope scaling {scaling.kind!r} with "
            f"factor {scaling.factor:g} reaches"
        )
        expected += ", or set a larger factor with rope_scaling"
    return ConfigError("max_model_len", problem, expected)


def verify_engine_config(config: EngineConfig) -> None:
    """Raise ConfigError for settings that are out of range or contradict each other, before anything is loaded."""
    for part in (config.cache, config.scheduler, config.speculation, config.adapters, config.media, config):
        verify_settings(part)
    verify_speculation(config.speculation)
    if config.cache.gpu_memory_utilization is not None and config.cache.memory_fraction is not None:
        raise ConfigError("gpu_memory_utilization", "and kv_memory_fraction contradict each other", "one of the two")
    interval, block_size = config.cache.state_interval, config.cache.block_size
    if interval is not None and interval % block_size:
        raise ConfigError("state_interval", f"{interval} is no multiple of block_size ({block_size})", "one of these")
    _verify_connector(config.cache)
    if config.cache.moves_blocks and config.num_ranks > 1 and (config.nnodes > 1 or config.executor not in OF_HOST):
        problem = f"{config.cache.kv_connector!r} moves blocks of ranks that are processes of one host"
        raise ConfigError("kv_connector", problem, "nnodes 1, and executor auto or mp")
    if config.cache.kv_events is not None and not config.cache.enable_prefix_caching:
        raise ConfigError("kv_events", "no block can be found without a prefix cache", "leave enable_prefix_caching on")
    if config.cache.kv_events_replay is not None and config.cache.kv_events is None:
        raise ConfigError("kv_events_replay", "has no effect without kv_events", "set kv_events too")
    _verify_nodes(config)


OF_HOST = ("auto", "mp")  # executors whose ranks are processes of this host, with nnodes 1


def _verify_nodes(config: EngineConfig) -> None:
    if config.node_rank >= config.nnodes:
        problem = f"{config.node_rank} is none of {config.nnodes} nodes"
        raise ConfigError("node_rank", problem, f"0 to {config.nnodes - 1}, or a larger nnodes")
    num_local_ranks, num_left = divmod(config.num_ranks, config.nnodes)
    if config.node_rank == 0 and (
        num_left
        or math.lcm(config.tensor_parallel_size, num_local_ranks) > max(config.tensor_parallel_size, num_local_ranks)
    ):
        problem = f"{config.nnodes} hosts can't have equal parts of {config.pipeline_parallel_size} stages"
        if config.tensor_parallel_size > 1:
            problem += f" of {config.tensor_parallel_size} ranks each"
        expected = f"pipeline_parallel_size or tensor_parallel_size as a multiple of {config.nnodes}"
        raise ConfigError("nnodes", problem, expected)
    if config.nnodes > 1 and config.executor not in ("auto", "mp"):
        raise ConfigError("executor", f"{config.executor!r} has no ranks on other hosts", "auto or mp")


def _verify_connector(cache: CacheConfig) -> None:
    if cache.kv_connector is None and cache.kv_connector_options:
        raise ConfigError("kv_connector_options", "are given to no connector", "set kv_connector too")
    if not cache.connectors:
        return
    name = "kv_connector" if cache.kv_files is None else "kv_files"
    if cache.kv_files is not None and cache.kv_connector is not None and not cache.moves_blocks:
        problem = f"and kv_connector {cache.kv_connector!r} both keep what leaves host memory"
        raise ConfigError("kv_files", problem, f"one of the two; beside kv_files: {' or '.join(MOVING_CONNECTORS)}")
    first = cache.connectors[0][0]
    if not cache.host_bytes or cache.preemption_mode == "recompute":
        problem = f"the blocks of {first!r} pass through host memory, and there is none for them"
        raise ConfigError(name, problem, "swap_memory above 0, and no preemption_mode recompute")
    if not cache.enable_prefix_caching:
        problem = f"{first!r} finds blocks by the hashes of prefixes, which are not computed"
        raise ConfigError(name, problem, "leave enable_prefix_caching on")
