"""The `ratoon` command: the commands of api and those of benchmarks, in one command line.

It is above the rooms, so that api does not import benchmarks. The command line itself is in api/cli.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ratoon.api import cli
from ratoon.benchmarks import bench

COMMANDS = (*cli.COMMANDS, bench)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(argv, COMMANDS)


if __name__ == "__main__":
    sys.exit(main())
