"""A decoder of the Transformers library as a LanguageModel: the library's module, with its attention over the paged
cache, and its linear layers, embeddings and head as those of native models.

The module computes everything between: norms, rotation, activations, what is scaled and how halves are joined. Weights
come from the same sources as for native models, by the names of the module's parameters, and as strictly. A step calls
the module over the rows of all requests as one text with positions of its own; only attention knows of requests.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from ratoon.core.config import ModelConfig
from ratoon.core.errors import ModelError
from ratoon.layers.adapters import AdapterRows
from ratoon.layers.attention import AttentionLayer, StepContext
from ratoon.layers.embedding import LMHead, RowEmbeddings, VocabParallelEmbedding, embed_rows
from ratoon.layers.linear import ColumnParallelLinear, Linear
from ratoon.layers.weights import Weights
from ratoon.models.base import FinalStates, LanguageModel, StreamObserver
from ratoon.models.transformers_trace import ATTENTION, TracedAttention, TracedModule, attending, trace_module

Tensor = torch.Tensor

logger = logging.getLogger(__name__)

# Tensors of older files that the library computes now.
COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias|position_ids)$")
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of rows alone and beside others


class _EndOfPass(Exception):
    """Ends a pass of which no later layer is needed."""


class _StepPass:
    """One pass over the paged cache. Attention calls come in the order of the layers."""

    def __init__(self, layers: Sequence[AttentionLayer], step: StepContext) -> None:
        self.adapters = step.adapters
        self._layers = iter(layers)
        self._step = step

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, options: Mapping[str, Any]
    ) -> Tensor:
        layer = next(self._layers)
        value_dim = v.shape[3]
        if value_dim < layer.head_dim:  # values are kept in heads of the keys' size
            v = functional.pad(v, (0, layer.head_dim - value_dim))
        q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (q, k, v))  # [T, heads, head_dim]
        found = self._step.attend(layer, q, k, v, None).view(1, q.shape[0], layer.num_heads, layer.head_dim)
        return found if value_dim == layer.head_dim else found[..., :value_dim]


class _NothingSeen:
    """A pass whose attention is zero: what is left must not depend on other rows."""

    adapters = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, options: Mapping[str, Any]
    ) -> Tensor:
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


class _Product(nn.Module):
    """In the place of a linear layer of the module: [1, T, in] → [1, T, out]."""

    def __init__(self, linear: Linear | LMHead, in_features: int, out_features: int, model: TransformersModel) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._linear = linear
        self._model = [model]  # in a list: it is no part of the module

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        return self._linear(rows, self._model[0].adapter_rows).view(*x.shape[:-1], self.out_features)


class _GivenStates(nn.Module):
    """In the place of the body, behind which the library's class computes logits. Returns the states it was given."""

    states: Tensor  # [1, R, H]

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind  # of the body's output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._kind(last_hidden_state=self.states)


