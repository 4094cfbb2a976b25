"""Owners that share steps: how long a short request of one takes beside the load of another, in the time of a machine
that is made up: a step takes so long, and longer with every token."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from ratoon.core.plan import SchedulerOutput
from ratoon.scheduling.scheduler import Scheduler
from ratoon.scheduling.shares import SECONDS_TO_RETURN
from tests.unit.scheduling.steps import add, answer_of, scheduler_of

SLOW_TOKENS, FREE_TOKENS = (0.004, 0.005), (0.010, 0.00002)  # as on a CPU, as on a GPU: a step, and each token of it


@dataclass
class Machine:
    scheduler: Scheduler
    fixed: float
    each: float
    each_read: float = 0.0  # in addition, for a prompt's token whose log-probabilities are read
    now: float = 1000.0
    tokens: dict[str, list[float]] = field(default_factory=dict)  # when they came, by request
    ended: dict[str, float] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)  # requests with log-probabilities of their prompts

    def step(self) -> SchedulerOutput:
        self.scheduler.tick(self.now)
        plan = self.scheduler.schedule()
        assert not plan.is_void, "nothing runs, although requests wait"
        num_read = sum(count for name, count in plan.num_scheduled_tokens.items() if count > 1 and name in self.read)
        self.now += self.fixed + self.each * plan.total_num_scheduled_tokens + self.each_read * num_read
        for output in self.scheduler.update_from_output(plan, answer_of(plan), self.now):
            self.tokens.setdefault(output.request_id, []).append(self.now)
            if output.finished:
                self.ended[output.request_id] = self.now
        self.scheduler.check()
        return plan

    def run_until(self, request_id: str, most: int = 5000) -> None:
        for _ in range(most):
            if request_id in self.ended:
                return
            self.step()
        raise AssertionError(f"{request_id} does not end")

    def ask(self, request_id: str, owner: str) -> float:
        """Seconds of a short request, from now on."""
        start = self.now
        add(self.scheduler, request_id, 10, max_tokens=8, owner=owner, arrival=self.now)
        self.run_until(request_id)
        return self.ended[request_id] - start

    def gap(self, request_id: str) -> float:
        times = self.tokens[request_id]
        return max(after - before for before, after in itertools.pairwise(times))


def machine_of(costs: tuple[float, float], **config: int) -> Machine:
    return Machine(scheduler_of(num_blocks=6000, max_model_len=2500, **config), *costs)


def load_prompts(machine: Machine) -> None:
    for number in range(32):
        add(machine.scheduler, f"a{number}", 1900, max_tokens=4, owner="ada")


def load_prompt_logprobs(machine: Machine) -> None:
    for number in range(32):
        add(machine.scheduler, f"a{number}", 1900, max_tokens=4, owner="ada", prompt_logprobs=5)
        machine.read.add(f"a{number}")


def load_prompts_of_both_kinds(machine: Machine) -> None:
    """What steps take without log-probabilities is known all the time."""
    machine.each_read = machine.each + machine.fixed / 16
    for number in range(32):
        if number % 2:
            machine.read.add(f"a{number}")
        options = {"prompt_logprobs": 5} if number % 2 else {}
        add(machine.scheduler, f"a{number}", 1900, max_tokens=4, owner="ada", **options)


def load_streams(machine: Machine) -> None:
    for number in range(200):
        add(machine.scheduler, f"a{number}", 8, max_tokens=400, owner="ada")


def load_queue(machine: Machine) -> None:
    for number in range(400):
        add(machine.scheduler, f"a{number}", 12, max_tokens=30, owner="ada")


@pytest.mark.parametrize("costs", [SLOW_TOKENS, FREE_TOKENS])
@pytest.mark.parametrize(
    "load", [load_prompts, load_prompt_logprobs, load_prompts_of_both_kinds, load_streams, load_queue]
)
@pytest.mark.one_in(3)
def test_a_short_request_beside_another_owners_load_takes_at_most_four_times_as_long(costs, load) -> None:
    machine = machine_of(costs)
    idle = machine.ask("b0", "bob")
    idle_gap = machine.gap("b0")
    load(machine)
    for _ in range(12):  # the load has the engine to itself
        machine.step()
    for number in range(1, 4):
        assert machine.ask(f"b{number}", "bob") <= 4 * idle
        assert machine.gap(f"b{number}") <= 1.9 * idle_gap, "its tokens come at half the rate, and some time is left"


def test_an_owner_alone_has_whole_steps() -> None:
    machine = machine_of(SLOW_TOKENS)
    load_prompts(machine)
    assert machine.step().total_num_scheduled_tokens == 2048
    for _ in range(8):
        assert machine.step().total_num_scheduled_tokens > 1900


def test_an_owner_has_whole_steps_again_when_others_have_been_away_for_long() -> None:
    machine = machine_of(SLOW_TOKENS)
    machine.ask("b", "bob")
    load_prompts(machine)
    assert machine.step().total_num_scheduled_tokens < 20, "the other may return any moment"
    machine.now += SECONDS_TO_RETURN
    assert machine.step().total_num_scheduled_tokens == 2048


def test_two_owners_with_much_to_do_have_large_steps() -> None:
    machine = machine_of(FREE_TOKENS)
    load_streams(machine)
    for number in range(50):
        add(machine.scheduler, f"b{number}", 8, max_tokens=400, owner="bob")
    for _ in range(40):
        machine.step()
    assert machine.step().total_num_scheduled_tokens == 250


def test_streams_of_an_owner_take_turns() -> None:
    machine = machine_of(SLOW_TOKENS)
    machine.ask("c", "bob")
    for number in range(12):
        add(machine.scheduler, f"a{number}", 4, max_tokens=2000, owner="ada")
    add(machine.scheduler, "b", 4, max_tokens=2000, owner="bob")
    for _ in range(400):
        machine.step()
    counts = [len(machine.tokens[f"a{number}"]) for number in range(12)]
    assert min(counts) > 20 and max(counts) - min(counts) <= 2, "each gets as many tokens as another"


def test_prompts_of_an_owner_are_computed_although_its_streams_fill_its_part() -> None:
    machine = machine_of(SLOW_TOKENS)
    machine.ask("c", "bob")
    for number in range(12):
        add(machine.scheduler, f"a{number}", 4, max_tokens=2000, owner="ada")
    add(machine.scheduler, "b", 4, max_tokens=2000, owner="bob")
    for _ in range(100):
        machine.step()
    add(machine.scheduler, "prompt", 100, max_tokens=1, owner="ada")
    machine.run_until("prompt", 400)


def test_work_of_both_owners_ends_although_there_are_more_owners_than_tokens_in_a_step() -> None:
    machine = machine_of(SLOW_TOKENS, max_num_batched_tokens=2)
    for number in range(5):
        add(machine.scheduler, f"r{number}", 9, max_tokens=5, owner=f"owner-{number}")
    for number in range(5):
        machine.run_until(f"r{number}", 500)
