"""The step plan: what the scheduler tells the runner to do in one step. A diff; data only.

The runner keeps a row for each branch. A branch is sent once in full (NewRequestData), from then on by id with what
changed. The runner drops a preempted branch, which is sent in full again when it resumes.

The runner executes a plan in this order:
  1. drop the rows of `finished_req_ids` and `preempted_req_ids`, and the tensors of `free_encoder_mm_hashes`;
  2. write the slots of `fetches`; read the blocks of `stores`, whose slots `saves` names next, and the sources of
     `block_copies`, then write the blocks of `loads` and the targets of the copies. A step may store a block to a slot
     and load it from there;
  3. add new rows, apply the table entries of `block_copies` and the appended blocks of known rows;
  4. run the encoder over `encoder_steps`, and write what cross-attention reads; run the encoder of media over
     `scheduled_encoder_inputs`, and keep what it makes;
  5. run `num_scheduled_tokens[id]` tokens of each branch, from its `num_computed_tokens` on;
  6. sample for `sampled_req_ids`, and for every id in `fanout` once more for each of its children, from the same row;
     for a branch with draft tokens also from the rows before, and keep the tokens up to the first that differs from
     its draft;
  7. choose the candidates of `beam_steps`, and read out the vectors of `pooled_req_ids` and the rows of `captures`.

A step may be planned before the tokens of the one before it are known. The runner appends the token that it samples to
the branch's row itself, so that a plan names positions, not tokens: `num_computed_tokens` of a known branch may be the
position of a token that only the runner has.

A beam search has one branch, its trunk, which computes the prompt like any other. The runner also keeps a row for each
beam, under the trunk's id: beams are identified by number, and a step names the parent of each beam in the previous
step. A search that is loaded with its beams has its trunk in `scheduled_new_reqs` to restore its row: none of the
trunk's tokens run.
"""

from __future__ import annotations

import msgspec

from ratoon.core.adapters import AdapterLoad
from ratoon.core.encoder import EncoderInput
from ratoon.core.media import MediaInput
from ratoon.core.params import BeamSearchParams, PoolingParams, SamplingParams

MAX_CAPTURE_SPANS = 64  # in a step, over all captures: each is a row of the batch

BlockIds = tuple[list[int], ...]  # one list for each KV group whose tables grow with the sequence


class EmbeddingSpan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A run of positions at which a model reads rows of a tensor that the runner holds, and not the token ids there,
    which are any of the vocabulary's."""

    start: int  # the first position in the sequence
    length: int
    key: str  # of the tensor, in `scheduled_encoder_inputs` of this plan or of an earlier one
    first: int = 0  # the row of the tensor that stands at `start`
    # Of models that attend to images both ways, where the rows of a span see each other: whether those of this one see
    # only what is before them, as tokens do
    is_causal: bool = False


