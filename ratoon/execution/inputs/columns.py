"""The columns of a step: every input that a program reads, each declared once.

A column has one entry for each request, token or row that is read. Those of SENT are written by the host and travel to
the device with the step, those of PREPARED are made there from the rows of the branches (device_inputs.py), or on the
host for a CPU (step_inputs.py). Packing, the copy, padding, graphs and recorded passes go over the declarations.

An optional column is one that only some steps have. A step carries its optional columns as a mapping from names to
values; the names are a part of the key of its graph and of the shape of its recorded pass, so a step without a column
runs a program without it. It has an entry for each token or request: a column of rows that are read belongs to the end
that reads them (EndRows.columns). A new one is a line here, what makes its values (StepBatch.columns, a `ColumnSource`
of the runner) and what reads them (StepInputs.columns). The slots of adapters, for example, are a number of each branch
in InputBatch, an optional column of SENT with `of_rows` and `only_with` that name it, and one of PREPARED that repeats
it for every token, from which the program makes the AdapterRows of its pass.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from ratoon.execution.inputs.input_batch import InputBatch


class Per(enum.Enum):
    """What a column has an entry for."""

    STEP = enum.auto()
    REQUEST = enum.auto()
    BOUND = enum.auto()  # before and behind each request
    TOKEN = enum.auto()
    ROW = enum.auto()  # that is read
    SEARCH = enum.auto()  # of beams


class Column(NamedTuple):
    name: str
    per: Per
    dtype: torch.dtype
    # In the entries behind those of the step; None: what happens to be there is not read.
    padding: float | None = None
    of_rows: str | None = None  # the array of InputBatch that holds it between steps; None: the step's own
    only_with: str | None = None  # the part of InputBatch without which no program reads it
    is_optional: bool = False  # only some steps have it; such a column has padding, which says that an entry has none
    is_recorded: bool = True  # recorded passes may have it; only of an optional column


# In the order in which programs need them: what lies behind the last one that a step has stays on the host.
_SENT = (
    Column("counts", Per.STEP, torch.int32),  # requests and tokens
    Column("rows", Per.REQUEST, torch.int32),  # of the branches
    Column("num_computed", Per.REQUEST, torch.int32, of_rows="num_computed"),
    Column("query_start_loc", Per.BOUND, torch.int32),
    Column("unwritten", Per.REQUEST, torch.int32),  # 1: its keys and values go to the null block
    Column("token_cells", Per.ROW, torch.int32, padding=-1),  # of the branches, where the row's token goes; -1: nowhere
    Column("read_rows", Per.ROW, torch.int64, padding=0),  # of the step's batch
    Column("encoder_lens", Per.REQUEST, torch.int32, of_rows="encoder_lens", only_with="cross_tables"),
    # Tokens whose rope positions are listed, and what is added to the positions of those behind them
    Column("rope_lens", Per.REQUEST, torch.int32, of_rows="rope_lens", only_with="rope_rows"),
    Column("rope_deltas", Per.REQUEST, torch.int32, of_rows="rope_deltas", only_with="rope_rows"),
    Column(
        "adapter_slots", Per.REQUEST, torch.int32, padding=-1, of_rows="adapter_slots", only_with="adapter_slots",
        is_optional=True,
    ),
    # The arguments of layers.sampling.sample_plain, and which row of the masks is that of the row; -1: it has none
    Column("temperature", Per.ROW, torch.float32),
    Column("top_k", Per.ROW, torch.int64),
    Column("top_p", Per.ROW, torch.float64),
    Column("min_p", Per.ROW, torch.float32),
    Column("uniforms", Per.ROW, torch.float64),
    Column("mask_of", Per.ROW, torch.int32, padding=-1),
    # The score of a row's beam; the first row of each search among its end's, and the row behind its last
    Column("beam_scores", Per.ROW, torch.float32),
    Column("search_starts", Per.SEARCH, torch.int64, padding=0),
    Column("search_stops", Per.SEARCH, torch.int64, padding=0),
    # Runs of requests that share a prefix, one entry for each run, and the first key of a request behind its prefix
    Column("run_starts", Per.BOUND, torch.int32, padding=0),
    Column("run_firsts", Per.REQUEST, torch.int32, padding=0),
    Column("run_prefix_lens", Per.REQUEST, torch.int32, padding=0),
    Column("prefix_ends", Per.REQUEST, torch.int32, padding=0),
    # The row among the step's embeddings that is a token's input; -1: its id is
    Column("embedding_rows", Per.TOKEN, torch.int32, padding=-1, is_optional=True),
    # The last position that a token sees, of steps in which some tokens see more than what is before them
    Column(
        "visible_ends", Per.TOKEN, torch.int32, padding=-1, only_with="seen_whole",
        is_optional=True, is_recorded=False,
    ),
)  # fmt: skip
SENT = {column.name: column for column in _SENT}
SAMPLING_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "uniforms")


class PreparedColumn(NamedTuple):
    """Padding has zeros: the null block, and sequences without tokens. One with the name of a column of SENT repeats
    that for each token, its padding too."""

    name: str
    per: Per
    dtype: torch.dtype
    times: str | None = None  # a number of InputBatch: one for each KV group, or for each axis
    width: str | None = None  # of an entry: a number of InputBatch
    only_with: str | None = None
    # Only some steps have it. Where the host prepares a step, one has it if the preparation finds that it needs it, or
    # if it has the column of SENT with that name. A device prepares it for all steps, and the program reads it from
    # all of them if it has no column of SENT.
    is_optional: bool = False

    def shape(self, rows: InputBatch, num_entries: int) -> list[int]:
        """Returns the shape of the memory for so many entries."""
        times = [] if self.times is None else [getattr(rows, self.times)]
        width = [] if self.width is None else [getattr(rows, self.width)]
        return [*times, num_entries, *width]


_PREPARED = (
    PreparedColumn("input_ids", Per.TOKEN, torch.int64),
    PreparedColumn("positions", Per.TOKEN, torch.int64),  # in the sequence: those of slots and masks
    # By which heads are rotated. Without rope_rows the positions in the sequence are, and there is no such column.
    PreparedColumn(
        "rope_positions", Per.TOKEN, torch.int64, times="rope_axes", only_with="rope_rows", is_optional=True
    ),
    PreparedColumn("slot_mapping", Per.TOKEN, torch.int64, times="num_groups"),
    PreparedColumn("adapter_slots", Per.TOKEN, torch.int32, only_with="adapter_slots", is_optional=True),
    PreparedColumn("query_start_loc", Per.BOUND, torch.int32),
    PreparedColumn("seq_lens", Per.REQUEST, torch.int32),
    PreparedColumn("block_table", Per.REQUEST, torch.int32, times="num_groups", width="max_blocks"),
    PreparedColumn("encoder_lens", Per.REQUEST, torch.int32, only_with="cross_tables"),
    PreparedColumn("cross_table", Per.REQUEST, torch.int32, width="max_cross_blocks", only_with="cross_tables"),
)
PREPARED = {column.name: column for column in _PREPARED}


class TableColumn(NamedTuple):
    """Rows [N, H] that a step brings, on the device already, in the dtype of the model. They lie in new memory where
    steps run by calls, and in the same memory for all graphs."""

    name: str


_TABLES = (
    TableColumn("embedding_table"),  # the rows that `embedding_rows` names
)
TABLES = {column.name: column for column in _TABLES}


class Sizes(NamedTuple):
    """The most entries that columns have."""

    num_reqs: int
    num_tokens: int
    num_rows: int = 0

    def of(self, per: Per) -> int:
        sizes: Mapping[Per, int] = {
            Per.STEP: 2,
            Per.REQUEST: self.num_reqs,
            Per.BOUND: self.num_reqs + 1,
            Per.TOKEN: self.num_tokens,
            Per.ROW: self.num_rows,
            Per.SEARCH: self.num_rows,
        }
        return sizes[per]


# ---- the optional columns of a step ----


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """The rows of a TableColumn, in parts that follow one another."""

    parts: list[torch.Tensor]  # [n, H] each, on the device; at least one

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.parts))

    def joined(self) -> torch.Tensor:
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)


# By name, of those that a step has: an entry of each token or request, or a table
StepColumns = Mapping[str, np.ndarray | StepTable]
NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})
NO_NAMES: frozenset[str] = frozenset()
_NAMES: dict[frozenset[str], frozenset[str]] = {}


def no_columns() -> Mapping[str, Any]:
    """The default of dataclasses, which take no mapping for it."""
    return NO_COLUMNS


def names_of(columns: Mapping[str, Any]) -> frozenset[str]:
    """The names of these columns: one object for the same names, so that keys with it are soon compared."""
    if not columns:
        return NO_NAMES
    names = frozenset(columns)
    return _NAMES.setdefault(names, names)


def is_read(column: Column | PreparedColumn, rows: InputBatch) -> bool:
    """Whether a program over these rows may read it."""
    return column.only_with is None or getattr(rows, column.only_with) is not None


def are_recorded(names: frozenset[str]) -> bool:
    """Whether recorded passes may have these optional columns."""
    return all(name not in SENT or SENT[name].is_recorded for name in names)
