"""mBART: BART with pre-norm layers and a final norm."""

from __future__ import annotations

from ratoon.models.bart import BartForConditionalGeneration


class MBartForConditionalGeneration(BartForConditionalGeneration):
    pre_norm = True
