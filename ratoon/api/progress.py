"""A progress bar for batches of requests: on a terminal only, on standard error, gone when the work is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]  # (requests that ended, tokens they have)


@contextmanager
def request_progress(num_requests: int, wanted: bool, label: str = "requests") -> Iterator[Advance]:
    """Yields a function to call when requests end. In a pipe, or if not wanted, that function does nothing."""
    if not wanted or not sys.stderr.isatty():
        yield lambda num_requests, num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    begin = time.monotonic()
    num_tokens_so_far = 0
    with bar:
        task = bar.add_task(label, total=num_requests, speed="")

        def advance(num_ended: int, num_tokens: int) -> None:
            nonlocal num_tokens_so_far
            num_tokens_so_far += num_tokens
            seconds = max(time.monotonic() - begin, 1e-9)
            bar.update(task, advance=num_ended, speed=f"{num_tokens_so_far / seconds:.0f} tok/s")

        yield advance
