"""What programs that measure in parts have in common: their options, a run, the report, and the result as JSON.

What is measured, and with which engines, is a program's own.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cpu_peers import QUIET_LIMIT_SECONDS, say
from peers.machine import QUIET_SHARE, describe_machine, usable_cores, wait_for_quiet_machine
from peers.process import EngineFailedError, EngineProcess


class Program(ABC):
    """One run: its options, the engines that it has started, and what was measured so far."""

    precision = "fp32"  # of the weights

    def __init__(self, args: argparse.Namespace, model: str, sizes: Any) -> None:
        self.args = args
        self.model = model  # its name, for the report
        self.sizes = sizes  # a dataclass
        self.engines: list[tuple[str, EngineProcess]] = []
        self.parts: dict[str, dict[str, Any]] = {}

    @abstractmethod
    def measure(self) -> None:
        """Fill `parts`. Every engine is made known with `add_engine`, and ended."""

    @abstractmethod
    def format_part(self, part: str) -> str:
        """A table."""

    @abstractmethod
    def draw(self, path: Path, title: str) -> None:
        """A picture of all parts."""

    def add_engine(self, stack: ExitStack, name: str, engine: EngineProcess) -> EngineProcess:
        """It ends with the stack. The caller starts it."""
        say(f"start-up: {name}")
        stack.callback(engine.close)
        self.engines.append((name, engine))
        return engine

    def run(self) -> int:
        """The exit status."""
        args = self.args
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that engines are ended
        quiet: bool | None = None
        if not args.no_wait:
            say("waiting for a quiet machine")
            quiet = wait_for_quiet_machine(QUIET_LIMIT_SECONDS)
        try:
            self.measure()
        except EngineFailedError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
        self._print_report(quiet)
        if args.json:
            args.json.write_text(json.dumps(self._as_dict(quiet), indent=2) + "\n", encoding="utf-8")
        if args.plot:
            self.draw(args.plot, f"{self.model}, {self.precision}, {args.threads} threads, {describe_machine()['cpu']}")
        return 0

    @property
    def _foreign_shares(self) -> list[float]:
        return [share for _, engine in self.engines for share in engine.foreign_shares]

    @property
    def _versions(self) -> dict[str, dict[str, str]]:
        return {name: engine.versions for name, engine in self.engines}

    def _print_report(self, quiet: bool | None) -> None:
        args, machine = self.args, describe_machine()
        print(f"{self.model} in {self.precision}, {args.threads} threads, {args.rounds} rounds; ", end="")
        print(f"{machine['cpu']}, {machine['cores']} cores")
        for name, versions in self._versions.items():
            print(f"  {name}: " + ", ".join(f"{package} {version}" for package, version in versions.items()))
        if args.quick:
            print("  Quick sizes: this shows that the program works. The figures mean nothing.")
        print("Median (min–max). Ratios are taken round by round; against a peer, above 1, Ratoon is the faster one.")
        for part in self.parts:
            print(f"\n{self.format_part(part)}")
        disturbed = [share for share in self._foreign_shares if share > QUIET_SHARE]
        if disturbed:
            print(
                f"\nWarning: other programs used up to {max(disturbed):.0%} of the machine in {len(disturbed)} of "
                f"{len(self._foreign_shares)} longer measurements."
            )
        if quiet is False:
            print(f"\nWarning: the machine did not get quiet within {QUIET_LIMIT_SECONDS} s.")

    def _as_dict(self, quiet: bool | None) -> dict[str, Any]:
        return {
            "machine": describe_machine(),
            "model": self.model,
            "dtype": self.precision,
            "threads": self.args.threads,
            "rounds": self.args.rounds,
            "quick": self.args.quick,
            "quiet_at_start": quiet,
            "sizes": asdict(self.sizes),
            "versions": self._versions,
            "parts": self.parts,
            "foreign_cpu_share": self._foreign_shares,
        }


def add_options(parser: argparse.ArgumentParser, parts: Iterable[str]) -> None:
    parser.add_argument("--parts", default=",".join(parts), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=len(usable_cores()), metavar="N", help="default: all cores")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write everything that was measured")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw it (needs matplotlib)")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for a quiet machine")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round: does it work at all?")


def settle_options(parser: argparse.ArgumentParser, args: argparse.Namespace, parts: Iterable[str]) -> None:
    """Checked, and in the form that a Program wants."""
    args.parts = verify_names(parser, "--parts", args.parts.split(","), parts)
    if args.quick:
        args.rounds = 1
    for option in ("rounds", "threads"):
        if getattr(args, option) < 1:
            parser.error(f"--{option}: {getattr(args, option)}; expected at least 1")


def verify_names(parser: argparse.ArgumentParser, option: str, names: list[str], known: Iterable[str]) -> list[str]:
    known = list(known)
    if not set(names) <= set(known) or len(set(names)) != len(names):
        parser.error(f"{option}: {','.join(names)}; expected each of these once at most: {', '.join(known)}")
    return names


def in_turn(names: Iterable[str], round_index: int) -> list[str]:
    """Another one goes first in every round."""
    names = list(names)
    first = round_index % len(names)
    return names[first:] + names[:first]
