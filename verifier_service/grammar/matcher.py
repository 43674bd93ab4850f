"""The state of a request's output in its grammar, and the masks of the next tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import llguidance
import numpy as np
import torch

from draftwire.contract.errors import DraftwireError, ServerError
from verifier_service.grammar.translation import GrammarSource
from verifier_service.grammar.vocabulary import Vocabulary

ALL = np.int32(-1)
# The masks of 32 requests with 4 drafts take 1.3 ms with 1 thread, 1.5 with 4 and 2.0 with 16 (16 cores). Masks of
# complex grammars take up to 90 us each, so 1 thread would be slower for them.
MASK_THREADS = 4


class Matcher:
    """The grammar of one request, at the end of its output. Used only by the engine's thread.

    An end id is drawn where the text may end. It ends the text there, even if the grammar also has it as text. Where
    the text may not end, it is drawn only if nothing else can follow.

    Row j of a verify step is masked by the grammar after d_1 .. d_j. A draft x outside of the grammar has p(x) = 0.
    These drafts are verified:

    - Without draft logits the draft's distribution is one-hot. So x is certainly rejected, and the token is drawn from
      p without x, which is p. Without the draft, the same token is drawn from p with the same noise. So x and all later
      drafts are cut, although the cut depends on x itself.
    - With draft logits a rejected x is followed by a draw from max(p - q, 0), normalised, which is not p: accepted
      drafts from q make up for the difference. A cut of x because of its value would bias the output. So x is verified
      and rejected. All later drafts are cut: their number may depend on earlier drafts.

    Attributes:
        error: Why the request cannot continue, or None.
        vocabulary: The target's vocabulary.
        ends: Mask of the end ids, [num_words] int32.
        end_words: Words of `ends` that are not 0, int64, ascending.
    """

    def __init__(
        self,
        source: GrammarSource,
        vocabulary: Vocabulary,
        matcher: llguidance.LLMatcher,
        end_ids: Iterable[int],
        *,
        min_tokens: int = 0,
        keeps_rejected: bool = True,
    ) -> None:
        """Begin before the first token of the output.

        Args:
            matcher: Matcher of the compiled grammar; not shared.
            end_ids: At least one token id that may end the output after a complete text.
            min_tokens: Output tokens before which these ids are drawn only if nothing else can follow.
            keeps_rejected: Whether the first draft outside of the grammar is verified if it has logits. False for
                synthetic acceptance, which would accept it.
        """
        self.error: DraftwireError | None = None
        self.vocabulary = vocabulary
        self._source = source
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._keeps_rejected = keeps_rejected
        self._end_ids = frozenset(end_ids)
        self.ends = np.zeros(vocabulary.num_words, np.int32)
        for token in self._end_ids:
            self.ends.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self.end_words = np.flatnonzero(self.ends)
        self._num_text = 0  # output tokens that are part of the grammar's text
        self._num_ends = 0  # end tokens after the text

    @property
    def num_tokens(self) -> int:
        """Return the number of output tokens taken so far."""
        return self._num_text + self._num_ends

    def follow(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the output."""
        begin = 0
        while begin < len(tokens) and self.error is None:
            if self._num_ends > 0 or (tokens[begin] in self._end_ids and self._matcher.is_accepting()):
                self._num_ends += 1
                begin += 1
                continue
            end = next((i for i in range(begin + 1, len(tokens)) if tokens[i] in self._end_ids), len(tokens))
            count = self._matcher.try_consume_tokens(list(tokens[begin:end]))
            self._num_text += count
            begin += count
            if begin < end:
                self.error = ServerError(f"the output's token {tokens[begin]} is not in the request's grammar")

    def rewind(self, num_tokens: int) -> None:
        """Take back the last tokens, so that at most `num_tokens` remain."""
        surplus = max(0, self.num_tokens - num_tokens)
        ends = min(surplus, self._num_ends)
        self._num_ends -= ends
        if surplus > ends and self._matcher.rollback(surplus - ends):
            self._num_text -= surplus - ends

    def num_verified(self, drafts: Sequence[int], *, has_logits: bool) -> int:
        """Return how many of a step's drafts are verified; the class's docstring explains the rules."""
        if self.error is not None:
            return 0
        if self._num_ends > 0:
            count = next((i for i, draft in enumerate(drafts) if draft not in self._end_ids), len(drafts))
        else:
            count = self._matcher.validate_tokens(list(drafts))
            for place, draft in enumerate(drafts[: count + 1]):
                if draft in self._end_ids and self._is_complete_after(drafts[:place]):
                    return place + 1
        keeps = has_logits and self._keeps_rejected and count < len(drafts)
        return count + keeps

    def _is_complete_after(self, drafts: Sequence[int]) -> bool:
        count = self._matcher.try_consume_tokens(list(drafts))
        is_complete = count == len(drafts) and self._matcher.is_accepting()
        self._matcher.rollback(count)
        return bool(is_complete)

    def active(self) -> llguidance.LLMatcher | None:
        """Return llguidance's matcher, which fills the masks of the next tokens; None if only end tokens can follow."""
        return None if self._has_ended else self._matcher

    @property
    def _has_ended(self) -> bool:
        return self._num_ends > 0 or self.error is not None

    def check(self) -> bool:
        """Return whether only end tokens can follow; set `error` if llguidance could not fill a mask."""
        if self.error is None and self._matcher.is_error():
            reason = self._matcher.get_error().split("\n", 1)[0]
            self.error = self._source.error(f"is too complex after {self.num_tokens} tokens of output: {reason}")
        return self._has_ended

    def finish(self, rows: np.ndarray, drafts: Sequence[int], is_complete: np.ndarray) -> None:
        """Convert rows filled by llguidance to the masks of the request's rows.

        Args:
            rows: [1 + len(drafts), words] int32.
            drafts: The request's drafts.
            is_complete: [1 + len(drafts)] bool, whether the output's text may end before each row's token.
        """
        if self._has_ended:
            rows[:] = self.ends
            return
        words, ends = self.end_words, self.ends[self.end_words]
        for place in np.flatnonzero(is_complete):
            rows[place, words] |= ends
        if drafts and drafts[-1] in self._end_ids and is_complete[len(drafts) - 1]:
            rows[-1] = self.ends
        is_held = ~is_complete
        is_held[: max(0, self._min_tokens - self.num_tokens)] = True
        for place in np.flatnonzero(is_held & (rows[:, words] & ends).any(1)):
            kept = rows[place].copy()
            kept[words] &= ~ends
            if kept.any():
                rows[place] = kept


