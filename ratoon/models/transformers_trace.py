"""What a decoder of the Transformers library does, found out before its weights are read.

The module is built on the meta device, where tensors have shapes and no numbers, and run once over a few rows. The
library looks its attention up in a registry by name; the function that is registered here notes every call. So heads,
sizes, scales, windows, soft caps and sinks are those that the module computes with, and what can't be served from a
paged cache is refused with a reason before memory is spent.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from torch import nn

from ratoon.core.errors import ModelError
from ratoon.layers.torch_internals import PLAIN_TENSORS

Tensor = torch.Tensor

ATTENTION = "ratoon"  # in the registry: of a step over the paged cache; no mask is made for it
TRACED = "ratoon_traced"  # the same while a module is traced, with masks that say which keys a row sees
META = torch.device("meta")
NUM_ROWS = 3  # of a trace
ANOTHER = "another model, or a native family: `ratoon models --families` lists them"
# Tensors that modules hand to their attention and that it need not read: it gets rotated heads.
NOT_READ = ("position_ids", "cache_position", "position_embeddings")
NOT_BY_REGISTRY = "does not go through the library's registry of attention functions"
CHANGING_ROPE = ("dynamic", "longrope")


class AttentionPass(Protocol):
    """What attention calls of the library go to while a module runs."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, options: Mapping[str, Any]
    ) -> Tensor:
        """q [1, heads, T, size], k and v [1, kv_heads, T, size] → [1, T, heads, size of v]."""
        ...


_current: ContextVar[AttentionPass] = ContextVar("attention_pass")


@contextmanager
def attending(through: AttentionPass) -> Iterator[None]:
    """The attention calls of modules that run within go to `through`."""
    token = _current.set(through)
    try:
        yield
    finally:
        _current.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """The function that the library calls, in its signature."""
    return _current.get().attend(query, key, value, attention_mask, scaling, options), None


def _traced_mask(q_length: int, kv_length: int, mask_function: Any = None, **_: Any) -> Tensor:
    """A mask without numbers that carries the function by which the library would fill it."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device=META)
    mask.visible = mask_function  # type: ignore[attr-defined]
    return mask


transformers.AttentionInterface.register(ATTENTION, _attention)
transformers.AttentionInterface.register(TRACED, _attention)
transformers.AttentionMaskInterface.register(TRACED, _traced_mask)


@dataclass(frozen=True, slots=True)
class TracedAttention:
    """One attention call of the module."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: str | None  # the name of the parameter


@dataclass(frozen=True, slots=True)
class TracedModule:
    """A module without weights, and what it does."""

    root: nn.Module
    body: nn.Module  # embeddings → states behind the final norm
    body_name: str
    output: type  # of the body: a ModelOutput of the library
    layers: nn.ModuleList
    layers_name: str
    attention: list[TracedAttention]  # of each layer
    whole_rows: frozenset[str]  # linear layers that get each row of a step once, in order
    config: Any

    @property
    def embedding(self) -> nn.Embedding:
        return self.root.get_input_embeddings()  # type: ignore[operator]

    @property
    def head(self) -> nn.Linear:
        return self.root.get_output_embeddings()  # type: ignore[operator]


def trace_module(raw: Mapping[str, Any], architecture: str, source: str) -> TracedModule:
    """Builds the class `architecture` of the library for a config.json, and traces it. Raises ModelError if it can't
    run over a paged cache. `source` is for messages."""
    with _quiet():
        root = build_module(raw, architecture, source)
        return _Trace(root, architecture, source).run()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's warnings, which are about training and its own caches."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def build_module(raw: Mapping[str, Any], architecture: str, source: str) -> nn.Module:
    """The module on the meta device, whose attention goes to the pass that traces it."""
    config = _library_config(raw, source)
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        raise ModelError(source, f"transformers {transformers.__version__} has no class {architecture}", ANOTHER)
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ModelError(source, f"{architecture} has cross-attention, which the Transformers backend has not", ANOTHER)
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, Mapping))):
        if rope.get("rope_type") in CHANGING_ROPE:
            problem = f"its rope scaling {rope['rope_type']!r} rotates a row by the longest sequence beside it"
            raise ModelError(source, problem, "another rope_scaling: default, linear, llama3 or yarn")
    if getattr(config, "hidden_size_per_layer_input", None):
        raise ModelError(source, f"layers of {architecture} read token ids, not only states", ANOTHER)
    try:
        with META:
            root = model_class._from_config(config, attn_implementation=TRACED, dtype=torch.float32)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (TRACED,):
            raise ModelError(source, f"attention of {architecture} {NOT_BY_REGISTRY}", ANOTHER) from error
        problem = f"transformers {transformers.__version__} can't build {architecture} for its config ({_first(error)})"
        raise ModelError(source, problem, "a config.json of this architecture") from error
    if getattr(root, "_is_stateful", False):
        problem = f"{architecture} keeps a state that the Transformers backend has no memory for"
        raise ModelError(source, problem, ANOTHER)
    root.tie_weights()
    return root.eval().requires_grad_(False)


