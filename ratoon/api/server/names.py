"""What clients call their requests: a header or a field names one as well as the id of its answer does.

Such a name need not be unique, as ids are: it stands for the newest request of the same key. Which requests can still
be continued is the engine's to know.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from ratoon.core.errors import UnknownParentError

if TYPE_CHECKING:
    from ratoon.engine.async_llm import AsyncLLM


class RequestNames:
    def __init__(self, max_names: int) -> None:
        self._max_names = max_names  # of each owner: nothing that one does makes another's forgotten
        self._ids: dict[str | None, OrderedDict[str, str]] = {}  # by owner: names and the ids of answers

    def note(self, owner: str | None, name: str, request_id: str) -> None:
        ids = self._ids.setdefault(owner, OrderedDict())
        ids[name] = request_id
        ids.move_to_end(name)
        if len(ids) > self._max_names:
            ids.popitem(last=False)

    async def resolve(self, llm: AsyncLLM, name: str, owner: str | None) -> str:
        """The id of the request that this is the id or the name of. An id goes first."""
        try:
            await llm.find_parent(name, wait=False, owner=owner)
        except UnknownParentError:
            ids = self._ids.get(owner)
            return name if ids is None else ids.get(name, name)
        return name
