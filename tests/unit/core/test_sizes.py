from __future__ import annotations

import pytest

from ratoon.core.errors import ConfigError
from ratoon.core.settings import engine_config
from ratoon.core.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [("2GiB", 2 * 2**30), ("512m", 512 * 2**20), ("1.5 GB", 1_500_000_000), ("4096", 4096), (77, 77), ("1KiB", 1024)],
)
def test_sizes_are_read_as_people_write_them(written, num_bytes):
    assert parse_size("kv_memory", written) == num_bytes


@pytest.mark.parametrize("written", ["", "GiB", "-1GiB", "2 apples", 0, -5, True, "0"])
def test_what_is_no_size_is_refused_by_name(written):
    with pytest.raises(ConfigError) as caught:
        parse_size("kv_memory", written)
    assert caught.value.field == "kv_memory"


def test_sizes_are_shown_in_the_unit_that_fits():
    assert [format_size(size) for size in (5, 2048, 3 * 2**20, 2**31)] == ["5 B", "2.0 KiB", "3.0 MiB", "2.0 GiB"]


@pytest.mark.parametrize("none", [0, "0", "0GiB"])
def test_no_swap_memory_is_a_choice(none):
    assert engine_config("x", swap_memory=none).cache.swap_bytes == 0
