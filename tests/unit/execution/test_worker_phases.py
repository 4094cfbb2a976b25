"""A worker comes up in phases, with plain data between them. The pool is allocated when its size is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ratoon.core.config import CacheConfig, EngineConfig, ModelConfig
from ratoon.core.errors import ConfigError
from ratoon.core.media import MediaConfig, VisionConfig
from ratoon.core.worker import PoolSize, agree_on_pool
from ratoon.execution.worker import Worker
from ratoon.layers.native_ops import native_ops_reasons
from ratoon.layers.shard import ModelPart, Shard
from ratoon.models.build import collect_shapes
from ratoon.models.dummy_source import DummySource
from ratoon.observe.startup import StartupTimer
from tests.unit.layers.ranks import Meeting, Rank
from tests.unit.models.test_build_model import LLAMA

MODEL = replace(LLAMA, num_kv_heads=2)
BLOCK_SIZE = 4


def worker(
    part: ModelPart | None = None, model: ModelConfig = MODEL, block_size: int = BLOCK_SIZE, **cache: object
) -> Worker:
    cache_config = CacheConfig(block_size=block_size, **cache)  # type: ignore[arg-type]
    config = EngineConfig("x", device="cpu", num_threads=1, cache=cache_config)
    return Worker(config, model, DummySource(collect_shapes(model)), StartupTimer(), part or ModelPart())


def test_each_phase_tells_what_it_found() -> None:
    made = worker(num_blocks=9)
    choices = made.choose()
    assert (choices.device, choices.dtype, choices.max_model_len) == ("cpu", "float32", MODEL.max_position)
    num_weights = sum(torch.Size(shape).numel() for shape in collect_shapes(MODEL).values())
    assert made.load().num_bytes == 4 * num_weights
    measured = made.measure()
    assert measured.pool == PoolSize(9) and measured.token_seconds is None
    assert not hasattr(made, "runner")
    facts = made.allocate(measured.pool)
    assert facts.kv_config.num_blocks == 9 and facts.weight_bytes == 4 * num_weights
    made.warm_up()
    assert made.stats.num_computed_tokens == 0 and made.stats.graphs is None
    made.close()


def test_room_for_rows_of_images_is_left_beside_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pipeline by its first stage, which has the encoder."""
    monkeypatch.setattr("ratoon.execution.kv.kv_memory.free_memory", lambda device: 2 * 2**20)
    vision = VisionConfig(8, 16, 1, 2, patch_size=4)
    seeing = replace(MODEL, media=MediaConfig("fake", vision, image_token_id=3))
    sizes = {}
    for name, model in (("text", MODEL), ("seeing", seeing)):
        made = worker(model=model, memory_fraction=0.5, encoder_cache_size=1024)
        made.choose()
        made.load()
        sizes[name] = made.measure().pool.num_blocks
    bytes_per_block = 2 * 4 * 2 * 4 * 4 * 2
    assert sizes["text"] - sizes["seeing"] == 1024 * MODEL.hidden_size * 4 // bytes_per_block


def test_a_gpu_keeps_room_for_embeddings_that_a_text_model_may_read() -> None:
    made = worker(num_blocks=9, encoder_cache_size=1024)
    made.choose()
    assert made._bytes_of_media() == 0
    made._device = torch.device("cuda")
    assert made._bytes_of_media() == 1024 * MODEL.hidden_size * 4


def test_ranks_with_different_memory_allocate_the_smaller_pool() -> None:
    meeting = Meeting(2)
    bytes_per_block = 2 * 4 * 1 * 4 * 4 * 2  # keys and values, tokens, a head, numbers, their bytes, layers
    ranks = [
        worker(ModelPart(Shard(rank, 2, Rank(meeting, rank))), memory_bytes=count * bytes_per_block)
        for rank, count in enumerate((9, 6))
    ]
    for made in ranks:
        made.choose()
        made.load()
    measured = [made.measure() for made in ranks]
    assert [one.pool.num_blocks for one in measured] == [9, 6]
    facts = [made.allocate(agree_on_pool(measured)) for made in ranks]
    assert [one.kv_config.num_blocks for one in facts] == [6, 6]
    assert {one.kv_config.bytes_per_block for one in facts} == {bytes_per_block}
    assert all(made.runner.kv._tensors[0].shape[0] == 6 for made in ranks)


def test_what_can_not_work_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker(num_blocks=9)
    made._config = replace(made._config, attention_backend="triton", quantization="none")
    monkeypatch.setattr(DummySource, "read", lambda *args: pytest.fail("a tensor was read"))
    with pytest.raises(ConfigError, match="attention_backend"):
        made.choose()


@pytest.mark.skipif(bool(native_ops_reasons(torch.device("cpu"), torch.float32)), reason="no kernels here")
@pytest.mark.parametrize("can_be_recorded", [False, True])
def test_passes_are_recorded_only_with_a_collective_that_allows_it(can_be_recorded: bool) -> None:
    collective = Rank(Meeting(2), 0)
    collective.can_be_recorded = can_be_recorded
    for part, expected in ((ModelPart(), True), (ModelPart(Shard(0, 2, collective)), can_be_recorded)):
        made = worker(part, replace(MODEL, head_dim=16), block_size=16, num_blocks=9)  # what kernels take
        made.choose()
        made.load()
        made.allocate(made.measure().pool)
        assert (made.runner.recorded is not None) == expected
        made.close()
