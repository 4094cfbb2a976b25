"""Rejection sampling of drafts: a draft is accepted with a probability by which the tokens that are kept have the
distribution of the model, whatever the draft was drawn from."""

from __future__ import annotations

import torch

from ratoon.layers.sampling import Chosen, Filters, Tensor, draw_from, exact_probabilities, filtered


def distribution(logits: Tensor, temperature: Tensor, filters: Filters) -> Tensor:
    """The probabilities [R, V] from which a token is drawn, times a factor for each row; a temperature of 0 leaves the
    likeliest token alone. NaN or 0 throughout where logits can't be used."""
    is_greedy = temperature == 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
    probabilities = filtered(exact_probabilities(scaled), filters)
    likeliest = torch.zeros_like(probabilities).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    likeliest = torch.where(torch.isfinite(probabilities.sum(dim=-1, keepdim=True)), likeliest, probabilities)
    return torch.where(is_greedy[:, None], likeliest, probabilities)


def accept_or_draw(
    probabilities: Tensor,  # [R, V] of the model, times any factor
    drafts: Tensor,  # [R] int64; -1: there is none, and a token is drawn
    proposed: Tensor | None,  # [R, V] the distribution that each draft was drawn from; None: it was certain
    accepting: Tensor,  # [R] float64 in [0, 1): random numbers that decide on drafts,
    drawing: Tensor,  # and others for what is drawn
) -> Chosen:
    """The draft of each row, or a token from what is left of the distribution where it is rejected: never the draft
    itself, if that was certain."""
    totals = probabilities.sum(dim=-1, dtype=torch.float64)
    has_draft = drafts >= 0
    column = drafts.clamp_min(0)[:, None]
    likelihood = probabilities.gather(1, column).squeeze(1).double() / totals
    if proposed is None:
        of_draft = torch.ones_like(likelihood)
        left = probabilities.scatter(1, column, 0.0)
    else:
        of_draft = proposed.gather(1, column).squeeze(1).double()
        left = (probabilities / totals[:, None] - proposed).clamp_min(0.0).to(probabilities.dtype)
    is_accepted = has_draft & (accepting * of_draft < likelihood)
    drawn = draw_from(torch.where(has_draft[:, None], left, probabilities), drawing)
    is_bad = ~(totals > 0) | (drawn.bad & ~is_accepted)
    return Chosen(torch.where(is_accepted, column.squeeze(1), drawn.token_ids), is_bad)
