"""Persistent state of every branch the runner knows: a row of token ids, block tables, counts. No step inputs.

A branch keeps its row until it is dropped; steps gather from the rows by index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ratoon.core.kv import NULL_BLOCK
from ratoon.core.params import SamplingParams
from ratoon.core.plan import BlockCopy, BlockIds, EmbeddingSpan, InputOverrides, NewRequestData
from ratoon.execution.inputs.row_writes import NoRowWrites, RowWrites

BLOCKS_TO_COMPARE = 256  # of a table: prefixes that are equal so far may be apart behind it
COLUMNS_TO_COMPARE = 16  # of tables: the first in which rows of a step part


class InputBatch:
    """`token_ids` [rows, max_model_len] and one block table [rows, max_blocks] for each KV group. For a model with an
    encoder also `cross_tables` [rows, blocks of the longest encoder input].

    All of them lie one after the other in `memory`, so that a device can have a copy of it (device_inputs.py), to which
    the writes that are noted in `journal` are repeated.
    """

    def __init__(
        self,
        max_rows: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        journal: RowWrites | None = None,
        max_encoder_len: int = 0,
        cross_block_size: int = 1,
        rope_axes: int = 0,
        has_adapters: bool = False,
        attends_both_ways: bool = False,
    ) -> None:
        """`block_sizes`: tokens in a block of each KV group; `cross_block_size`: the same of cross-attention.
        `rope_axes`: of the rope positions that branches may bring; 0: they bring none. `has_adapters`: whether branches
        may have adapters. `attends_both_ways`: whether the rows of an image see each other."""
        self.num_groups = num_groups = len(block_sizes)
        self.rope_axes = rope_axes
        self.max_model_len = max_model_len
        self.block_sizes = np.array(block_sizes, np.int64)  # [groups]
        self.cross_block_size = cross_block_size
        self.max_blocks = -(-max_model_len // min(block_sizes))  # tables are as wide as the longest
        self.max_cross_blocks = -(-max_encoder_len // cross_block_size)
        width = max_model_len + num_groups * self.max_blocks + self.max_cross_blocks + rope_axes * max_model_len
        # np.zeros commits pages when they are written, so a large table costs only what is used of it.
        self.memory = np.zeros(max_rows * width, np.int32)
        self.journal = NoRowWrites() if journal is None else journal
        self.tables_start = max_rows * max_model_len  # in `memory`
        self.cross_start = self.tables_start + num_groups * max_rows * self.max_blocks
        self.token_ids = self.memory[: self.tables_start].reshape(max_rows, max_model_len)
        tables = self.memory[self.tables_start : self.cross_start].reshape(num_groups, max_rows, self.max_blocks)
        self.block_tables = list(tables)
        self.cross_tables: np.ndarray | None = None
        self.rope_start = self.cross_start + max_rows * self.max_cross_blocks
        if max_encoder_len:
            cross = self.memory[self.cross_start : self.rope_start]
            self.cross_tables = cross.reshape(max_rows, self.max_cross_blocks)
        self.rope_rows: np.ndarray | None = None  # [rows, axes, max_model_len]
        if rope_axes:
            self.rope_rows = self.memory[self.rope_start :].reshape(max_rows, rope_axes, max_model_len)
        self.rope_lens = np.zeros(max_rows, np.int32)  # tokens whose rope positions are in rope_rows
        self.rope_deltas = np.zeros(max_rows, np.int32)  # what those behind them add to their positions
        self.embeddings: dict[int, Sequence[EmbeddingSpan]] = {}  # of rows that have some
        self.embedding_ends = np.zeros(max_rows, np.int64)  # positions behind which all inputs are token ids
        # Of rows that have some: the first and the last position of images whose rows see each other, in order. None:
        # the model has none such.
        self.seen_whole: dict[int, list[tuple[int, int]]] | None = {} if attends_both_ways else None
        self.encoder_lens = np.zeros(max_rows, np.int32)
        self.adapter_slots: np.ndarray | None = np.full(max_rows, -1, np.int32) if has_adapters else None
        self.num_tokens = np.zeros(max_rows, np.int64)
        self.num_computed = np.zeros(max_rows, np.int64)
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.seeds = np.zeros(max_rows, np.uint64)
        self.params: list[SamplingParams | None] = [None] * max_rows
        self.num_with_prompt_logprobs = 0  # branches that ask for those of their prompts
        self.row_of: dict[str, int] = {}
        self.num_blocks = np.zeros((num_groups, max_rows), np.int64)
        self.num_table_changes = 0  # of blocks in tables, but for those that were appended
        self._ordered: tuple[tuple[int, ...], int] = (), 0  # the rows and tables that `_order` was found for
        self._order: list[int] | None = None
        self._free_rows = list(range(max_rows - 1, -1, -1))  # lowest first

    def __len__(self) -> int:
        return len(self.row_of)

    def add(self, new: NewRequestData) -> int:
        if new.req_id in self.row_of:
            raise ValueError(f"branch {new.req_id!r} has a row already")
        if not self._free_rows:
            raise ValueError(f"no row left for branch {new.req_id!r}: all {len(self.params)} are taken")
        row = self._free_rows.pop()
        self.row_of[new.req_id] = row
        self.num_table_changes += 1
        count, start = len(new.token_ids), new.num_computed_tokens
        packed = np.frombuffer(new.packed_prompt, np.int32)
        if start < len(packed):  # those before `start` are not read
            self.token_ids[row, start : len(packed)] = packed[start:]
        listed = max(start, len(packed))
        self.token_ids[row, listed:count] = new.token_ids[listed:]
        self.note_tokens(row, start, count - start)
        self.num_tokens[row] = count
        self.num_prompt[row] = new.num_prompt_tokens
        self.num_computed[row] = new.num_computed_tokens
        self.seeds[row] = new.seed
        self.params[row] = params = new.params if isinstance(new.params, SamplingParams) else None
        self.num_with_prompt_logprobs += params is not None and params.prompt_logprobs is not None
        self.append_blocks(row, new.block_ids)
        self.set_cross_table(row, new.cross_block_ids, new.num_encoder_positions)
        self.set_overrides(row, new.overrides)
        if new.adapter_slot >= 0:
            self.set_adapter(row, new.adapter_slot)
        return row

    def drop(self, req_id: str) -> int | None:
        """The row that became free, or None when the branch had none."""
        row = self.row_of.pop(req_id, None)
        if row is not None:
            params, self.params[row] = self.params[row], None
            self.num_with_prompt_logprobs -= params is not None and params.prompt_logprobs is not None
            for table, counts in zip(self.block_tables, self.num_blocks, strict=True):
                table[row, : counts[row]] = NULL_BLOCK
                counts[row] = 0
            self.encoder_lens[row] = 0
            if self.adapter_slots is not None:
                self.adapter_slots[row] = -1
            self._clear_overrides([row])
            self._free_rows.append(row)
        return row

    def take(self, count: int) -> np.ndarray:
        """Rows that have no branch id of their own (beams, spans)."""
        if count > len(self._free_rows):
            raise ValueError(f"{count} rows asked for, {len(self._free_rows)} are free")
        return np.array([self._free_rows.pop() for _ in range(count)])

    def give_back(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        for table, counts in zip(self.block_tables, self.num_blocks, strict=True):
            table[rows, : counts[rows].max()] = NULL_BLOCK
            counts[rows] = 0
        self.encoder_lens[rows] = 0
        if self.adapter_slots is not None:
            self.adapter_slots[rows] = -1
        self._clear_overrides(rows.tolist())
        self._free_rows += rows.tolist()

    def append_blocks(self, row: int, block_ids: BlockIds) -> None:
        for group, (table, counts, ids) in enumerate(zip(self.block_tables, self.num_blocks, block_ids, strict=True)):
            if ids:
                start = counts[row]
                table[row, start : start + len(ids)] = ids
                counts[row] = start + len(ids)
                self._note_blocks(group, row, int(start), len(ids))

    def set_tables(self, rows: np.ndarray, block_ids: Sequence[BlockIds]) -> None:
        """Set the block tables of rows that have none yet. Behind them, what a device gets is undefined."""
        for group, (table, counts) in enumerate(zip(self.block_tables, self.num_blocks, strict=True)):
            lengths = [len(of_row[group]) for of_row in block_ids]
            for row, of_row, length in zip(rows.tolist(), block_ids, lengths):
                table[row, :length] = of_row[group]
            counts[rows] = lengths
            self._note_blocks(group, rows, 0, max(lengths))

    def set_cross_table(self, row: int, block_ids: list[int], num_positions: int) -> None:
        """Set what the row's cross-attention reads. It does not change while the branch has the row."""
        if self.cross_tables is not None:
            self.cross_tables[row, : len(block_ids)] = block_ids
            self.note_cross_table(row)
            self.encoder_lens[row] = num_positions

    def set_adapter(self, rows: int | np.ndarray, slot: int) -> None:
        """Sets the slot of the rows' adapter. It does not change while a branch has the row. Raises ValueError if there
        are no slots."""
        if self.adapter_slots is None:
            raise ValueError(f"a branch has the adapter in slot {slot}, and there are no slots")
        self.adapter_slots[rows] = slot

    def set_overrides(self, row: int, overrides: InputOverrides | None) -> None:
        """Set what the model reads in place of the row's ids and positions. It does not change while the branch has the
        row. Raises ValueError for positions that the model has not."""
        if overrides is None:
            return
        if overrides.embeddings:
            self.embeddings[row] = overrides.embeddings
            self.embedding_ends[row] = max(span.start + span.length for span in overrides.embeddings)
            if self.seen_whole is not None:
                images = [span for span in overrides.embeddings if not span.is_causal]
                self.seen_whole[row] = sorted((span.start, span.start + span.length - 1) for span in images)
        if overrides.rope_positions or overrides.rope_delta:
            if self.rope_rows is None:
                raise ValueError("a branch has rope positions of its own, and the model declares none")
            listed = np.frombuffer(overrides.rope_positions, np.int32).reshape(self.rope_axes, -1)
            count, delta, longest = listed.shape[1], overrides.rope_delta, self.max_model_len
            is_inside = count <= longest and listed.min(initial=0) >= 0 and listed.max(initial=0) < longest
            if not is_inside or not 0 <= count + delta <= longest:
                problem = f"{count} rope positions up to {listed.max(initial=0)} and a delta of {delta}"
                raise ValueError(f"{problem}: positions must be below {longest}, and go on from 0 to {longest}")
            self.rope_rows[row, :, :count] = listed
            self.rope_lens[row], self.rope_deltas[row] = count, delta
            for axis in range(self.rope_axes):
                self.journal.note(self.rope_start + (row * self.rope_axes + axis) * longest, count)

    def _clear_overrides(self, rows: list[int]) -> None:
        if self.rope_rows is not None:
            self.rope_lens[rows] = self.rope_deltas[rows] = 0
        if self.embeddings:
            self.embedding_ends[rows] = 0
            for row in rows:
                self.embeddings.pop(row, None)
                if self.seen_whole is not None:
                    self.seen_whole.pop(row, None)

    def has_rope_positions(self, rows: np.ndarray) -> bool:
        """Whether one of these rows [R] has rope positions of its own: a text without images has none."""
        if self.rope_rows is None:
            return False
        return bool(self.rope_lens[rows].any() or self.rope_deltas[rows].any())

    def rope_positions(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[axes, T]: by what heads are rotated, of tokens at these positions [T] of these rows [T]."""
        assert self.rope_rows is not None
        found = np.broadcast_to(positions + self.rope_deltas[rows], (self.rope_axes, len(rows)))
        is_listed = positions < self.rope_lens[rows]
        if not is_listed.any():
            return found
        # Positions of tokens that are not listed are read too, and not used.
        return np.where(is_listed, self.rope_rows[rows, :, positions].T, found)

    def replace_block(self, copy: BlockCopy) -> None:
        row = self.row_of[copy.req_id]
        self.block_tables[copy.group][row, copy.index] = copy.dst
        self.note_blocks(copy.group, row, copy.index, 1)

    def order_by_prefix(self, rows: list[int]) -> list[int] | None:
        """Returns an order of these rows in which those that share the most blocks are neighbours, so that attention
        reads what they share once; None if no order is better than theirs. Blocks that are only appended change no
        order: it is looked for again when there are other rows, or other changes of tables."""
        if len(rows) <= 2:
            return None
        of = tuple(rows), self.num_table_changes
        if self._ordered != of:
            self._ordered, self._order = of, self._find_order(rows)
        return self._order

    def _find_order(self, rows: list[int]) -> list[int] | None:
        at, counts = np.array(rows), self.num_blocks[0, rows]
        table = self.block_tables[0][:, : min(int(counts.max()), BLOCKS_TO_COMPARE)]
        if not any(is_scattered(table[at, column], column < counts) for column in where_rows_part(table, at)):
            return None
        keys = [row.tobytes() for row in table[at].astype(">i4")]  # ordered as the numbers are
        return sorted(range(len(rows)), key=keys.__getitem__)

    def room_of(self, row: int) -> int:
        """The tokens that a row can still get."""
        return self.max_model_len - int(self.num_tokens[row])

    def append_tokens(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """One token for each of these rows (each row once). Not noted: on a device the sampler has written them."""
        if len(rows) == 1:  # by numbers: indexing by arrays takes ten times as long
            row = int(rows[0])
            num_tokens = int(self.num_tokens[row])
            self.token_ids[row, num_tokens] = tokens[0]
            self.num_tokens[row] = num_tokens + 1
            return
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1

    def append_run(self, row: int, tokens: list[int]) -> None:
        """Several tokens for one row, which a device does not have. Those beyond the longest text are left out."""
        tokens = tokens[: self.max_model_len - int(self.num_tokens[row])]
        self.write_drafts(row, tokens)
        self.num_tokens[row] += len(tokens)

    def tell_tokens(self, row: int, start: int, tokens: list[int]) -> None:
        """Tokens of a row from `start` on, which another worker has chosen, or this one."""
        end = start + len(tokens)
        self.token_ids[row, start:end] = tokens
        self.note_tokens(row, start, len(tokens))
        self.num_tokens[row] = max(int(self.num_tokens[row]), end)

    def write_drafts(self, row: int, tokens: list[int]) -> None:
        """Write tokens behind those of a row, for the next step alone."""
        start = int(self.num_tokens[row])
        self.token_ids[row, start : start + len(tokens)] = tokens
        self.note_tokens(row, start, len(tokens))

    def next_cells(self, rows: np.ndarray, ahead: np.ndarray | int = 0) -> np.ndarray:
        """Where in `memory` the next token of each of these rows goes, or the one so many places behind it; -1: there
        is no room."""
        num_tokens = self.num_tokens[rows] + ahead
        cells: np.ndarray = rows * self.max_model_len + num_tokens
        if num_tokens.max() >= self.max_model_len:
            cells[num_tokens >= self.max_model_len] = -1
        return cells

    def append_pending(self, rows: np.ndarray) -> None:
        """Counts one more token for each of these rows, which only the device knows."""
        self.num_tokens[rows if len(rows) > 1 else int(rows[0])] += 1

    # ---- the journal: of one row, or of several ----

    def note_tokens(self, rows: int | np.ndarray, start: int | np.ndarray, count: int) -> None:
        self.journal.note(rows * self.max_model_len + start, count)

    def note_blocks(self, group: int, rows: int | np.ndarray, start: int, count: int) -> None:
        self.num_table_changes += 1
        self._note_blocks(group, rows, start, count)

    def _note_blocks(self, group: int, rows: int | np.ndarray, start: int, count: int) -> None:
        table_start = self.tables_start + group * len(self.token_ids) * self.max_blocks
        self.journal.note(table_start + rows * self.max_blocks + start, count)

    def note_cross_table(self, rows: int | np.ndarray) -> None:
        if self.cross_tables is not None:
            width = self.cross_tables.shape[1]
            self.journal.note(self.cross_start + rows * width, width)


def where_rows_part(table: np.ndarray, rows: np.ndarray) -> list[int]:
    """Returns the first columns, COLUMNS_TO_COMPARE at most, in which one of these rows begins to differ from the row
    before it. Few columns of most rows are read."""
    found: set[int] = set()
    before, after, start, width = rows[:-1], rows[1:], 0, 8
    while len(after) and start < table.shape[1]:
        differs = table[after, start : start + width] != table[before, start : start + width]
        parts = differs.any(axis=1)
        found.update((start + differs[parts].argmax(axis=1)).tolist())
        before, after, start, width = before[~parts], after[~parts], start + width, 4 * width
    return sorted(found)[:COLUMNS_TO_COMPARE]


def is_scattered(blocks: np.ndarray, is_held: np.ndarray) -> bool:
    """Returns whether rows with the same block [R], of those that hold one there, are not all neighbours."""
    is_shareable = is_held & (blocks != 0)  # a null block was freed by a sliding window
    blocks = np.where(is_shareable, blocks, -1 - np.arange(len(blocks)))
    num_runs = 1 + int(np.count_nonzero(blocks[1:] != blocks[:-1]))
    return num_runs > len(set(blocks.tolist()))
