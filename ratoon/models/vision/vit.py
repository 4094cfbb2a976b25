"""The parts that encoders of pictures share: the embedding of patches, a pre-norm layer with attention inside runs of
rows, and the plain vision transformer with learned positions (SigLIP's structure and tensor names).

Every rank has all of an encoder (`Weights.replicated`). What an encoder's rows become for a decoder is each family's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from ratoon.core.media import MediaConfig, VisionConfig
from ratoon.layers.embedding import Embedding
from ratoon.layers.linear import ColumnParallelLinear, Linear, QKVLinear, RowParallelLinear
from ratoon.layers.mlp import MLP, FeedForward
from ratoon.layers.norm import LayerNorm, RMSNorm
from ratoon.layers.ops import Product, WeightUse
from ratoon.layers.products import make_product
from ratoon.layers.stored import StoredTensor
from ratoon.layers.weights import Weights
from ratoon.models.media_encoder import Attend

Tensor = torch.Tensor


class PatchEmbedding:
    """Pixels of patches, uint8 [T, channels · frames · side · side] → [T, H]: a convolution whose windows do not
    overlap is one product. Pixels are rescaled and normalised in float32 first."""

    def __init__(self, weights: Weights, config: MediaConfig, bias: bool, over_time: bool = False) -> None:
        """`over_time`: patches have `temporal_patch_size` frames, and so has the weight."""
        vision = config.vision
        self.dtype, self.channels = weights.dtype, vision.num_channels
        side = vision.patch_size
        frames = (vision.temporal_patch_size,) if over_time else ()
        weight = weights.take("weight", vision.hidden_size, self.channels, *frames, side, side, dtype=torch.float32)
        added = weights.take("bias", vision.hidden_size) if bias else None
        self.products = {weight[0].numel(): _product_of(weights, weight, added)}  # by the pixels of a patch
        if over_time:
            # A picture stands still: a patch of one frame is one whose frames are all equal.
            still = weight.sum(2)
            self.products[still[0].numel()] = _product_of(weights, still, added)
        scale = 255.0
        self.mean = scale * torch.tensor(config.mean, device=weights.device)[:, None]  # [channels, 1]
        self.std = scale * torch.tensor(config.std, device=weights.device)[:, None]

    def __call__(self, pixels: Tensor) -> Tensor:
        values = pixels.view(len(pixels), self.channels, -1).to(torch.float32)
        values = values.sub_(self.mean).div_(self.std).to(self.dtype).flatten(1)
        return self.products[values.shape[1]](values)


def _product_of(weights: Weights, weight: Tensor, bias: Tensor | None) -> Product:
    """The product with the weight of a convolution [out, …], with its windows flattened."""
    stored = StoredTensor.of_floats(weight.flatten(1).to(weights.dtype))
    if weights.device.type != "meta":
        stored = weights.ops.quantize(stored, WeightUse.LINEAR)
    return make_product(weights.ops, [stored], bias)


@dataclass(slots=True, eq=False)
class VisionLayer:
    """Attention inside runs of rows and feed-forward, each after a norm, each added to the residual stream."""

    attention_norm: RMSNorm | LayerNorm
    qkv: QKVLinear
    output: Linear
    mlp_norm: RMSNorm | LayerNorm
    mlp: FeedForward

    def __call__(
        self,
        stream: Tensor,
        update: Tensor | None,
        attend: Attend,
        lengths: Sequence[int],
        rotate: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor | None:
        """Adds `update` [T, H] to the stream [T, H] in place; returns the next one, or None if that is added too.
        `rotate` changes q and k in place."""
        q, k, v = self.qkv(self.attention_norm.before_product(stream, update))  # [T, heads, head_dim] each
        if rotate is not None:
            rotate(q, k)
        update = self.output.add_to(stream, attend(q, k, v, lengths))
        return self.mlp.add_to(stream, self.mlp_norm.before_product(stream, update))


class VisionTransformer:
    """Pictures of any size [channels, height, width], uint8 → one state for each patch, row by row."""

    def __init__(
        self, weights: Weights, config: MediaConfig, find_places: Callable[[int, int, int], Tensor] | None = None
    ) -> None:
        """`find_places`: the places of patches in the table of positions, as `positions_of_patches` finds them."""
        vision = config.vision
        self.config, self.find_places = vision, find_places or positions_of_patches
        embeddings = weights / "embeddings"
        self.patches = PatchEmbedding(embeddings / "patch_embedding", config, bias=True)
        self.side = vision.image_size // vision.patch_size  # patches on a side of the table of positions
        embeddings.ignore("position_ids")  # older files store them
        self.positions = Embedding(embeddings / "position_embedding", self.side**2, vision.hidden_size)
        self.device = weights.device
        layers = weights / "encoder" / "layers"
        self.layers = [_build_layer(layers / index, vision) for index in range(vision.num_layers)]
        self.final_norm = LayerNorm(weights / "post_layernorm", vision.hidden_size, vision.norm_eps)

    def __call__(self, pictures: Sequence[Tensor], attend: Attend) -> list[Tensor]:
        """The states [patches, H] of each picture after the final norm. All run as one batch."""
        grids = [[size // self.config.patch_size for size in picture.shape[1:]] for picture in pictures]
        lengths = [height * width for height, width in grids]
        patches = [self._cut(picture, *grid) for picture, grid in zip(pictures, grids, strict=True)]
        stream = self.patches(torch.cat(patches) if len(patches) > 1 else patches[0])
        places = torch.cat([self.find_places(height, width, self.side) for height, width in grids])
        stream += self.positions(places.to(self.device))
        update: Tensor | None = None
        for layer in self.layers:
            update = layer(stream, update, attend, lengths)
        states = self.final_norm(stream) if update is None else self.final_norm(update, stream)
        return list(states.split(lengths))

    def _cut(self, picture: Tensor, height: int, width: int) -> Tensor:
        """[channels, …] → [patches, channels · side · side], row by row. What is left over at the edges is dropped."""
        side, channels = self.config.patch_size, len(picture)
        whole = picture[:, : height * side, : width * side].reshape(channels, height, side, width, side)
        return whole.permute(1, 3, 0, 2, 4).reshape(height * width, -1)


def _build_layer(weights: Weights, vision: VisionConfig) -> VisionLayer:
    hidden, inner, heads = vision.hidden_size, vision.intermediate_size, vision.num_heads
    attention, mlp = weights / "self_attn", weights / "mlp"
    names = ("q_proj", "k_proj", "v_proj")
    up = ColumnParallelLinear(mlp / "fc1", hidden, inner, bias=True)
    down = RowParallelLinear(mlp / "fc2", inner, hidden, bias=True)
    return VisionLayer(
        LayerNorm(weights / "layer_norm1", hidden, vision.norm_eps),
        QKVLinear(attention, names, hidden, heads, heads, hidden // heads, bias=True),
        RowParallelLinear(attention / "out_proj", hidden, hidden, bias=True),
        LayerNorm(weights / "layer_norm2", hidden, vision.norm_eps),
        MLP(up, down, weights.ops, vision.activation),
    )


@lru_cache(maxsize=64)
def positions_of_patches(height: int, width: int, side: int) -> Tensor:
    """[height · width]: the place of each patch in a table of side × side positions, over which a picture of any size
    is spread. The arithmetic is that of transformers, step by step in float32: patches lie on borders."""
    borders = torch.arange(1 / side, 1.0, 1 / side)

    def along(count: int) -> Tensor:
        shares = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
        return torch.bucketize(shares.clamp(max=1.0 - 1e-6), borders, right=True)

    return (along(height)[:, None] * side + along(width)).flatten()
