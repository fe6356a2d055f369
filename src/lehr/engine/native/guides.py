"""What a request may still say: constraints compiled for the vocabulary, and the place of each request in one.

Compiling and the masks are llguidance's. A mask says which tokens may come next; the sampler takes the others
out before it draws, so that at every position the distribution is the model's, given that the token is
admitted. To add a kind of constraint, translate it in ``_translated``.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lehr.core.errors import MissingDependency
from lehr.core.trace import Constraint
from lehr.engine.base import BadConstraint, EngineError
from lehr.model.base import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

REMEMBERED = 64
"""Compiled constraints that are kept."""
LONGEST = 1 << 20
"""Characters of a constraint."""
SPACE = r"[\x20\x0A\x0D\x09]{1,20}"
"""White space between the parts of a JSON text. Without a bound, a model may never leave it."""
_SHOWN = 400


@dataclass(frozen=True, slots=True)
class Mask:
    """What may be drawn in some rows of a step. allowed_MV: bool, for each of ``rows``.

    dead: rows in which nothing may be; ``allowed_MV`` is all true there.
    """

    rows: list[int]
    allowed_MV: Tensor
    dead: frozenset[int]

    def of(self, row: int) -> Mask | None:
        """Return the mask of one row alone, as row 0; None where it may draw anything."""
        if row not in self.rows:
            return None
        at = self.rows.index(row)
        return Mask([0], self.allowed_MV[at : at + 1], frozenset({0} if row in self.dead else ()))


class Guide:
    """The place of one request in its constraint. It follows the request's own tokens, and needs nothing else:
    where they are computed again, the place stays.
    """

    def __init__(self, matcher: LLMatcher, stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._followed = 0

    def follow(self, tokens: Sequence[int], start: int) -> None:
        """Take note of ``tokens[start:]``, all that was sampled so far."""
        new = tokens[start + self._followed :]
        if new:
            self._matcher.consume_tokens(list(new))
            self._followed += len(new)

    @property
    def complete(self) -> bool:
        """Whether the text is whole and cannot go on."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def admitted(self, draft: Sequence[int]) -> int:
        """Return how many of the drafted tokens, from the first, may follow each other."""
        text = next((i for i, token in enumerate(draft) if token in self._stop_ids), len(draft))
        return self._matcher.validate_tokens(list(draft[:text])) if text else 0

    def fill(self, draft: Sequence[int], words_RW: NDArray[np.int32]) -> None:
        """Write which tokens may come after each beginning of the draft, a bit for each: none at a dead end.
        The draft is admitted.
        """
        ahead = (
            self._matcher.deep_copy() if draft else self._matcher
        )  # a matcher does not come back from a dead end
        _fill(self._matcher, words_RW[0])
        for row, token in enumerate(draft, 1):
            ahead.consume_token(token)
            _fill(ahead, words_RW[row])

    def why_dead(self) -> BadConstraint:
        """Return the error of a request that may say nothing more."""
        said = (
            self._matcher.get_error().partition("\n")[0] or "no token may come next and the text is not whole"
        )
        return BadConstraint(
            f"the constraint came to a dead end after {self._followed} tokens: {said[:_SHOWN]}",
            expected="a constraint under which every beginning can be completed",
            hint="Simplify it; patterns and lengths that contradict each other are a common cause.",
        )


def _fill(matcher: LLMatcher, words_W: NDArray[np.int32]) -> None:
    matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
    if matcher.is_error():
        words_W[:] = 0


