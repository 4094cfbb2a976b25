"""mBART: BART with the norms before what they norm, and one behind the last layer."""

from __future__ import annotations

from ratoon.models.bart import BartForConditionalGeneration


class MBartForConditionalGeneration(BartForConditionalGeneration):
    pre_norm = True
