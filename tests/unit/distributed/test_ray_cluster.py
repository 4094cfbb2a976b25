"""What is asked of a Ray cluster, without one."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ratoon.core.errors import ConfigError
from ratoon.distributed.ray_cluster import connect_to_ray, room_of_rank
from ratoon.distributed.ray_worker import Inbox


class Nodes:
    """The module `ray`, of a cluster with these nodes."""

    def __init__(self, *resources: dict[str, float]) -> None:
        self._resources = resources

    def nodes(self) -> list[dict[str, Any]]:
        lost = {"Alive": False, "Resources": {"CPU": 1000.0, "GPU": 1000.0}}
        return [{"Alive": True, "Resources": each} for each in self._resources] + [lost]


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"executor: ray is not installed.*pip install 'ratoon\[ray\]'"):
        connect_to_ray("executor")


@pytest.mark.parametrize(
    ("nodes", "device", "num_threads", "num_ranks", "expected"),
    [
        ([{"CPU": 16.0}, {"CPU": 16.0}], "auto", None, 2, ("cpu", {"CPU": 16})),
        ([{"CPU": 16.0}, {"CPU": 16.0}], "auto", None, 4, ("cpu", {"CPU": 8})),
        ([{"CPU": 16.0}, {"CPU": 16.0}], "cpu", 3, 4, ("cpu", {"CPU": 3})),
        ([{"CPU": 2.0}], "cpu", None, 4, ("cpu", {"CPU": 1})),
        ([{"CPU": 16.0, "GPU": 8.0}], "auto", None, 8, ("cuda:0", {"CPU": 1, "GPU": 1})),
        ([{"CPU": 16.0, "GPU": 1.0}], "auto", None, 2, ("cpu", {"CPU": 8})),
        ([{"CPU": 16.0}], "cuda", None, 2, ("cuda:0", {"CPU": 1, "GPU": 1})),
    ],
)
def test_ranks_take_gpus_or_share_the_cores(
    nodes: list[dict[str, float]], device: str, num_threads: int | None, num_ranks: int, expected: Any
) -> None:
    assert room_of_rank(Nodes(*nodes), device, num_threads, num_ranks) == expected


def test_messages_are_read_in_the_order_of_their_numbers() -> None:
    inbox = Inbox()
    for number in (2, 0, 1):
        inbox.put(number, [bytes([number])])
    for number in range(3):
        with inbox.read(1.0) as frames:
            assert frames == [bytes([number])]
