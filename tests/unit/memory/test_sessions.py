"""Sessions: what only superseded roots need is the first to go, in every tier; what newest roots need goes last."""

from __future__ import annotations

from ratoon.core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from ratoon.core.kv_connector import BlockIndex, block_key
from ratoon.memory import sessions
from ratoon.memory.block_pool import FIRST, KEPT, RECENT
from ratoon.memory.kv_cache_manager import KVCacheManager
from ratoon.memory.sequence import TokenSequence
from ratoon.memory.sessions import SessionKey

SIZE = 4
KEY: SessionKey = (None, None, "s")


class Index(BlockIndex):
    """A connector that has everything, and notes what it is told."""

    keeps_ended_texts = True

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.superseded: list[bytes] = []
        self.prolonged: list[bytes] = []

    def find(self, key: bytes) -> bool:
        return key in self.keys

    def offer(self, key: bytes) -> bool:
        is_new = key not in self.keys
        self.keys.add(key)
        return is_new

    def supersede(self, key: bytes) -> None:
        self.superseded.append(key)

    def prolong(self, key: bytes) -> None:
        self.prolonged.append(key)


def manager(num_blocks: int = 40, num_host_blocks: int = 0) -> KVCacheManager:
    group = KVCacheGroup(FullAttentionSpec(SIZE, 1, 8, "float16"), (0,))
    return KVCacheManager(KVCacheConfig(num_blocks + 1, SIZE, (group,), None, num_host_blocks), 400)


def text(letters: str) -> list[int]:
    """A block of tokens for each letter."""
    return [ord(letter) for letter in letters for _ in range(SIZE)]


def run(
    kv: KVCacheManager,
    letters: str,
    key: SessionKey | None = KEY,
    num_prompt: int | None = None,  # letters; default: all but the last
    name: str | None = None,
    request_id: str | None = None,
    **options: bool,
) -> list[str]:
    """A text that is computed and ends. Returns what it supersedes."""
    sequence = TokenSequence(name or letters, text(letters))
    hits, num_hits = kv.get_computed_blocks(sequence)
    assert kv.allocate_slots(sequence, sequence.num_tokens - num_hits, hits, num_hits) is not None
    sequence.num_computed_tokens = sequence.num_tokens
    superseded = []
    if key is None:
        kv.sessions.pass_text()
    else:
        num_tokens = SIZE * (len(letters) - 1 if num_prompt is None else num_prompt)
        superseded = kv.end_in_session(key, sequence, num_tokens, request_id or sequence.branch_id, **options)
    kv.free(sequence)
    kv.check([])
    return superseded


def zones(kv: KVCacheManager, letters: str) -> list[object]:
    """The zone of each block of a text on the device; None: it is not there."""
    sequence = TokenSequence("look", text(letters))
    kv.prefix_cache.hash_blocks(sequence, sequence.num_tokens)
    found = [kv.pool.get_cached_block(name) for name in sequence.block_hashes[SIZE]]
    return [None if block is None else block.zone for block in found]


def taken(kv: KVCacheManager, count: int) -> None:
    """Take free blocks for other content, and give them back."""
    kv.pool.free_blocks(kv.pool.get_new_blocks(count))
    kv.pool.check()


def test_a_text_that_contains_a_root_supersedes_it_and_takes_its_blocks_over():
    kv = manager()
    assert run(kv, "abc") == []
    assert run(kv, "abcdef") == ["abc"]
    assert kv.sessions.newest(KEY) == ["abcdef"]
    assert zones(kv, "abcdef") == [KEPT] * 6


def test_what_only_a_superseded_root_needs_goes_first():
    kv = manager(num_blocks=20)
    run(kv, "abxy", num_prompt=2)
    run(kv, "mnop", None)  # older than what follows, and of no session
    assert run(kv, "abcde", num_prompt=4) == ["abxy"], "its prompt contains the whole prompt of the other one"
    assert zones(kv, "abxy") == [KEPT, KEPT, FIRST, FIRST]
    taken(kv, 20 - 11 + 1)  # the empty ones, and one more
    assert zones(kv, "abxy") == [KEPT, KEPT, FIRST, None], "the end of a text before its beginning"
    taken(kv, 20 - 11 + 2)
    assert zones(kv, "abxy") == [KEPT, KEPT, None, None]
    assert zones(kv, "mnop") == [RECENT] * 4
    taken(kv, 20 - 5)
    assert zones(kv, "mnop") == [None] * 4
    assert zones(kv, "abcde") == [KEPT] * 5


def test_branches_of_one_parent_are_both_newest():
    kv = manager()
    run(kv, "ab")
    assert run(kv, "abcd") == ["ab"]
    assert run(kv, "abef") == [], "a sibling does not supersede"
    assert kv.sessions.newest(KEY) == ["abcd", "abef"]
    assert zones(kv, "abcd") == zones(kv, "abef") == [KEPT] * 4
    assert run(kv, "abefg") == ["abef"]
    assert kv.sessions.newest(KEY) == ["abcd", "abefg"]


def test_choices_of_one_request_and_an_equal_prompt_do_not_supersede_each_other():
    kv = manager()
    assert run(kv, "abcd", num_prompt=2, name="r", request_id="r") == []
    assert run(kv, "abce", num_prompt=2, name="r#1", request_id="r") == []
    assert run(kv, "abf", num_prompt=2, name="again") == []
    assert kv.sessions.newest(KEY) == ["r", "r#1", "again"]