class Grammars:
    """Compiles constraints for one vocabulary, and remembers them. Safe to use from several threads.

    stop_ids: the tokens that end a text; without any, a text ends when it cannot go on.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, stop_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = stop_ids
        self._making, self._remembering = threading.Lock(), threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self.words = -(-(vocab_size + 1) // 32)

    def guide(self, constraint: Constraint) -> Guide:
        """Return a guide at the beginning of a text. Takes a while unless the constraint is remembered.

        Raises :class:`BadConstraint`, or :class:`EngineError` where there is no tokenizer.
        """
        with self._remembering:
            known = self._compiled.get(constraint)
            if known is not None:
                self._compiled.move_to_end(constraint)
                return Guide(known.deep_copy(), self._stop_ids)
        matcher = self._compile(constraint)
        with self._remembering:
            self._compiled[constraint] = matcher
            if len(self._compiled) > REMEMBERED:
                self._compiled.popitem(last=False)
            return Guide(matcher.deep_copy(), self._stop_ids)

    def mask(self, guided: Sequence[tuple[int, Guide, Sequence[int]]]) -> Mask:
        """Return what may be drawn, given each guide with its first row and the draft whose rows follow."""
        rows = [first + i for first, _, draft in guided for i in range(1 + len(draft))]
        words_RW = np.zeros((len(rows), self.words), np.int32)
        at = 0
        for _, guide, draft in guided:
            guide.fill(draft, words_RW[at : at + 1 + len(draft)])
            at += 1 + len(draft)
        bits = np.unpackbits(words_RW.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        allowed_MV = torch.from_numpy(bits).bool()
        empty = ~allowed_MV.any(dim=-1)
        allowed_MV[empty] = True
        return Mask(rows, allowed_MV, frozenset(r for r, e in zip(rows, empty.tolist(), strict=True) if e))

    def _compile(self, constraint: Constraint) -> LLMatcher:
        if len(constraint.text) > LONGEST:
            raise BadConstraint(
                f"a constraint of {len(constraint.text)} characters", expected=f"at most {LONGEST}"
            )
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._made()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._vocabulary, _translated(constraint), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar without any text shows here
        if matcher.is_error():
            said = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
            raise BadConstraint(
                f"the {_NAMES[constraint.kind]} cannot be used: {said[:_SHOWN]}",
                expected=_EXPECTED[constraint.kind],
            )
        return matcher

    def _made(self) -> LLTokenizer:
        if self._tokenizer is None:
            raise EngineError("constraints need a tokenizer, and this engine was built without one")
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise MissingDependency(
                "constraints need the package llguidance", hint="Install it: `pip install llguidance`"
            ) from error
        bytewise = _Vocabulary(self._tokenizer, self._vocab_size, self._stop_ids)
        ends = sorted(self._stop_ids) or [self._vocab_size]
        # for many tokens, most of which are text, sets of them are looked up at once
        slices = LLTokenizer.json_slices() if self._vocab_size > 4096 else []
        return LLTokenizer(
            TokenizerWrapper(bytewise), n_vocab=self._vocab_size + 1, eos_token=ends, slices=slices
        )


class _Vocabulary:
    """The vocabulary in bytes, in the shape that llguidance asks for: b"" for what is no text, be it special,
    unused or an end. One id more than the model has is the end of a text where no token is.
    """

    bos_token_id: int | None = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        known = min(vocab_size, tokenizer.vocab_size)
        self.tokens = [b"" if i in stop_ids else tokenizer.token_bytes(i) for i in range(known)]
        self.tokens += [b""] * (vocab_size + 1 - known)
        self.eos_token_id = min(stop_ids, default=vocab_size)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the ids of ``text``."""
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)


_NAMES = {"json": "constraint", "schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}
_EXPECTED = {
    "json": "no text beside it",
    "schema": "an object of JSON Schema, with keywords that a text can be held to from its beginning on",
    "regex": "a regular expression without look-around and back-references",
    "grammar": "a grammar in the form of Lark, whose first rule is start",
}


_FREE = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @text'}
"""Text that has to come next is not put into the tokens that the tokenizer would split it into: every token
that it may begin with is admitted, as everywhere else."""


def _translated(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own form."""
    if constraint.kind not in _NAMES:
        raise BadConstraint(f"unknown kind of constraint {constraint.kind!r}", expected=", ".join(_NAMES))
    try:
        body = _read(constraint)
    except (ValueError, RecursionError) as error:
        raise BadConstraint(
            f"the {_NAMES[constraint.kind]} cannot be read: {error}", expected=_EXPECTED[constraint.kind]
        ) from error
    return json.dumps({"grammars": [_FREE, {**body, "name": "text"}]})


def _read(constraint: Constraint) -> dict[str, Any]:
    from llguidance import LLMatcher

    if constraint.kind == "grammar":
        return {"lark_grammar": constraint.text}
    if constraint.kind == "regex":
        return json.loads(LLMatcher.grammar_from_regex(constraint.text))["grammars"][0]
    schema = '{"type": "object"}' if constraint.kind == "json" else constraint.text
    if not isinstance(json.loads(schema), dict) or (constraint.kind == "json" and constraint.text):
        raise ValueError(f"it is {constraint.text[:80]!r}")
    options: JsonCompileOptions = {"lenient": False, "whitespace_pattern": SPACE}
    return json.loads(LLMatcher.grammar_from_json_schema(schema, overrides=options))["grammars"][0]
