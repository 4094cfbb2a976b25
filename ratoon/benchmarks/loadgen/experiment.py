"""A whole load run: detect what the server supports, warm up, run the rounds."""

from __future__ import annotations

import random

from ratoon.api.options import status
from ratoon.api.progress import request_progress
from ratoon.api.remote.client import RemoteClient
from ratoon.api.remote.options import choose_model
from ratoon.benchmarks.loadgen import datasets
from ratoon.benchmarks.loadgen.datasets import Session, Sources
from ratoon.benchmarks.loadgen.run import LoadRunner, Round, arrival_times
from ratoon.benchmarks.loadgen.settings import LoadSettings
from ratoon.benchmarks.loadgen.target import Target, examine

MAKERS = {
    "random": datasets.random_sessions,
    "shared-prefix": datasets.shared_prefix_sessions,
    "multi-turn": datasets.multi_turn_sessions,
}


async def measure(client: RemoteClient, settings: LoadSettings, model: str | None) -> tuple[Target, list[Round]]:
    """Measures all rounds. If cancelled during a round, it returns the results so far."""
    has_file = settings.file_sessions is not None
    async with client:
        with status(f"asking {client.url}"):
            model = await choose_model(client, model)
            target = await examine(
                client, model, settings.chat, settings.ignore_eos, settings.fields, token_ids=not has_file
            )
            await warm_up(client, target, settings)
        return target, await run_rounds(client, target, settings)


async def warm_up(client: RemoteClient, target: Target, settings: LoadSettings) -> None:
    """Requests of the same form and other words. One that fails ends the run before anything is measured."""
    sessions = datasets.random_sessions(settings.shape, target.maker, Sources.of(settings.seed, "warm-up"))
    for session in sessions[: settings.num_warmup]:
        await client.stream(target.path, target.body(session[0], []), lambda chunks: None)


async def run_rounds(client: RemoteClient, target: Target, settings: LoadSettings) -> list[Round]:
    runner = LoadRunner(client, target, settings.concurrency, settings.think_time)
    rounds: list[Round] = []
    with request_progress(settings.repeat * settings.shape.num_requests, wanted=True) as advance:
        for number in range(settings.repeat):
            sessions = make_sessions(settings, target, number)
            source = random.Random(f"{settings.seed}, arrivals")  # all rounds have the same load
            arrivals = arrival_times(len(sessions), settings.request_rate, settings.burstiness, source)
            one = await runner.run(sessions, arrivals, lambda record: advance(1, record.num_output_tokens))
            rounds.append(one)
            if one.interrupted:
                break
    return rounds


def make_sessions(settings: LoadSettings, target: Target, number: int) -> list[Session]:
    """The sessions of a round."""
    if settings.file_sessions is not None:
        return settings.file_sessions
    # Runs of another shape get other words too, so that they do not find cached prompts of earlier ones.
    sources = Sources.of(settings.seed, f"{settings.dataset}, {settings.shape}, round {number}")
    return MAKERS[settings.dataset](settings.shape, target.maker, sources)
