"""The last token that there is room for is an end token (`forced_eos_token_id`): a text that is cut off ends well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ForcedEnd(NamedTuple):
    token_ids: tuple[int, ...]
    num_left: int  # tokens that may still come

    def after(self, token_id: int) -> ForcedEnd:
        return ForcedEnd(self.token_ids, self.num_left - 1)

    def forbidden(self) -> Sequence[int]:
        return ()

    def forced(self) -> Sequence[int]:
        return self.token_ids if self.num_left == 1 else ()