class TransformersModel(LanguageModel):
    can_be_repeated = False
    adapter_rows: AdapterRows | None = None  # of the pass that runs
    _last_stream: Tensor  # [T, H] of it, before the final norm

    def __init__(self, config: ModelConfig, weights: Weights, max_position: int) -> None:
        assert config.library is not None, "a config of a native family"
        assert weights.shard.world_size == weights.stage.count == 1, "refused by fit_to_model"
        super().__init__(config, weights)
        traced = trace_module(json.loads(config.library), config.architecture, weights.source.name)
        for module in traced.root.modules():
            config_of_module: Any = getattr(module, "config", None)
            if config_of_module is not None:
                config_of_module._attn_implementation = ATTENTION
        self.layers = list(traced.layers)  # type: ignore[arg-type]  # they are called by the module alone
        self._body, self._states = traced.body, _GivenStates(traced.output)
        self._is_plain_embedding = type(traced.embedding) is nn.Embedding
        self._place_ends(traced, weights)
        self._place_products(traced, weights)
        self._place_rest(traced, weights)
        sinks = dict(traced.root.named_parameters())
        self.attention_layers = [_attention_layer(index, one, sinks) for index, one in enumerate(traced.attention)]
        self._observers: Sequence[StreamObserver] = ()
        self._num_layers: int | None = None
        for index, layer in enumerate(traced.layers):
            layer.register_forward_pre_hook(self._before_layer(index), with_kwargs=True)
        traced.layers[-1].register_forward_hook(self._behind_layers)
        parent, _, name = traced.body_name.rpartition(".")
        setattr(traced.root.get_submodule(parent), name, self._states)
        self._root = traced.root
        if self.device.type != "meta":
            self._verify_rows(weights.source.name)

    # ---- what it is built from ----

    def _place_ends(self, traced: TracedModule, weights: Weights) -> None:
        """The table of tokens and the head, with one weight where they are tied."""
        names = {id(module): name for name, module in traced.root.named_modules()}
        table, head = traced.embedding, traced.head
        self._table = table
        at = _below(weights, names[id(table)])
        self.embed = VocabParallelEmbedding(at, table.num_embeddings, table.embedding_dim)
        if not self._is_plain_embedding:
            table.weight = _parameter(self.embed.weight.floats().to(self.device, self.dtype))
        at = _below(weights, names[id(head)])
        bias = None if head.bias is None else at.take("bias", head.out_features)
        is_tied = head.weight is table.weight or self.config.tie_word_embeddings
        self.lm_head = LMHead(at, self.embed, is_tied, bias)
        product = _Product(self.lm_head, head.in_features, head.out_features, self)
        _replace(traced.root, names[id(head)], product)

    def _place_products(self, traced: TracedModule, weights: Weights) -> None:
        """Linear layers, of which Ops decides how they are kept and multiplied."""
        for name, module in list(traced.body.named_modules()):
            is_linear, is_transposed = type(module) is nn.Linear, type(module) is Conv1D
            if not (is_linear or is_transposed):
                continue
            path = f"{traced.body_name}.{name}"
            # Adapters add to rows of the step: a layer that gets some rows only is no target of theirs.
            at = _below(weights if path in traced.whole_rows else weights.replicated(), path)
            sizes = (module.in_features, module.out_features) if is_linear else (module.nx, module.nf)
            linear = ColumnParallelLinear(at, *sizes, bias=module.bias is not None, transposed=is_transposed)
            _replace(traced.body, name, _Product(linear, *sizes, self))

    def _place_rest(self, traced: TracedModule, weights: Weights) -> None:
        """All other parameters and buffers. Those that files do not have are computed by the library."""
        in_floats = tuple(getattr(traced.root, "_keep_in_fp32_modules_strict", None) or ())
        kept = {f"{traced.body_name}.{name}": one for name, one in traced.body.state_dict(keep_vars=True).items()}
        for name, parameter in kept.items():
            if parameter is traced.embedding.weight:
                continue
            dtype = torch.float32 if any(part in name for part in in_floats) else self.dtype
            at, short = _owner(traced.root, name)
            taken = weights.take(
                name, *parameter.shape, dtype=dtype if parameter.is_floating_point() else parameter.dtype
            )
            if isinstance(parameter, nn.Parameter):
                at._parameters[short] = _parameter(taken)
            else:
                at._buffers[short] = taken
        for found in list(weights.source.shapes()):
            if COMPUTED.search(found) and found not in kept:
                weights.ignore(found)
        if self.device.type == "meta":
            return
        computed = {}
        for name, buffer in list(traced.body.named_buffers()):
            if buffer.device.type == "meta":
                at, short = _owner(traced.body, name)
                at._buffers[short] = torch.empty_like(buffer, device=self.device)
                computed[id(at)] = at
        for module in computed.values():
            traced.body._init_weights(module)  # type: ignore[operator]

    def _verify_rows(self, source: str) -> None:
        """Raises ModelError if a row depends on those beside it otherwise than through attention: a convolution or a
        state over rows would mix texts of a step."""
        ids = torch.arange(3, device=self.device) % self.embed.vocab_size
        with attending(_NothingSeen()), torch.inference_mode():
            together = self._run(self.embed_tokens(ids, ids), ids)
            alone = self._run(self.embed_tokens(ids[2:], ids[2:]), ids[2:])
        error = (together[2:] - alone).abs().max().item()
        allowed = TOLERANCE.get(self.dtype, 1e-1) * max(1.0, alone.abs().max().item())
        if not error <= allowed:
            problem = f"in {self.config.architecture} a row depends on others without attention (by {error:g})"
            raise ModelError(source, problem, "a model whose rows meet in attention alone")

    # ---- a pass ----

    def embed_tokens(
        self,
        input_ids: Tensor,
        positions: Tensor,
        embeddings: RowEmbeddings | None = None,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        found = self.embed(input_ids, adapters) if self._is_plain_embedding else self._table(input_ids).to(self.dtype)
        return embed_rows(found, embeddings)

    def forward_stream(
        self,
        stream: Tensor,
        positions: Tensor,
        step: StepContext,
        rows: Tensor | None = None,
        observers: Sequence[StreamObserver] = (),
        num_layers: int | None = None,
        update: Tensor | None = None,
    ) -> FinalStates:
        self._observers, self._num_layers, self.adapter_rows = observers, num_layers, step.adapters
        try:
            with attending(_StepPass(self.attention_layers, step)):
                normed = self._run(stream, positions)
            last = self._last_stream
            return FinalStates(last, normed) if rows is None else FinalStates(last[rows], normed[rows])
        except _EndOfPass:
            return FinalStates(stream[:0], stream[:0])
        finally:
            self._observers, self._num_layers, self.adapter_rows, self._last_stream = (), None, None, stream[:0]

    def _run(self, stream: Tensor, positions: Tensor) -> Tensor:
        """[T, H], [T] → states behind the final norm [T, H]."""
        found = self._body(inputs_embeds=stream[None], position_ids=positions[None].long(), use_cache=False)
        return found[0][0]

    def _before_layer(self, index: int) -> Any:
        def see(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            for observer in self._observers:
                observer.observe(index, (args[0] if args else options["hidden_states"])[0], None)
            if self._num_layers is not None and index >= self._num_layers:
                raise _EndOfPass

        return see

    def _behind_layers(self, _: nn.Module, __: Any, output: Any) -> None:
        self._last_stream = (output[0] if isinstance(output, tuple) else output)[0]

    def compute_logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """By the library's class, whose head may be followed by a factor or a soft cap."""
        self._states.states, self.adapter_rows = hidden[None], adapters
        try:
            found = self._root(inputs_embeds=self._states.states, use_cache=False)
        finally:
            self._states.states, self.adapter_rows = hidden[None, :0], None
        return found.logits[0]


def _attention_layer(index: int, traced: TracedAttention, parameters: Mapping[str, nn.Parameter]) -> AttentionLayer:
    sinks = None if traced.sinks is None else parameters[traced.sinks].detach().float().contiguous()
    return AttentionLayer(
        index, traced.num_heads, traced.num_kv_heads, traced.head_dim, traced.scale, traced.window,
        soft_cap=traced.soft_cap, sinks=sinks,
    )  # fmt: skip


def _parameter(data: Tensor) -> nn.Parameter:
    """A parameter that the library leaves as it is when it computes what files do not have."""
    parameter = nn.Parameter(data, requires_grad=False)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def _below(weights: Weights, path: str) -> Weights:
    """The view of the tensors of the module at `path`."""
    for part in path.split("."):
        weights = weights / part
    return weights


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has this parameter, and its name there."""
    path, _, short = name.rpartition(".")
    return root.get_submodule(path), short


def _replace(root: nn.Module, path: str, module: nn.Module) -> None:
    owner, name = _owner(root, path)
    if isinstance(owner, (nn.ModuleList, nn.Sequential)):
        owner[int(name)] = module
    else:
        setattr(owner, name, module)
