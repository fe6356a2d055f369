"""Which requests run in the next step, and with how many tokens.

Every running request that decodes gets its one token first; what is left of the token budget goes to
prompts, oldest first, cut into chunks where needed. A request whose prompt another one is computing right
now waits for that step to end and finds the result in the cache; one whose prefix comes from a slower tier
waits until it is there, and others go first. When blocks run out, the youngest
running request is sent back to wait and will be computed again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from lehr.engine.native.cache import BLOCK, BlockPool, link, seed_of
from lehr.engine.native.request import Request
from lehr.engine.native.rows import Rows
from lehr.engine.native.tiers.prefetch import AT_ONCE, SEGMENT, Prefetcher

DRAFTED_ROWS = 16
"""Tokens in a step up to which drafts are added: beyond, a row costs about as much as it saves."""

AHEAD = 8
"""Requests in line whose keys and values are looked for in slower tiers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """``count`` tokens of a request, to be computed in a step, and perhaps a draft of what follows them."""

    request: Request
    count: int
    draft: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Tokens that the model sees."""
        return self.count + len(self.draft)


class Scheduler:
    """Owns the queues, the block pool and the working rows. Pure bookkeeping: runs no model."""

    def __init__(
        self,
        pool: BlockPool,
        rows: Rows,
        seed: bytes,
        *,
        max_running: int,
        token_budget: int,
        prefetcher: Prefetcher | None = None,
    ) -> None:
        self.pool, self.rows, self.seed = pool, rows, seed
        self.max_running, self.token_budget = max_running, token_budget
        self.prefetcher = prefetcher
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._pending: dict[bytes, Request] = {}
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request that fits (see :meth:`fits`)."""
        self.waiting.append(request)

    def fits(self, tokens: int) -> bool:
        """Return whether a request that reaches this length could ever run."""
        return blocks_for(tokens) <= self.pool.total

    def plan(self) -> list[Piece]:
        """Return what the next step computes, with blocks and rows in place. Empty only when idle."""
        pieces: list[Piece] = []
        decoding = [r for r in self.running if r.remaining == 1]
        for request in decoding:
            if request in self.running:
                self._grow(request, len(request.tokens))
        decoding = [r for r in decoding if r.slot is not None]
        room = DRAFTED_ROWS // max(1, len(decoding)) - 1
        for request in decoding:
            pieces.append(Piece(request, 1, self._draft(request, room)))
        budget = self.token_budget - sum(p.rows for p in pieces)
        for request in list(self.running):
            if budget > 0 and request.slot is not None and request.remaining > 1:
                pieces.append(Piece(request, min(request.remaining, budget)))
                budget -= pieces[-1].count
        if self._admit(pieces, budget):
            self._look_ahead()
        return pieces

    def _draft(self, request: Request, room: int) -> tuple[int, ...]:
        """Return a draft that fits what the request may still sample, and blocks that nobody waits for."""
        if request.drafter is None:
            return ()
        room = min(room, request.sampling.max_tokens - request.own - 1)
        drafted = tuple(request.drafter.draft(room))
        if request.guide is not None and drafted:
            request.guide.follow(request.tokens, request.prompt_length)
            drafted = drafted[: request.guide.admitted(drafted)]
        while len(request.blocks) < blocks_for(len(request.tokens) + len(drafted)) and self.pool.free:
            request.blocks.append(self.pool.allot())
        return drafted[: len(request.blocks) * BLOCK - len(request.tokens)]

    def _admit(self, pieces: list[Piece], budget: int) -> bool:
        """Let requests join in their order. Return False where one lacked blocks: then none are to be had."""
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.max_running:
                return True
            if self._is_being_computed(request) or self._is_loading(request):
                continue
            if not self._join(request):
                return False
            self.waiting.remove(request)
            pieces.append(Piece(request, min(request.remaining, budget)))
            budget -= pieces[-1].count
        return True

    def _look_ahead(self) -> None:
        """Begin to load what the next requests in line will need."""
        if self.prefetcher is None:
            return
        self.prefetcher.settle()
        for request in islice(self.waiting, AHEAD):
            if self.prefetcher.busy >= AT_ONCE:
                return
            self._begin_load(request)

    def _is_loading(self, request: Request) -> bool:
        """Whether a request, whose turn it is, should wait for what is on its way from a slower tier."""
        if self.prefetcher is None:
            return False
        self._begin_load(request)
        return request.load is not None and not self.prefetcher.settled(request.load)

    def _begin_load(self, request: Request) -> None:
        if self.prefetcher is not None and request.load is None and not self._is_being_computed(request):
            usable = (len(request.tokens) - 1) // BLOCK
            request.load = self.prefetcher.begin(request.chain, usable, len(self.running))

    def _end_load(self, request: Request) -> None:
        if self.prefetcher is not None and request.load is not None:
            self.prefetcher.release(request.load)
            request.load = None

    def _yield_blocks(self) -> bool:
        """Take blocks back from what was loaded for requests that still wait, the last in line first. Return
        whether any became available. A load that is under way is left to end: it would be begun again.
        """
        before = self.pool.available
        for request in reversed(self.waiting):
            if self.prefetcher is not None and request.load is not None and request.load.over:
                self._end_load(request)
            if self.pool.available > before:
                return True
        return False

    def _seed(self, request: Request) -> bytes:
        """Return what a request's chain of hashes starts from: an adapter finds what it computed itself, and a
        request whose keys depend on its length what its equals computed.
        """
        seed = self.seed if request.adapter is None else seed_of(self.seed, request.adapter.identity)
        return link(seed, (request.stretch,)) if request.stretch else seed

    def _chain(self, request: Request) -> None:
        while (len(request.chain) + 1) * BLOCK <= len(request.tokens):
            start = len(request.chain) * BLOCK
            parent = request.chain[-1] if request.chain else self._seed(request)
            request.chain.append(link(parent, request.tokens[start : start + BLOCK]))

    def _wanted(self, request: Request) -> list[bytes]:
        """Return the names under which the prompt's blocks are published, the last partial one included."""
        whole, rest = divmod(request.prompt_length, BLOCK)
        names = request.chain[:whole]
        if rest:
            parent = names[-1] if names else self._seed(request)
            names = [*names, link(parent, request.tokens[whole * BLOCK : request.prompt_length])]
        return names

    def _is_being_computed(self, request: Request) -> bool:
        self._chain(request)
        for name in self._wanted(request):
            if self.pool.find(name) is None:
                return name in self._pending or self._is_coming(name, request)
        return False

    def _is_coming(self, name: bytes, request: Request) -> bool:
        return self.prefetcher is not None and request.load is None and self.prefetcher.is_coming(name)

    def _join(self, request: Request) -> bool:
        """Give a request blocks and a row, filled from the cache as far as possible."""
        length = len(request.tokens)
        match = self.pool.match(request.chain, self._seed(request), request.tokens, length - 1)
        self._end_load(request)
        needed = blocks_for(length) - len(match.blocks)
        headroom = sum(1 for r in self.running if r.remaining == 1 and len(r.tokens) % BLOCK == 0)
        wanted = needed + (headroom if self.running else 0)
        while wanted > self.pool.available and self._yield_blocks():
            pass
        if wanted > self.pool.available:
            for block in reversed(match.blocks):
                self.pool.release(block)
            return False
        request.slot = self.rows.take(request.longest)
        self.pool.load_whole(match.blocks, request.slot)
        whole = len(match.blocks) * BLOCK
        if match.part_tokens:
            self.pool.load(match.part, request.slot, whole, match.part_tokens)
        request.blocks = [*match.blocks, *(self.pool.allot() for _ in range(needed))]
        request.computed = whole + match.part_tokens
        request.published = len(match.blocks)
        if request.own == 0:
            request.cached_tokens = request.computed
        self.running.append(request)
        for name in self._wanted(request)[request.published :]:
            self._pending.setdefault(name, request)
        return True

    def _grow(self, request: Request, length: int) -> None:
        """Give a request room for ``length`` tokens, at the cost of the youngest, which may be itself."""
        while len(request.blocks) < blocks_for(length):
            if self.pool.available:
                request.blocks.append(self.pool.allot())
                continue
            if self._yield_blocks():
                continue
            youngest = self.running[-1]
            self.send_back(youngest)
            self.preemptions += 1
            if youngest is request:
                return

    def publish(self, request: Request, *, everything: bool = False) -> None:
        """Make findable what a request has computed: whole blocks, and the partial last block when the
        prompt has just been completed or the request ends (``everything``).
        """
        if request.kept or request.slot is None:
            return
        self._chain(request)
        first = 0 if everything else request.published
        while (request.published + 1) * BLOCK <= request.computed:
            i = request.published
            self.pool.publish(request.blocks[i], request.chain[i], request.slot, i * BLOCK, BLOCK)
            self._pending.pop(request.chain[i], None)
            request.published += 1
        if self.prefetcher is not None:
            end = request.published if everything else request.published // SEGMENT * SEGMENT
            self.prefetcher.note(request.chain, first, end)
        start = request.published * BLOCK
        if (everything or request.computed == request.prompt_length) and request.computed > start:
            parent = request.chain[request.published - 1] if request.published else self._seed(request)
            name = link(parent, request.tokens[start : request.computed])
            self.pool.publish(
                request.blocks[request.published], name, request.slot, start, request.computed - start
            )
            self._pending.pop(name, None)

    def send_back(self, request: Request) -> None:
        """Take everything but its tokens from a running request and put it first in the queue."""
        self.drop(request)
        self.waiting.appendleft(request)

    def drop(self, request: Request) -> None:
        """Take a request out, wherever it is, and free what it holds."""
        if request.slot is None:
            if request in self.waiting:
                self.waiting.remove(request)
            self._end_load(request)
            return
        self.publish(request, everything=True)
        self.running.remove(request)
        for name in [n for n, r in self._pending.items() if r is request]:
            del self._pending[name]
        lane = request.slot.lane
        lane.free(request.slot, lane.capacity)
        # a prefix is of use without what follows, not the other way round
        for block in reversed(request.blocks):
            self.pool.release(block)
        request.slot, request.blocks, request.computed, request.published = None, [], 0, 0
        request.kept = False

    def restart(self, seed: bytes) -> None:
        """Begin a new weight version: nothing that was computed before can be found any more."""
        self.seed = seed
        self.pool.flush()
        self._pending.clear()
        for request in self.waiting:
            self._end_load(request)
        if self.prefetcher is not None:
            self.prefetcher.restart()
        for request in [*self.waiting, *self.running]:
            request.chain = []
            request.published = 0


def blocks_for(tokens: int) -> int:
    """Return how many blocks ``tokens`` need."""
    return -(-tokens // BLOCK)
