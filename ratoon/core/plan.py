"""The step plan: what the scheduler tells the runner to do in one step. A diff, and data only.

The runner keeps a row for each branch. A branch travels once in full (NewRequestData), from then on by id with what
changed. A branch that was preempted is dropped by the runner and travels in full again when it resumes.

Order in which the runner carries a plan out:
  1. drop the rows of `finished_req_ids` and `preempted_req_ids`;
  2. copy the blocks of `swapped_out` to the host; read the sources of `block_copies`, then write those of `swapped_in`
     and the targets of the copies;
  3. add new rows, apply the table entries of `block_copies` and the appended blocks of known rows;
  4. run the encoder over `encoder_steps`, and write what cross-attention reads;
  5. run `num_scheduled_tokens[id]` tokens of each branch, from its `num_computed_tokens` on;
  6. sample for `sampled_req_ids`, and for every id in `fanout` once more for each of its children, from the same row;
  7. choose the candidates of `beam_steps`, and read out the vectors of `pooled_req_ids` and the rows of `captures`.

A step may be planned before the tokens of the one before it are known. The runner appends the token that it samples to
the branch's row itself, so that a plan names positions, not tokens: `num_computed_tokens` of a known branch may be the
position of a token that only the runner has.

A beam search has one branch, its trunk, which computes the prompt like any other. Behind it the runner keeps a row for
each beam, under the trunk's id: beams are known by their number, and a step says which beam of the last one each comes
from. A search that comes back from the host with its beams has its trunk in `scheduled_new_reqs`, for the sake of its
row: none of the trunk's tokens run.
"""

from __future__ import annotations

import msgspec

from ratoon.core.encoder import EncoderInput
from ratoon.core.params import BeamSearchParams, PoolingParams, SamplingParams

MAX_CAPTURE_SPANS = 64  # in a step, over all captures: the runner lays each out as a row

BlockIds = tuple[list[int], ...]  # one list for each KV group whose tables grow with the sequence
BlockSwap = tuple[int, int]  # block ids: from, to


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A branch that the runner does not know (yet, or any more)."""

    req_id: str  # the branch's id
    token_ids: list[int]  # prompt and, for forks and resumed branches, the output so far
    num_prompt_tokens: int
    # How it is sampled; of a search's trunk, whose beams are; or the vector that is read out at the end of the prompt
    params: SamplingParams | BeamSearchParams | PoolingParams
    seed: int  # of this branch's own random stream
    block_ids: BlockIds
    num_computed_tokens: int
    cross_block_ids: list[int] = []  # what cross-attention reads; many branches may name the same
    num_encoder_positions: int = 0
    encoder_token_ids: list[int] = []  # what the encoder read, where a rule over tokens looks at it


class CachedRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Known branches: parallel lists."""

    req_ids: list[str] = []
    num_computed_tokens: list[int] = []
    new_block_ids: list[BlockIds | None] = []  # appended to the branch's tables; None: nothing new


class BlockCopy(msgspec.Struct, array_like=True, gc=False):
    """Copy-on-write: before the forward pass, block `src` is copied to `dst`, and the branch's table points at `dst`.

    For a branch in `scheduled_new_reqs` the table already holds `dst`; beams and captures bring it in theirs.
    """

    req_id: str
    group: int
    index: int  # place in the branch's block table
    src: int
    dst: int


class BeamStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One beam search in a step. All its beams are equally long. Lists over beams are flat, beam after beam."""

    req_id: str  # the trunk's
    # Tokens of every beam in this step, from `num_computed_tokens` on. 0: only the trunk runs, with its prompt's end.
    num_tokens: int = 0
    num_computed_tokens: int = 0
    # Set: the beams are new. Beam i is beam `parents[i]` of before (0: the trunk, if there were none) and the i-th part
    # of `token_ids` behind its computed tokens. Of beams that come back from the host, the parts are all that they
    # have behind the prompt, `num_restored_tokens` of it computed.
    parents: list[int] | None = None
    token_ids: list[int] = []
    num_restored_tokens: int = 0
    first_column: int = 0  # the first place in the block tables that changes
    block_ids: BlockIds = ()  # what stands there and behind, of every beam
    num_candidates: int = 0  # 0: the beams are not up to date yet
    scores: list[float] = []  # of the beams; they count in the choice of candidates

    @property
    def num_beams(self) -> int:
        return len(self.scores)


class CaptureStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Hidden states to read out. The runner keeps nothing of it from one step to the next."""

    req_id: str
    token_ids: list[int]  # of all rows, span after span
    # Runs of consecutive positions: the first, how many, and whether their keys and values are written. Where they are
    # not, they are in the blocks already, which others may hold too.
    spans: list[tuple[int, int, bool]]
    block_ids: BlockIds  # the whole tables
    captured: list[int]  # which of the rows are read out
    # Layers that the rows have passed: 0 is the embeddings, one more than there are is the final norm
    layers: list[int]
    dtype: str
    cross_block_ids: list[int] = []
    num_encoder_positions: int = 0


class EncoderStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """An encoder input that runs in this step, whole. Its keys and values for cross-attention go to `block_ids`."""

    req_id: str  # on whose account it runs; others may read the blocks in the same step
    encoder_input: EncoderInput
    block_ids: list[int] = []  # none: it runs for the sake of what is read out
    captured: list[int] = []  # positions whose states are read out, as in CaptureStep
    layers: list[int] = []
    dtype: str = "float32"


class SchedulerOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    step: int = 0  # numbers rise; a plan may be made before the results of those before it are known
    scheduled_new_reqs: list[NewRequestData] = []
    scheduled_cached_reqs: CachedRequestData = msgspec.field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = {}  # in batch order
    total_num_scheduled_tokens: int = 0
    sampled_req_ids: list[str] = []  # branches whose last scheduled token is the newest: they get a token
    fanout: dict[str, list[tuple[str, int]]] = {}  # branch id → children (id, seed), sampled from the same row
    beam_steps: list[BeamStep] = []  # their beams come behind the branches in the batch
    captures: list[CaptureStep] = []  # their spans come last in the batch
    pooled_req_ids: list[str] = []  # pooling branches whose last token is in this step: they get their vector
    block_copies: list[BlockCopy] = []
    finished_req_ids: list[str] = []
    preempted_req_ids: list[str] = []
    encoder_steps: list[EncoderStep] = []
    swapped_out: list[BlockSwap] = []  # device block → host block
    swapped_in: list[BlockSwap] = []  # host block → device block

    @property
    def req_ids(self) -> list[str]:
        """Everybody who runs in this step."""
        beams = [beam_step.req_id for beam_step in self.beam_steps if beam_step.num_tokens]
        encoders = [step.req_id for step in self.encoder_steps if step.captured]
        return [*self.num_scheduled_tokens, *beams, *(capture.req_id for capture in self.captures), *encoders]

    @property
    def is_empty(self) -> bool:
        """Nothing to run; there may still be rows to drop."""
        return self.total_num_scheduled_tokens == 0 and not self.encoder_steps

    @property
    def is_void(self) -> bool:
        """Nothing at all to tell the runner."""
        told = self.finished_req_ids or self.preempted_req_ids or self.block_copies or self.swapped_out
        return self.is_empty and not told and not self.swapped_in
