"""Sampled rows for the runner: the newest row of every branch that gets a token, and the tokens of their fan-outs."""

from __future__ import annotations

import numpy as np
import torch

from ratoon.core.outputs import ModelRunnerOutput
from ratoon.core.plan import SchedulerOutput
from ratoon.execution.input_batch import InputBatch
from ratoon.execution.readers import StepLayout
from ratoon.execution.sampler import Sampler

NO_TOKEN = "the model's logits hold no usable number (NaN or all tokens forbidden)"


class SampledRowsReader:
    def __init__(self, plan: SchedulerOutput, layout: StepLayout, branches: InputBatch, sampler: Sampler) -> None:
        self.rows = [layout.last_row[req_id] for req_id in plan.sampled_req_ids]
        self._plan = plan
        self._branches = branches
        self._sampler = sampler

    def read_logits(self, logits: torch.Tensor, output: ModelRunnerOutput) -> None:
        num_branches = len(self._plan.sampled_req_ids)
        ids, rows, seeds, source = self._draws()
        if len(ids) > num_branches:  # several choices from one row
            logits = logits[torch.from_numpy(source).to(logits.device)]
        sampled = self._sampler.sample(logits, rows, seeds)

        tokens = sampled.to_numpy()  # the only device synchronisation of a step
        bad = set(sampled.bad_rows)
        own = np.array([index for index in range(num_branches) if index not in bad], np.int64)
        self._branches.append_tokens(rows[own], tokens[own])
        self._sampler.rows.append_tokens(rows[own], tokens[own])
        for index, token in enumerate(tokens.tolist()):
            if index in bad:
                output.errors[ids[index]] = NO_TOKEN
            else:
                output.req_ids.append(ids[index])
                output.sampled_token_ids.append([token])
        output.logprobs = {ids[index]: lists for index, lists in sampled.logprobs_lists().items() if index not in bad}

    def _draws(self) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
        """The branches that get a token: ids, rows, seeds, and the sampled row that each draws from.

        The sampled branches come first, in the plan's order, then the children of fan-outs.
        """
        plan, branches = self._plan, self._branches
        ids = list(plan.sampled_req_ids)
        rows = [branches.row_of[req_id] for req_id in ids]
        seeds = [branches.seeds[row] for row in rows]
        source = list(range(len(ids)))
        for parent, children in plan.fanout.items():
            index = plan.sampled_req_ids.index(parent)
            for child, seed in children:
                ids.append(child)
                rows.append(rows[index])
                seeds.append(np.uint64(seed))
                source.append(index)
        return ids, np.array(rows), np.array(seeds, np.uint64), np.array(source)