class RowMasks(NamedTuple):
    """The tokens that rows of a step may draw."""

    rows: np.ndarray
    """[M] int64, ascending: rows of the logits."""
    bits: torch.Tensor
    """[M, W] int32 on the CPU, pinned for a GPU: bit i of word w allows the token 32 w + i."""


class MaskedRows(NamedTuple):
    """The rows of one request in a step."""

    matcher: Matcher
    first: int  # row of the logits
    drafts: Sequence[int]  # there is one row more than drafts


class MaskFiller:
    """Fills the masks of a step for several requests in parallel, without the GIL."""

    def __init__(self, device: torch.device) -> None:
        self._executor = llguidance.LLExecutor(MASK_THREADS)
        self._is_pinned = device.type == "cuda"

    def fill(self, requests: Sequence[MaskedRows]) -> RowMasks:
        """Return the masks of a step's rows; set `Matcher.error` of requests whose grammar fails."""
        counts = [1 + len(one.drafts) for one in requests]
        vocabulary = requests[0].matcher.vocabulary
        num_words = vocabulary.num_words
        bits = torch.empty(sum(counts), num_words, dtype=torch.int32, pin_memory=self._is_pinned)
        words = bits.numpy()
        words.fill(ALL)  # rows after a rejected draft are neither filled nor used
        begins = [0, *accumulate(counts)]
        single: list[tuple[llguidance.LLMatcher, int]] = []
        drafted: list[tuple[llguidance.LLMatcher, int, list[int]]] = []
        for one, begin in zip(requests, begins, strict=False):
            matcher = one.matcher.active()
            if matcher is not None and one.drafts:
                drafted.append((matcher, begin, list(one.drafts)))
            elif matcher is not None:
                single.append((matcher, begin))
        place = bits.data_ptr(), 4 * num_words, len(bits)
        if single:
            self._executor.unsafe_compute_mask_ptr(single, *place)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        is_complete = vocabulary.take_end_bits(words)
        # Few requests are at a place where an end id or the end of the text is allowed.
        may_end = np.logical_or.reduceat(is_complete | _allow_ends(requests, words, counts), begins[:-1])
        for one, may, (begin, end) in zip(requests, may_end.tolist(), pairwise(begins), strict=True):
            if one.matcher.check() or may:
                one.matcher.finish(words[begin:end], one.drafts, is_complete[begin:end])
        rows = np.concatenate([np.arange(one.first, one.first + n) for one, n in zip(requests, counts, strict=True)])
        return RowMasks(rows, bits)


def _allow_ends(requests: Sequence[MaskedRows], words: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """Return [M] bool: which masks, [M, num_words], allow an end id of their request.

    Args:
        counts: Number of masks of each request.
    """
    used = np.unique(np.concatenate([one.matcher.end_words for one in requests]))
    ends = np.stack([one.matcher.ends[used] for one in requests])
    allowed: np.ndarray = (words[:, used] & ends.repeat(counts, 0)).any(1)
    return allowed