def _library_config(raw: Mapping[str, Any], source: str) -> Any:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        problem = f"model_type {json.dumps(model_type)} is not one of transformers {transformers.__version__}"
        raise ModelError(source, problem, "the config.json of a model that it has; code of repositories is never run")
    left_out = ("auto_map", "quantization_config")
    fields = {name: _plain(value) for name, value in raw.items() if name not in left_out}
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:
        problem = f"transformers {transformers.__version__} can't read its config ({_first(error)})"
        raise ModelError(source, problem, "a config.json as transformers writes it") from error
    return config.get_text_config(decoder=True)


def _plain(value: Any) -> Any:
    """A field in which infinity and the like, which JSON has no numbers for, are numbers again."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return float(value["__float__"]) if set(value) == {"__float__"} else {key: _plain(value[key]) for key in value}
    return value


def _first(error: Exception) -> str:
    """The first line of a message, shortened."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1][:200]


class _WatchedPositions(torch.Tensor):
    """Positions that note whether anything is computed with them."""

    was_read = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "__get__" not in getattr(func, "__name__", ""):  # not shape, device and the like
            for each in args:
                if isinstance(each, _WatchedPositions):
                    each.was_read = True
        if PLAIN_TENSORS is None:
            return super().__torch_function__(func, types, args, kwargs)
        with PLAIN_TENSORS():
            return func(*args, **(kwargs or {}))