def test_a_branch_from_the_middle_leaves_its_parent():
    kv = manager()
    run(kv, "abcd", num_prompt=1)
    assert run(kv, "abxy", num_prompt=3, is_branch=True) == []
    assert kv.sessions.newest(KEY) == ["abcd", "abxy"]


def test_owners_salts_and_names_have_sessions_of_their_own_and_share_blocks():
    kv = manager()
    run(kv, "abx", num_prompt=2)
    assert run(kv, "abyz", ("eve", None, "s"), num_prompt=3) == []
    assert run(kv, "abyw", (None, "salt", "s"), num_prompt=3) == []
    assert run(kv, "abc", (None, None, "t")) == []
    assert run(kv, "abcd", num_prompt=3) == ["abx"]
    assert zones(kv, "abx") == [KEPT, KEPT, FIRST], "others need the beginning"


def test_a_text_that_a_newest_root_contains_changes_nothing():
    kv = manager()
    run(kv, "abcdef")
    assert run(kv, "abc") == []
    assert run(kv, "") == []
    assert kv.sessions.newest(KEY) == ["abcdef"]


def test_a_session_that_is_not_used_is_forgotten(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_TEXTS_BETWEEN", 2)
    kv = manager()
    run(kv, "abc")
    for letters in ("k", "l"):
        run(kv, letters, None)
    assert len(kv.sessions) == 1
    run(kv, "m", (None, None, "other"))
    assert kv.sessions.newest(KEY) == []
    assert zones(kv, "abc") == [RECENT] * 3


def test_newest_roots_are_bounded_in_number_and_in_blocks(monkeypatch):
    monkeypatch.setattr(sessions, "MAX_BRANCHES", 2)
    kv = manager()
    for letters in ("ax", "by", "cz"):
        run(kv, letters)
    assert kv.sessions.newest(KEY) == ["by", "cz"]
    assert zones(kv, "ax") == [RECENT, RECENT], "it is no superseded one"
    monkeypatch.setattr(sessions, "LEAST_TRACKED", 5)
    monkeypatch.setattr(sessions, "TRACKED_BY_BLOCK", 0)
    run(kv, "dw", (None, None, "other"))
    assert len(kv.sessions) == 1 and kv.sessions.snapshot().num_blocks == 2


def test_half_of_a_pool_at_most_is_kept_for_sessions():
    kv = manager(num_blocks=10)
    for index, letters in enumerate(("abc", "def", "ghi")):
        run(kv, letters, (None, None, str(index)))
    assert zones(kv, "abc") == [RECENT] * 3
    assert sorted(zones(kv, "def") + zones(kv, "ghi")) == [RECENT] + [KEPT] * 5


def test_superseded_blocks_that_leave_the_device_take_no_place_of_others_in_host_memory():
    kv = manager(num_blocks=8, num_host_blocks=3)
    run(kv, "abxy", num_prompt=2)
    run(kv, "abcd", num_prompt=3)
    tier = kv.store.tier
    assert tier is not None
    run(kv, "mnop", None)  # takes the empty ones, then y and x
    assert tier.num_cached_blocks == 2
    names = TokenSequence("look", text("abxy"))
    kv.prefix_cache.hash_blocks(names, names.num_tokens)
    in_tier = [tier.get_cached_block(name) for name in names.block_hashes[SIZE]]
    assert in_tier[3] is not None and in_tier[3].zone == FIRST, "there was an empty slot"
    run(kv, "stuv", None)  # takes m to p: there is one empty slot, and then that of y and that of x
    assert tier.num_cached_blocks == 3
    assert all(tier.get_cached_block(name) is None for name in names.block_hashes[SIZE][2:]), "they went first"


def test_a_connector_hears_what_is_superseded_what_is_prolonged_and_is_not_given_what_stays_in_memory():
    kv = manager(num_blocks=8, num_host_blocks=8)
    index = Index()
    kv.store.connect(index)
    names = TokenSequence("look", text("abxy"))
    kv.prefix_cache.hash_blocks(names, names.num_tokens)
    run(kv, "abxy", num_prompt=2)
    run(kv, "abcd", num_prompt=3)
    assert index.superseded == [block_key(0, name) for name in reversed(names.block_hashes[SIZE][2:])]

    secret = TokenSequence("secret", text("hijk"))
    secret.stays_in_memory = True
    assert kv.allocate_slots(secret, secret.num_tokens) is not None
    secret.num_computed_tokens = secret.num_tokens
    kv.offer_text(secret, "in_memory")
    kv.free(secret)
    run(kv, "mnopqrs", None)  # pushes it out
    hidden = {block_key(0, name) for name in secret.block_hashes[SIZE]}
    assert hidden.isdisjoint(index.keys)
    assert all(kv.store.tier.get_cached_block(name) for name in secret.block_hashes[SIZE]), "host memory has it"

    told = TokenSequence("told", text("hi"))  # the same beginning, without that wish
    assert kv.allocate_slots(told, told.num_tokens) is not None
    told.num_computed_tokens = told.num_tokens
    kv.offer_text(told, "24h")
    shared = [block_key(0, name) for name in told.block_hashes[SIZE]]
    assert index.prolonged == shared and hidden & index.keys == set(shared)
    kv.free(told)
    kv.check([])
