"""Tokens that requests must not sample: tokens other than the allowed ones, and tokens that complete a bad word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftwire.contract.fields import limits_of
from draftwire.model.devices import upload
from draftwire.v1 import config_pb2
from draftwire_kernels import AllowedTokens, ForbiddenSequences
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request
from verifier_service.sampling.request_slots import RequestSlots

MOST_WORDS = limits_of(config_pb2.SamplingParams(), "bad_word_ids").max_items
LONGEST_WORD = limits_of(config_pb2.TokenSequence(), "ids").max_items
ANY_TOKEN, NO_TOKEN = -2, -1


class AllowedLists:
    """The tokens that each request may draw, in a table [max_num_seqs, V] bool on the device."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._slots = RequestSlots(max_num_seqs)
        self._mask: torch.Tensor | None = None

    def add(self, request: Request, tokens: np.ndarray) -> None:
        """Copy a request's allowed tokens, int64 [n], to the device, if they are not there yet."""
        if request in self._slots:
            return
        if self._mask is None:
            self._mask = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        (ids,) = upload([tokens], self._device)
        self._mask[self._slots.assign(request)].zero_().index_fill_(0, ids, True)

    def release(self, request: Request) -> None:
        """Drop the list of a request that has ended or was preempted."""
        self._slots.release(request)

    def of(self, requests: Sequence[Request]) -> AllowedTokens | None:
        """Return the allowed tokens of a step's requests; None if all requests may draw every token."""
        slots = self._slots.of(requests)
        if self._mask is None or max(slots) < 0:
            return None
        return AllowedTokens(torch.tensor(slots), self._mask)


class BadWords:
    """The sequences that each request's output must not contain, and the last tokens of the output, on the device.

    The last tokens change in stream order: the next step reads a step's draw before the host does.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._count = max_num_seqs
        self._device = device
        self._slots = RequestSlots(max_num_seqs)
        self._sizes: dict[Request, tuple[int, int]] = {}  # number of sequences, most tokens before the last one
        self._tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # last, before, tail

    def add(self, request: Request, words: Sequence[Sequence[int]]) -> None:
        """Copy a request's sequences and the end of its output to the device, if they are not there yet."""
        if request in self._slots:
            return
        length = LONGEST_WORD - 1
        if self._tables is None:
            shapes = (self._count, MOST_WORDS), (self._count, MOST_WORDS, length), (self._count, length)
            last, before, tail = (torch.zeros(shape, dtype=torch.int64, device=self._device) for shape in shapes)
            self._tables = last, before, tail
        last_row = np.full(MOST_WORDS, words[0][-1], np.int64)
        before_row = np.full((MOST_WORDS, length), ANY_TOKEN, np.int64)
        for place in range(MOST_WORDS):
            word = words[place] if place < len(words) else words[0]
            last_row[place] = word[-1]
            if len(word) > 1:
                before_row[place, 1 - len(word) :] = word[:-1]
        tail_row = np.full(length, NO_TOKEN, np.int64)
        output = request.tokens[len(request.prompt) :][-length:]
        tail_row[length - len(output) :] = output
        slot = self._slots.assign(request)
        self._sizes[request] = len(words), max(map(len, words)) - 1
        rows = upload([last_row, before_row.ravel(), tail_row], self._device)
        for table, row in zip(self._tables, rows, strict=True):
            table[slot].view(-1).copy_(row)

    def release(self, request: Request) -> None:
        """Drop the state of a request that has ended or was preempted. A preempted request draws its last tokens
        again."""
        self._slots.release(request)
        self._sizes.pop(request, None)

    def of(self, requests: Sequence[Request]) -> ForbiddenSequences | None:
        """Return the sequences of a step's requests; None if no request has any."""
        sizes = [self._sizes[request] for request in requests if request in self._sizes]
        if self._tables is None or not sizes:
            return None
        count, length = map(max, zip(*sizes, strict=True))
        last, before, tail = self._tables
        first = LONGEST_WORD - 1 - length
        slots = torch.tensor(self._slots.of(requests))
        return ForbiddenSequences(slots, last[:, :count], before[:, :count, first:], tail[:, first:])

    def count(self, batch: Sequence[ScheduledRows], drawn: torch.Tensor) -> None:
        """Append the drawn tokens of a batch to the ends of its requests' outputs.

        Args:
            drawn: [len(batch), 1 + k] int64 on the device, -1 after the drawn tokens.
        """
        slots = self._slots.of([item.request for item in batch])
        users = [(place, slot) for place, slot in enumerate(slots) if slot >= 0]
        if self._tables is None or not users:
            return
        tail = self._tables[2]
        place, slot = upload(list(np.array(users).T), self._device)
        tokens = drawn.index_select(0, place)
        output = torch.cat([tail.index_select(0, slot), tokens], dim=1)
        kept = (tokens >= 0).sum(1, keepdim=True) + torch.arange(tail.shape[1], device=self._device)
        tail.index_copy_(0, slot, output.gather(1, kept))