class _Trace:
    """Runs a module on the meta device and notes what it calls."""

    def __init__(self, root: nn.Module, architecture: str, source: str) -> None:
        self.root: Any = root
        self.architecture = architecture
        self.source = source
        self.config: Any = self.root.config
        self.parameters = {id(one): name for name, one in root.named_parameters()}
        self.calls: list[TracedAttention] = []
        self.callers: list[str] = []  # the layer of each call
        self.running: list[str] = []  # modules that are being called, outermost first
        self.bodies: list[tuple[int, str, type]] = []  # how deep it was called, its name and its output
        self.windows: dict[int, tuple[Any, int | None]] = {}  # of masks, which layers share
        self.whole_rows: set[str] = set()
        self.cut_rows: set[str] = set()

    def refuse(self, problem: str, expected: str = ANOTHER) -> ModelError:
        return ModelError(self.source, problem, expected)

    def run(self) -> TracedModule:
        embedding = self.root.get_input_embeddings()
        positions = torch.arange(NUM_ROWS, device=META)[None].as_subclass(_WatchedPositions)
        rows = torch.empty(1, NUM_ROWS, embedding.weight.shape[1], device=META, dtype=embedding.weight.dtype)
        hooks = [hook for name, module in self.root.named_modules() if name for hook in self._watch(name, module)]
        experts = self._choose_experts("batched_mm")  # whose shapes do not depend on numbers
        try:
            with attending(self), torch.inference_mode():
                self.root(
                    inputs_embeds=rows,
                    position_ids=positions,
                    attention_mask=torch.ones(1, NUM_ROWS, device=META),
                    use_cache=False,
                )
        except ModelError:
            raise
        except Exception as error:
            kept = " It keeps a state beside keys and values." if self._has_other_state() else ""
            problem = f"{self.architecture} can't be followed without weights ({_first(error)}).{kept}"
            raise self.refuse(problem) from error
        finally:
            self._choose_experts(experts)
            for hook in hooks:
                hook.remove()
        if not self.calls:
            raise self.refuse(f"attention of {self.architecture} {NOT_BY_REGISTRY}, or it has none")
        if not positions.was_read:
            raise self.refuse(f"{self.architecture} reads no position_ids: rows of several texts would be mixed")
        return self._result()

    def _choose_experts(self, kind: str | None) -> str | None:
        """Chooses how experts are multiplied, in a module that has the choice. Returns what was chosen before."""
        before: str | None = getattr(self.config, "_experts_implementation", None)
        self.config._experts_implementation = kind
        return before

    def _watch(self, name: str, module: nn.Module) -> Iterator[Any]:
        def enter(*_: Any) -> None:
            self.running.append(name)

        def leave(_: Any, inputs: Any, output: Any) -> None:
            self.running.pop()
            if isinstance(output, transformers.utils.ModelOutput):
                self.bodies.append((len(self.running), name, type(output)))
            if isinstance(module, nn.Linear) and inputs:
                whole = inputs[0].shape[:-1].numel() == NUM_ROWS
                (self.whole_rows if whole and name not in self.whole_rows else self.cut_rows).add(name)

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, options: Mapping[str, Any]
    ) -> Tensor:
        if q.shape[0] != 1 or q.shape[2] != NUM_ROWS or k.shape[2] != NUM_ROWS or q.shape[3] != k.shape[3]:
            problem = f"{self.architecture} attends with queries {tuple(q.shape)} to keys {tuple(k.shape)}"
            raise self.refuse(f"{problem}: not each row to those before it")
        if q.shape[1] % k.shape[1] or v.shape[1] != k.shape[1] or v.shape[3] > k.shape[3]:
            problem = (
                f"{self.architecture} has queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
            )
            raise self.refuse(f"{problem}: heads of these sizes have no place in the paged cache")
        for name, value in options.items():
            if isinstance(value, torch.Tensor) and name not in (*NOT_READ, "s_aux"):
                raise self.refuse(f"attention of {self.architecture} reads {name!r}, which the paged cache has not")
        sinks = options.get("s_aux")
        if sinks is not None and id(sinks) not in self.parameters:
            raise self.refuse(f"attention sinks of {self.architecture} are computed, not a parameter of it")
        if mask is None and options.get("is_causal") is False:
            raise self.refuse(f"attention of {self.architecture} is not causal")
        call = TracedAttention(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            scale=float(q.shape[3] ** -0.5 if scale is None else scale),
            window=options.get("sliding_window") if mask is None else self._window_of(mask),
            soft_cap=options.get("softcap"),
            sinks=None if sinks is None else self.parameters[id(sinks)],
        )
        self.calls.append(call)
        self.callers.append(self.running[-1] if self.running else "")
        return q.new_empty(1, NUM_ROWS, q.shape[1], v.shape[3])

    def _window_of(self, mask: Any) -> int | None:
        """The window of a layer by its mask: the last row of the longest text says it, and other rows must agree. None:
        a row sees all rows before it."""
        if id(mask) in self.windows:
            return self.windows[id(mask)][1]
        visible = getattr(mask, "visible", None)
        if visible is None:
            raise self.refuse(
                f"{self.architecture} changes its attention mask: only causal ones and windows are served"
            )
        length = int(getattr(self.config, "max_position_embeddings", None) or 2048)
        keys = torch.arange(length)
        try:
            seen = {
                row: visible(0, 0, torch.tensor(row), keys) for row in {length - 1, length // 2, min(1, length - 1)}
            }
            window = int(seen[length - 1].sum())
            expected = {row: (keys <= row) & (keys > row - window) for row in seen}
            agrees = all(torch.equal(seen[row].expand(length), expected[row]) for row in seen)
        except (RuntimeError, IndexError, NotImplementedError, AttributeError):
            agrees = False
        if not agrees:
            raise self.refuse(
                f"the attention mask of {self.architecture} is neither causal nor a window of rows before"
            )
        self.windows[id(mask)] = mask, None if window == length else window
        return self.windows[id(mask)][1]

    def _has_other_state(self) -> bool:
        names = {type(module).__name__.lower() for module in self.root.modules()}
        return any(kind in name for name in names for kind in ("mamba", "deltanet", "recurrent", "shortconv", "conv1d"))

    def _result(self) -> TracedModule:
        if not self.bodies:
            raise self.refuse(f"{self.architecture} has no body apart from its head")
        _, body_name, output = min(self.bodies, key=lambda each: each[0])
        layers_name, layers = self._layers()
        for name, module in layers.named_modules():
            if isinstance(module, nn.Conv1d):
                raise self.refuse(f"layers of {self.architecture} have a convolution over rows ({name})")
        num_calls = [0] * len(layers)
        for caller in self.callers:
            if not caller.startswith(f"{layers_name}."):
                raise self.refuse(f"{self.architecture} has attention outside its layers ({caller})")
            num_calls[int(caller[len(layers_name) + 1 :].split(".")[0])] += 1
        odd = [str(index) for index, count in enumerate(num_calls) if count != 1]
        if odd:
            problem = (
                f"of the {len(layers)} layers of {self.architecture}, {len(odd)} do not attend exactly once (the first "
            )
            raise self.refuse(f"{problem}is {odd[0]}): what they keep is not keys and values of one attention")
        head = self.root.get_output_embeddings()
        width, vocabulary = self.root.get_input_embeddings().weight.shape[::-1]
        if not isinstance(head, nn.Linear) or tuple(head.weight.shape) != (vocabulary, width):
            raise self.refuse(
                f"the head of {self.architecture} is not a linear layer from states to {vocabulary} tokens"
            )
        if width != self.config.hidden_size:
            problem = f"embeddings of {self.architecture} are {width} wide, its layers {self.config.hidden_size}"
            raise self.refuse(problem, "a model of one width")
        body = self.root.get_submodule(body_name)
        whole = frozenset(self.whole_rows - self.cut_rows)
        return TracedModule(self.root, body, body_name, output, layers, layers_name, self.calls, whole, self.config)

    def _layers(self) -> tuple[str, nn.ModuleList]:
        """The list of layers: the one that the first attention is in."""
        parts = self.callers[0].split(".")
        for end in range(len(parts), 0, -1):
            name = ".".join(parts[:end])
            module = self.root.get_submodule(name)
            if isinstance(module, nn.ModuleList):
                return name, module
        raise self.refuse(f"{self.architecture} has no list of layers")
