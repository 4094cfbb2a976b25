"""The map of an engine: what is noted while steps run agrees with what a look at everything finds."""

from __future__ import annotations

import random

from ratoon.core.engine_map import BlockCode, EngineMapReport
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreRequest
from ratoon.engine.core import EngineCore
from ratoon.engine.map import SECONDS_WITHOUT_WATCHER, ranges_of
from tests.unit.engine.test_engine_core import make_core


def request(name: str, length: int, **fields) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 6), n=fields.pop("n", 1), ignore_eos=True)
    return EngineCoreRequest(f"{name}-12345678", list(range(1, length + 1)), params, external_id=name, **fields)


class Follower:
    """A watcher that keeps what it is told."""

    def __init__(self, core: EngineCore, name: str) -> None:
        self.core, self.name = core, name
        self.codes: list[int] = []
        self.blocks: dict[str, list] = {}
        self.steps: list = []
        self.num_whole = 0

    def look(self) -> EngineMapReport:
        report = self.core.map.report(self.name)
        if report.is_whole:
            self.codes, self.num_whole = list(report.blocks), self.num_whole + 1
        for block_id, code in report.changed.items():
            self.codes[block_id] = code
        for one in report.requests:
            if one.blocks is not None:
                self.blocks[one.request_id] = one.blocks
        self.steps += report.steps
        return report


def codes_of(core: EngineCore) -> list[int]:
    """By a look at every block."""
    scheduler = core.scheduler
    held = {
        block.block_id
        for branch in scheduler.state.branches.values()
        for table in branch.block_tables
        for block in table
    }
    leased = {block.block_id for lease in scheduler.leases for table in lease.sequence.block_tables for block in table}
    codes = []
    for block in scheduler.kv_cache.pool.blocks:
        if block.block_id == 0:
            codes.append(BlockCode.NULL)
        elif block.ref_cnt == 0:
            codes.append(BlockCode.FREE if block.block_hash is None else BlockCode.CACHED)
        else:
            assert block.block_id in held | leased
            codes.append(BlockCode.USED if block.block_id in held else BlockCode.LEASED)
    return codes


def test_changes_add_up_to_the_whole_whatever_happens():
    draw = random.Random(7)
    with make_core(num_blocks=40, max_num_seqs=6) as (core, _):
        often, seldom = Follower(core, "often"), Follower(core, "seldom")
        names = []
        for turn in range(120):
            if draw.random() < 0.4:
                names.append(f"r{turn}")
                retain = draw.choice([None, 60.0])
                parent = draw.choice(names)
                same = request(
                    f"r{turn}", draw.choice([3, 9, 17]), n=draw.choice([1, 1, 3]), retain_kv=retain, owner=parent
                )
                core.add_request(same)
            if draw.random() < 0.1:
                core.abort_requests([f"{draw.choice(names or ['x'])}-12345678"])
            if draw.random() < 0.1:
                core.end_leases_of(draw.choice(names or ["x"]), None, of_any_owner=True)
            if core.can_step:
                core.step()
            report = often.look()
            assert often.codes == codes_of(core)
            assert {one.request_id for one in report.requests} == core.scheduler.state.requests.keys()
            for one in report.requests:
                tables = [
                    t for branch in core.scheduler.state.requests[one.request_id].branches for t in branch.block_tables
                ]
                ids = sorted({block.block_id for table in tables for block in table} - {0})
                assert often.blocks[one.request_id] == ranges_of(ids)
            if draw.random() < 0.1:
                seldom.look()
                assert seldom.codes == codes_of(core)
        while core.has_work():
            core.step()
        often.look()
        seldom.look()
        assert often.codes == seldom.codes == codes_of(core)
        assert often.num_whole == seldom.num_whole == 1
        assert often.steps == [*often.steps[: len(often.steps) - len(seldom.steps)], *seldom.steps]
        core.scheduler.leases.end_all()


def test_a_step_tells_what_it_did():
    with make_core(num_blocks=40) as (core, _):
        follower = Follower(core, "one")
        follower.look()
        core.add_request(request("a", 10, max_tokens=3))
        core.add_request(request("b", 5, max_tokens=3))
        while core.has_work():
            core.step()
        report = follower.look()
        assert [(step.num_prompt_tokens, step.num_decode_tokens, step.num_requests) for step in report.steps] == [
            (11, 2, 2),  # the first block of both is the same
            (0, 2, 2),
            (0, 2, 2),
        ]
        assert (report.figures.num_prompt_tokens, report.figures.num_output_tokens) == (11, 6)
        assert all(step.milliseconds >= 0 and step.waited_for in ("", "device") for step in report.steps)


def test_choices_of_a_root_are_one_lease():
    with make_core(num_blocks=40) as (core, _):
        follower = Follower(core, "one")
        follower.look()
        core.add_request(request("root", 9, n=2, retain_kv=60.0, owner="me"))
        while core.has_work():
            core.step()
        (lease,) = follower.look().leases
        assert (lease.root_id, lease.owner, lease.num_tokens) == ("root", "me", 2 * 15)
        assert core.end_leases_of("root", "another") == 0
        assert core.end_leases_of("root", "me") == 2
        assert not follower.look().leases


def test_a_watcher_that_asks_no_more_is_forgotten():
    with make_core(num_blocks=40) as (core, _):
        now = [1000.0]
        core._clock = core.map._clock = lambda: now[0]
        follower = Follower(core, "one")
        follower.look()
        assert core.map.is_watched and core.scheduler.kv_cache.pool.changed is not None
        now[0] += SECONDS_WITHOUT_WATCHER + 1
        core.add_request(request("a", 10, max_tokens=2))
        while core.has_work():
            core.step()
        assert not core.map.is_watched and core.scheduler.kv_cache.pool.changed is None
        follower.look()
        assert follower.num_whole == 2 and follower.codes == codes_of(core)


def test_ranges():
    assert ranges_of([]) == []
    assert ranges_of([1, 2, 3, 7, 9, 10]) == [(1, 3), (7, 7), (9, 10)]
