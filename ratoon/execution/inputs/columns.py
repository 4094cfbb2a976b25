"""The columns of a step: every input that a program reads, each declared once.

A column has one entry for each request, token or row that is read. Those of SENT are written by the host and travel to
the device with the step, those of PREPARED are made there from the rows of the branches (device_inputs.py), or on the
host for a CPU (step_inputs.py). Packing, the copy, padding and graphs go over the declarations: a new input is a line
here, and what reads it. The slots of adapters, for example, are a number of each branch in InputBatch, a column of SENT
with `of_rows` and `only_with` that name it, and one of PREPARED that repeats it for every token, from which the program
makes the AdapterRows of its pass.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import torch


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


# In the order in which programs need them: what lies behind the last one that a step has stays on the host.
SENT = (
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
    Column("adapter_slots", Per.REQUEST, torch.int32, of_rows="adapter_slots", only_with="adapter_slots"),
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
    Column("embedding_rows", Per.TOKEN, torch.int32, padding=-1),
    # The last position that a token sees, of steps in which some tokens see more than what is before them
    Column("visible_ends", Per.TOKEN, torch.int32, padding=-1, only_with="seen_whole"),
)
SENT_BY_NAME = {column.name: column for column in SENT}
SAMPLING_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "uniforms")


class PreparedColumn(NamedTuple):
    """Padding has zeros: the null block, and sequences without tokens."""

    name: str
    per: Per
    dtype: torch.dtype
    times: str | None = None  # a number of InputBatch: one for each KV group, or for each axis
    width: str | None = None  # of an entry: a number of InputBatch
    only_with: str | None = None


PREPARED = (
    PreparedColumn("input_ids", Per.TOKEN, torch.int64),
    PreparedColumn("positions", Per.TOKEN, torch.int64),  # in the sequence: those of slots and masks
    # By which heads are rotated. Without rope_rows the positions in the sequence are, and there is no such column.
    PreparedColumn("rope_positions", Per.TOKEN, torch.int64, times="rope_axes", only_with="rope_rows"),
    PreparedColumn("slot_mapping", Per.TOKEN, torch.int64, times="num_groups"),
    PreparedColumn("adapter_slots", Per.TOKEN, torch.int32, only_with="adapter_slots"),  # padding has -1
    PreparedColumn("query_start_loc", Per.BOUND, torch.int32),
    PreparedColumn("seq_lens", Per.REQUEST, torch.int32),
    PreparedColumn("block_table", Per.REQUEST, torch.int32, times="num_groups", width="max_blocks"),
    PreparedColumn("encoder_lens", Per.REQUEST, torch.int32, only_with="cross_tables"),
    PreparedColumn("cross_table", Per.REQUEST, torch.int32, width="max_cross_blocks", only_with="cross_tables"),
)


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
