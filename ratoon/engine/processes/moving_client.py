"""The client of engines that send each other keys and values: prompts are computed by some and go on in others, roots
move to an engine with less to do, and images are encoded by engines of their own (encodings.py).

A request whose prompt is to be computed elsewhere waits here. Meanwhile a request of its own (a prefill), with the same
prompt and one token that is not used, runs in the engine that computes the prompt, or that has computed it. Its blocks
go to the engine that was chosen for the answer, which receives them as they are computed (distributed/kv_exchange.py).
When the prefill has ended, the request is sent on with the name of the transfer, finds the blocks, and computes the
rest: the tokens behind the last full block. For that engine it is a request whose prefix is cached, whatever else it
asks for.

A prefill is no request of the ledger: whatever becomes of it, the request is sent on, and what did not arrive is
computed there. If its engine dies or hangs, another one computes the prompt.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec.structs import replace as with_fields

from ratoon.core.config import EngineConfig, FrontEndConfig, SpeculationConfig
from ratoon.core.errors import RequestError
from ratoon.core.kv_transfer import ANY_PEER, FIELD, KVTransfer
from ratoon.core.messages import ForgottenRoots, UtilityCall
from ratoon.core.params import SamplingParams
from ratoon.core.request import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from ratoon.engine.processes.async_client import AsyncMPClient, DPLBAsyncMPClient, make_async_client
from ratoon.engine.processes.encodings import MARK as ENCODING
from ratoon.engine.processes.encodings import Encodings
from ratoon.engine.processes.ledger import Entry
from ratoon.engine.processes.ray_node import AT_NODE
from ratoon.engine.processes.replica import Replica
from ratoon.observe.logging import get_logger
from ratoon.observe.startup import StartupTimer

logger = get_logger(__name__)

HOST_BYTES = 2**30  # of host memory, through which blocks pass, where swap_memory is not given
MARK = "^"  # in ids of prefills, behind that of the request; the ids of requests end with random characters
ENCODED = "encoded"  # the folder of outputs of encoders, in the private directory
MOST_PREFILLS = 2  # of a request: an engine that computes its prompt may die
# A root moves if its engine has so many tokens more to compute than another one: that many, and a share of its own
# tokens, which have to be sent and received
LEAST_TO_MOVE = 512
COST_OF_MOVING = 1 / 8  # of a token, in tokens that are computed


@dataclass(slots=True)
class Prefill:
    """A prompt that is computed, or was computed, by another engine than the one that goes on with it."""

    request_id: str  # its own
    source: int  # the engine that has the blocks
    target: int  # the engine that gets them
    transfer: KVTransfer
    num_known: int | None  # tokens that one of them had in its cache; None: a root moves, and all of it was cached
    has_ended: bool = False


class MovingClient(DPLBAsyncMPClient):
    def __init__(self, config: EngineConfig, own: FrontEndConfig, timer: StartupTimer) -> None:
        self._is_on_ray = own.ray
        self._num_prefill = own.prefill_engines  # the first engines
        self._threshold = own.prefill_threshold
        self._prefills: dict[str, Prefill] = {}  # by the id of the request that waits, or was sent on
        self._num_prefills: dict[str, int] = {}  # that a request has had
        self._numbers = itertools.count()
        self._encodings = Encodings(range(own.num_answering_engines, own.num_engines), outlive_engines=not own.ray)
        cache = config.cache
        self._serves_whole = False  # encoder and decoder: every engine does both
        config = config.with_(cache=replace(cache, swap_bytes=cache.swap_bytes or HOST_BYTES))
        elsewhere = None
        if own.ray:
            from ratoon.engine.processes.ray_engines import RayEngines

            elsewhere = RayEngines(config, own.num_engines, secrets.token_hex(32))
        super().__init__(config, timer, own.num_engines, elsewhere)

    def _make_replica(self, index: int, num_engines: int) -> Replica:
        """Engines find each other by sockets in the private directory of this client; on the nodes of a cluster by what
        they say of their addresses."""
        options: dict[str, Any] = {"folder": str(self._directory.path)}
        if self._is_on_ray:
            options = {"listen": AT_NODE, "peers": [ANY_PEER]}
        name = self._config.cache.kv_connector or "peers"
        cache = replace(self._config.cache, kv_connector=name, kv_connector_options=options)
        if self._encodings.engines and self._is_on_ray:
            cache = replace(cache, encoder_listen=AT_NODE)
        if self._encodings.engines and cache.kv_files is not None:  # they outlive the service, as blocks do
            cache = replace(cache, encoder_folder=cache.kv_files, encoder_folder_bytes=cache.kv_files_bytes)
        elif self._encodings.engines and not self._is_on_ray:
            folder = self._directory.path / ENCODED
            folder.mkdir(mode=0o700, exist_ok=True)
            cache = replace(cache, encoder_folder=str(folder))
        self._config = whole = self._config.with_(cache=cache)
        if index in self._encodings.engines:
            self._config = _config_that_encodes(whole)
        made = super()._make_replica(index, num_engines)
        self._config = whole
        return made

    async def start(self) -> None:
        await super().start()
        self._serves_whole = bool(self.ready.description.get("has_encoder"))
        if self._serves_whole and self._num_prefill:
            logger.warning(
                "this model has an encoder and a decoder and is served whole: all %d engines take requests from "
                "beginning to end, and none computes prompts alone",
                len(self.replicas),
            )

    async def add_replica(self) -> int:
        raise self._fixed_number()

    async def drain_replica(self, index: int, seconds: float = 0.0) -> None:
        raise self._fixed_number()

    @staticmethod
    def _fixed_number() -> RequestError:
        problem = "engines that send each other keys and values are as many as they were at the start"
        return RequestError("replicas", problem, "a restart with others")

    # ---- choices ----

    def _verify(self, request: EngineCoreRequest) -> None:
        super()._verify(request)
        if request.kv_transfer is not None:
            problem = "this service has its prompts computed by other engines itself"
            raise RequestError(FIELD, problem, "leave it out")
        rank = request.data_parallel_rank
        if rank is not None and (rank in self._prompt_engines or rank in self._encodings.engines):
            last = len(self.replicas) - len(self._encodings.engines) - 1
            expected = f"{len(self._prompt_engines)} to {last}, or leave it out"
            does = "computes prompts" if rank in self._prompt_engines else "encodes images"
            raise RequestError("data_parallel_rank", f"engine {rank} {does} alone", expected)

    @property
    def _prompt_engines(self) -> range:
        """The engines that compute prompts alone."""
        return range(0 if self._serves_whole else self._num_prefill)

    def _cannot_go_on(self) -> bool:
        others = {*self._prompt_engines, *self._encodings.engines}
        whole = [replica for replica in self.replicas if replica.index not in others]
        return not any(replica.can_serve or replica.is_coming_back for replica in whole)

    def _choose(self, entry: Entry, candidates: Sequence[int]) -> int | None:
        request, name = entry.request, entry.request.request_id
        candidates = [index for index in candidates if index not in self._encodings.engines]
        if not candidates or self._encodings.is_waited_for(name):
            return None
        if self._begin_encoding(request):
            return None
        prefill = self._prefills.get(name)
        if prefill is not None:
            return prefill.target if prefill.has_ended else None
        if request.data_parallel_rank is not None or self._serves_whole:
            return super()._choose(entry, candidates)
        for_prompts, serving = self._able_engines()
        home = request.preferred_rank
        if request.generation_params is None:  # it ends with its prompt, so it need not be where answers are
            return super()._choose(entry, [home] if home in serving else for_prompts or serving)
        if not serving:
            return None
        known = self.balancer.known(request)
        if home is not None and request.continuation_token_ids is not None:  # it has the parent, as far as is known
            known[home] = len(request.prompt_token_ids) - len(request.continuation_token_ids)
        self.balancer.ended(name)  # where it was before
        target = self.balancer.choose(request, serving if home not in serving else [self._place_of(request, serving)])
        if home is not None and home in serving and home != target:
            sources = [home]
        elif len(request.prompt_token_ids) - known.get(target, 0) >= self._threshold:
            sources = for_prompts
        else:
            sources = []
        # Log-probabilities of a prompt are computed with it
        needs_prompt = getattr(request.params, "prompt_logprobs", None) is not None
        if not sources or needs_prompt or self._num_prefills.get(name, 0) >= MOST_PREFILLS:
            return target
        self._begin_prefill(request, sources, target, known.get(target, 0))
        return None

    def _able_engines(self) -> tuple[list[int], list[int]]:
        """The engines that can serve now: those for prompts alone, and the others."""
        encoding = self._encodings.engines
        able = [one.index for one in self.replicas if one.can_serve and one.index not in encoding]
        for_prompts = [index for index in able if index in self._prompt_engines and not self.replicas[index].is_silent]
        return for_prompts, [index for index in able if index not in self._prompt_engines]

    def _place_of(self, request: EngineCoreRequest, serving: Sequence[int]) -> int:
        """The engine that goes on with a root: the one that has it, unless another one has much less to do."""
        home, loads = request.preferred_rank, self.balancer.loads
        assert home is not None
        emptiest = min(serving, key=lambda index: (loads[index].num_tokens, loads[index].num_chosen))
        num_more = loads[home].num_tokens - loads[emptiest].num_tokens
        return emptiest if num_more > LEAST_TO_MOVE + COST_OF_MOVING * len(request.prompt_token_ids) else home

    def _request_for(self, entry: Entry) -> EngineCoreRequest:
        request, prefill = super()._request_for(entry), self._prefills.get(entry.request.request_id)
        transfer, num_sent = None, 0
        if prefill is not None:
            block_size = self.ready.block_size
            transfer, num_sent = prefill.transfer, (len(request.prompt_token_ids) - 1) // block_size * block_size
        encoded_at = self._places_of_encodings(request, num_sent)
        return with_fields(request, kv_transfer=transfer, encoded_at=encoded_at) if transfer or encoded_at else request

    # ---- encodings ----

    def _begin_encoding(self, request: EngineCoreRequest) -> bool:
        """Lets an engine encode the images of a request, if there is one and it was not done. True: it has begun."""
        if not self._encodings.engines or not request.mm_features:
            return False
        replicas = [self.replicas[index] for index in self._encodings.engines]
        able = [one.index for one in replicas if one.can_serve and not one.is_silent]
        found = self._encodings.begin(request, able)
        if found is None:
            return False
        engine, encoding = found
        self.replicas[engine].send(EngineCoreRequestType.ADD, encoding)
        return True

    def _places_of_encodings(self, request: EngineCoreRequest, num_sent: int = 0) -> dict[str, str]:
        """The addresses of the engines that have encoded the images of a request, by the hashes of these; of images
        within the first `num_sent` tokens, which come as blocks, none is needed. There are none where all engines are
        on one host, and find what was encoded in a folder."""
        if not self._is_on_ray:
            return {}
        features = [one for one in request.mm_features if one.offset + one.length > num_sent]
        made = self._encodings.made_by(features, request.cache_salt)
        ready = {name: self.replicas[engine].ready for name, engine in made.items()}
        return {name: one.kv_address for name, one in ready.items() if one is not None}

    def _note_encoding(self, output: EngineCoreOutput) -> None:
        if output.finished:
            if output.error is not None:
                logger.warning("an image is encoded by the engine that reads it: %s", output.error)
            self._encodings.note_end(output.request_id, is_made=output.error is None)

    # ---- prefills ----

    def _begin_prefill(self, request: EngineCoreRequest, sources: Sequence[int], target: int, num_known: int) -> None:
        name = request.request_id
        number = self._num_prefills[name] = self._num_prefills.get(name, 0) + 1
        is_move = sources == [request.preferred_rank]
        prefill = with_fields(
            request,
            request_id=f"{name}{MARK}{number}",
            params=SamplingParams(temperature=0.0, max_tokens=1),
            external_id=None,
            continuation_of=request.continuation_of if is_move else None,
            continuation_token_ids=request.continuation_token_ids if is_move else None,
            parent_id=None,
            retain_kv=None,
            resumed=None,
            trace_headers=None,
            encoded_at=self._places_of_encodings(request),
        )
        if is_move and prefill.continuation_token_ids and not request.mm_features and request.rope is None:
            # Its engine has much to do, and need not compute what comes behind the root
            prefill.prompt_token_ids = request.prompt_token_ids[: -len(prefill.continuation_token_ids)]
            prefill.continuation_token_ids = []
        source = self.balancer.choose(prefill, sources)
        self.balancer.relieve(name)  # of its prompt, little is left to its own engine
        ready = self.replicas[source].ready
        assert ready is not None
        transfer = KVTransfer(f"{next(self._numbers)}-{secrets.token_hex(8)}", ready.kv_address)
        prefill.kv_transfer = KVTransfer(transfer.name)
        self._prefills[name] = Prefill(prefill.request_id, source, target, transfer, None if is_move else num_known)
        call = UtilityCall(0, "receive_blocks", [transfer.name, transfer.address])  # its answer is not waited for
        self.replicas[target].send(EngineCoreRequestType.UTILITY, call)
        self.replicas[source].send(EngineCoreRequestType.ADD, prefill)

    def _record(self, outputs: EngineCoreOutputs) -> None:
        """Outputs of prefills go no further."""
        if any(MARK in output.request_id for output in outputs.outputs):
            every, outputs.outputs = outputs.outputs, []
            for output in every:
                if output.request_id.endswith(ENCODING):
                    self._note_encoding(output)
                elif _name_behind(output.request_id) is not None:
                    self._note_prefill(output)
                else:
                    outputs.outputs.append(output)
        if self._prefills:
            for output in outputs.outputs:
                prefill = self._prefills.get(output.request_id)
                if prefill is not None and prefill.num_known is not None:  # not those that were sent
                    output.num_cached_tokens = min(output.num_cached_tokens, prefill.num_known)
        super()._record(outputs)

    def _note_prefill(self, output: EngineCoreOutput) -> None:
        prefill = self._prefills.get(_name_behind(output.request_id) or "")
        if prefill is None or prefill.request_id != output.request_id or not output.finished:
            return
        prefill.has_ended = True
        if prefill.num_known is not None:
            prefill.num_known = max(prefill.num_known, output.num_cached_tokens)
        self.balancer.ended(prefill.request_id)
        forgotten = ForgottenRoots([prefill.request_id])
        self.replicas[prefill.source].send(EngineCoreRequestType.FORGET_ROOTS, forgotten)

    def _forget_prefill(self, name: str) -> None:
        """A request has ended, or its prompt is computed elsewhere."""
        prefill = self._prefills.pop(name, None)
        if prefill is not None and not prefill.has_ended:
            self.balancer.ended(prefill.request_id)
            if self.replicas[prefill.source].has_process:
                self.replicas[prefill.source].send(EngineCoreRequestType.ABORT, [prefill.request_id])

    def _request_ended(self, request_id: str) -> None:
        self._forget_prefill(request_id)
        encoding = self._encodings.forget(request_id)
        if encoding is not None and self.replicas[encoding[0]].has_process:
            self.replicas[encoding[0]].send(EngineCoreRequestType.ABORT, [encoding[1]])
        self._num_prefills.pop(request_id, None)
        super()._request_ended(request_id)

    def _engine_lost(self, engine: int) -> None:
        self._encodings.give_up(engine)
        for name, prefill in list(self._prefills.items()):
            if prefill.target == engine or (prefill.source == engine and not prefill.has_ended):
                self._forget_prefill(name)
        super()._engine_lost(engine)

    def _look_at_engines(self) -> None:
        """Prompts in an engine that hangs are computed by others."""
        hung = [
            name
            for name, prefill in self._prefills.items()
            if not prefill.has_ended and self.replicas[prefill.source].is_silent
        ]
        for name in hung:
            logger.warning("engine %d does not answer: a prompt is computed elsewhere", self._prefills[name].source)
            self._forget_prefill(name)
        for index in self._encodings.engines:
            if self.replicas[index].is_silent and (num_given_up := self._encodings.give_up(index)):
                logger.warning("engine %d does not answer: %d requests go on without it", index, num_given_up)
                hung.append("")
        if hung:
            self._dispatch()


def _name_behind(request_id: str) -> str | None:
    """The request of a prefill, by its id; None: it is no prefill."""
    name, mark, number = request_id.rpartition(MARK)
    return name if mark and number.isdecimal() else None


def _config_that_encodes(config: EngineConfig) -> EngineConfig:
    """The settings of an engine that only runs the encoder. It keeps no blocks, and drafts nothing."""
    cache = replace(config.cache, kv_connector=None, kv_connector_options={}, kv_files=None, swap_bytes=0)
    return config.with_(encodes_only=True, cache=cache, speculation=SpeculationConfig())


def client_of_settings(config: EngineConfig, own: FrontEndConfig, timer: StartupTimer) -> AsyncMPClient:
    """The client of as many engines, of such kinds, as the settings ask for."""
    if own.balances_by_events(config.cache):
        config = config.with_(cache=replace(config.cache, tells_client=True))
    if own.moves_blocks:
        return MovingClient(config, own, timer)
    return make_async_client(config, own.num_replicas, timer, not own.data_parallel_external_lb, own.ray)