class InputOverrides(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What the model reads of a sequence in place of its token ids and of the positions in it. Slots and masks go by
    the positions in the sequence."""

    # Positions by which heads are rotated, of the first tokens: 32-bit integers, axis after axis. Tokens behind them
    # have their position in the sequence plus `rope_delta`, on all axes. Only for models that declare `rope_axes`.
    rope_positions: bytes = b""
    rope_delta: int = 0
    embeddings: list[EmbeddingSpan] = []


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A branch that the runner has no row for."""

    req_id: str  # the branch's id
    token_ids: list[int]  # prompt and, for forks and resumed branches, the output so far
    num_prompt_tokens: int
    # How to sample the branch, or the beams behind a trunk; or which vector to read out at the end of the prompt
    params: SamplingParams | BeamSearchParams | PoolingParams
    seed: int  # of this branch's own random stream
    block_ids: BlockIds
    num_computed_tokens: int
    cross_block_ids: list[int] = []  # what cross-attention reads; branches may share them
    num_encoder_positions: int = 0
    encoder_token_ids: list[int] = []  # the encoder input, where a rule over tokens needs it
    packed_prompt: bytes = b""  # the first of `token_ids` once more, as 32-bit integers: copied faster. Or nothing
    overrides: InputOverrides | None = None
    adapter_slot: int = -1  # of its adapter; -1: the base model alone


class CachedRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Known branches: parallel lists."""

    req_ids: list[str] = []
    num_computed_tokens: list[int] = []
    new_block_ids: list[BlockIds | None] = []  # appended to the branch's tables; None: nothing new
    # Tokens behind the prompt that the step computes, where workers do not feed them back themselves: those of an early
    # stage of a pipeline do not know what the last one has sampled. Empty: they do.
    new_token_ids: list[list[int]] = []


class BlockCopy(msgspec.Struct, array_like=True, gc=False):
    """Copy-on-write: before the forward pass, block `src` is copied to `dst`, and the branch's table points at `dst`.

    For a branch in `scheduled_new_reqs` the table already holds `dst`; so do the tables of beams and captures.
    """

    req_id: str
    group: int
    index: int  # place in the branch's block table
    src: int
    dst: int


class BlockTransfer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A whole block that moves between the device and a tier of the block store. The result of the step, or of a later
    one, says whether it arrived (`TransferReport`)."""

    block: int  # on the device
    slot: int  # the place in the tier: in host memory, a block there


class ConnectorTransfer(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A block that moves between a slot of host memory and a KV connector. Of one that is saved: whether the connector
    keeps it, and whether it is sent to another engine. At least one is so."""

    slot: int
    key: bytes
    is_kept: bool = True
    is_sent: bool = False


class BeamStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One beam search in a step. All its beams have the same length. Lists over beams are flat, beam by beam."""

    req_id: str  # the trunk's
    # Tokens of every beam in this step, from `num_computed_tokens` on. 0: only the trunk runs, with its prompt's end.
    num_tokens: int = 0
    num_computed_tokens: int = 0
    # Set: the beams are new. Beam i is the previous beam `parents[i]` (0: the trunk, if there were none), with the i-th
    # part of `token_ids` after its computed tokens. For loaded beams the parts are all tokens after the prompt, of
    # which `num_restored_tokens` are computed.
    parents: list[int] | None = None
    token_ids: list[int] = []
    num_restored_tokens: int = 0
    first_columns: list[int] = []  # the first block table column that changes, by KV group
    block_ids: BlockIds = ()  # the entries from there on, of every beam
    num_candidates: int = 0  # 0: the beams are not up to date yet
    scores: list[float] = []  # of the beams; added to the candidates' scores

    @property
    def num_beams(self) -> int:
        return len(self.scores)


class CaptureStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Hidden states to read out. The runner keeps no state for it between steps."""

    req_id: str
    token_ids: list[int]  # of all rows, span after span
    # Runs of consecutive positions: the first, how many, and whether their keys and values are written. If not, the
    # blocks, which may be shared, have them already.
    spans: list[tuple[int, int, bool]]
    block_ids: BlockIds  # the whole tables
    captured: list[int]  # which of the rows are read out
    # Layers that the rows have passed: 0 is the embeddings, num_layers + 1 the final norm
    layers: list[int]
    dtype: str
    cross_block_ids: list[int] = []
    num_encoder_positions: int = 0
    overrides: InputOverrides | None = None  # of the whole sequence
    adapter_slot: int = -1  # of the rows that are run
    # Set: the rows are those of this branch in this step, which `captured` counts from its first one. Nothing is run
    # for the capture, and there are no tokens, spans and blocks.
    branch_id: str = ""
    lens: int = 0  # as in Extraction
    cross_heads: list[int] = []  # likewise


class EncoderStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An encoder input that runs in this step, whole. Its keys and values for cross-attention go to `block_ids`."""

    req_id: str  # the request charged for it; others may read the blocks in the same step
    encoder_input: EncoderInput
    block_ids: list[int] = []  # empty: it runs only for what is read out
    captured: list[int] = []  # positions whose states are read out, as in CaptureStep
    layers: list[int] = []
    dtype: str = "float32"
    adapter_slot: int = -1


class SchedulerOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    step: int = 0  # increasing; a plan may be made before the results of earlier ones are known
    scheduled_new_reqs: list[NewRequestData] = []
    scheduled_cached_reqs: CachedRequestData = msgspec.field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = {}  # in batch order
    total_num_scheduled_tokens: int = 0
    sampled_req_ids: list[str] = []  # branches whose last scheduled token is their newest: a token is sampled
    fanout: dict[str, list[tuple[str, int]]] = {}  # branch id → children (id, seed), sampled from the same row
    beam_steps: list[BeamStep] = []  # their beams follow the branches in the batch
    captures: list[CaptureStep] = []  # their spans come last in the batch
    pooled_req_ids: list[str] = []  # pooling branches whose last token is in this step
    block_copies: list[BlockCopy] = []
    finished_req_ids: list[str] = []
    preempted_req_ids: list[str] = []
    encoder_steps: list[EncoderStep] = []
    stores: list[BlockTransfer] = []  # device block → slot
    loads: list[BlockTransfer] = []  # slot → device block; no row of this step reads or writes the block
    # connector → slot, beside this step and later ones: loads from the slot wait for it. One that fails is a failed
    # store, and its load a failed load
    fetches: list[ConnectorTransfer] = []
    saves: list[ConnectorTransfer] = []  # slot → connector, behind `stores`
    # Guesses at the next tokens of branches in `sampled_req_ids`, all of whose own tokens are known. They are the last
    # of a branch's scheduled tokens. Of those that are not kept, only keys and values behind the branch's end are left.
    scheduled_spec_decode_tokens: dict[str, list[int]] = {}
    # Of these, branches whose drafts the device has made, behind the step that brought their newest token
    device_drafts: list[str] = []
    # Images and other media that the encoder runs over in this step, by the key that spans name (EmbeddingSpan). The
    # runner keeps the rows [num_rows, hidden size] that come out until their key is freed.
    scheduled_encoder_inputs: dict[str, MediaInput] = {}
    free_encoder_mm_hashes: list[str] = []
    adapter_loads: list[AdapterLoad] = []
    # There is nothing else to do: the result tells whether adapters are there that requests wait for.
    awaits_adapters: bool = False
    # Likewise of blocks that were fetched from a connector
    awaits_loads: bool = False
    # Tokens that a model or heads on the device draft behind this step, by branch of `sampled_req_ids`, at most, and no
    # more than its blocks have slots for
    draft_lengths: dict[str, int] = {}

    @property
    def req_ids(self) -> list[str]:
        """Every branch and search that runs in this step."""
        beams = [beam_step.req_id for beam_step in self.beam_steps if beam_step.num_tokens]
        encoders = [step.req_id for step in self.encoder_steps if step.captured]
        return [*self.num_scheduled_tokens, *beams, *(capture.req_id for capture in self.captures), *encoders]

    def tokens_without_sample(self) -> dict[str, int]:
        """What the step computes of branches and searches that get no sampled token from it."""
        found: dict[str, int] = {}
        if len(self.sampled_req_ids) < len(self.num_scheduled_tokens):
            sampled = set(self.sampled_req_ids)
            found = {name: count for name, count in self.num_scheduled_tokens.items() if name not in sampled}
        for beam_step in self.beam_steps:
            found[beam_step.req_id] = beam_step.num_tokens * beam_step.num_beams
        for capture in self.captures:
            found[capture.req_id] = len(capture.token_ids)
        return found

    @property
    def is_empty(self) -> bool:
        """Whether there are no tokens to run; there may still be rows to drop."""
        encodes = self.encoder_steps or self.scheduled_encoder_inputs
        return self.total_num_scheduled_tokens == 0 and not encodes

    @property
    def is_void(self) -> bool:
        """Whether there is nothing for the runner to do."""
        told = self.finished_req_ids or self.preempted_req_ids or self.block_copies or self.stores or self.saves
        loads = self.loads or self.adapter_loads or self.awaits_adapters or self.awaits_loads
        return self.is_empty and not told and not loads and not self.free_encoder_mm_hashes
