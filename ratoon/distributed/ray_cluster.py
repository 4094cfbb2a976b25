"""The Ray cluster that ranks and replicas run on: the way to it, and the room that it has.

Ray is an extra of the package (`ratoon[ray]`), and is imported where it is asked for. The cluster is the one at
RAY_ADDRESS, else the one that this host belongs to.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ratoon.core.errors import ConfigError

SECONDS_TO_PLACE = 60.0  # for the cluster to have room; one that grows by itself may need to start a machine

Resources = dict[str, float]


def connect_to_ray(setting: str) -> Any:
    """Returns the module `ray`, connected to its cluster. `setting` is what asked for it."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(setting, f"{error.name} is not installed", "pip install 'ratoon[ray]'") from None
    if not ray.is_initialized():
        # In another thread than the main one, where Ray would put its own handlers of signals in place of ours
        address = os.environ.get("RAY_ADDRESS") or "auto"
        with ThreadPoolExecutor(1) as thread:
            try:
                thread.submit(ray.init, address, namespace="ratoon", logging_level=logging.ERROR).result()
            except (ConnectionError, RuntimeError, ValueError) as error:
                problem = f"no Ray cluster can be reached ({error})"
                raise ConfigError(setting, problem, "`ray start --head` on a first host, or RAY_ADDRESS") from None
    return ray


def alive_nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def room_of_rank(ray: Any, device: str, num_threads: int | None, num_ranks: int) -> tuple[str, Resources]:
    """The device of each rank, and what a rank takes of the cluster. Where nothing is set, GPUs are used if the cluster
    has as many as ranks, and otherwise all of its cores are divided among the ranks."""
    resources = [node["Resources"] for node in alive_nodes(ray)]
    num_gpus = sum(each.get("GPU", 0) for each in resources)
    if device.startswith("cuda") or (device == "auto" and num_gpus >= num_ranks):
        return "cuda:0", {"CPU": 1, "GPU": 1}  # Ray shows an actor no other GPU than its own
    cores = [each.get("CPU", 0) for each in resources]
    on_largest = math.ceil(num_ranks / max(1, sum(count > 0 for count in cores)))
    fair = min(sum(cores) // num_ranks, max(cores, default=1) // on_largest)
    return "cpu", {"CPU": num_threads or max(1, int(fair))}


def wait_for_group(ray: Any, group: Any, setting: str, count: int, each: Mapping[str, float]) -> None:
    """Waits until a placement group has its room. ConfigError: the cluster has none, and the group is given up."""
    ready, _ = ray.wait([group.ready()], timeout=SECONDS_TO_PLACE)
    if ready:
        return
    ray.util.remove_placement_group(group)
    free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
    wanted = f"{count} times {describe(each)}"
    raise ConfigError(setting, f"the Ray cluster has no room for {wanted}; it has {describe(free)} free", "more nodes")


def describe(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
