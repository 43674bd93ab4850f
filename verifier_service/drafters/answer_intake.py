"""Intake of a drafter's answer: checks, drafts for the requests, times and load for the pacing."""

from __future__ import annotations

import math

from draftwire.contract.errors import InvalidArgumentError
from draftwire.v1 import config_pb2, draft_pb2
from verifier_service.core.request import ReadyDrafts, Request
from verifier_service.core.step_times import StepTimes
from verifier_service.drafters.answers import decode_answer
from verifier_service.drafters.audit import Audit
from verifier_service.drafters.placement import Placement
from verifier_service.drafters.session import DraftSession
from verifier_service.drafters.stream import Answered
from verifier_service.pacing import Message


class AnswerIntake:
    """Checks the drafters' answers and stores their drafts in the requests. Only the engine's thread uses it.

    A drafter with a wrong answer is expelled.

    Attributes:
        audit: Samples drafts again to find drafts that do not follow their logits.
    """

    def __init__(
        self, config: config_pb2.SpeculativeConfig, vocab_size: int, times: StepTimes, placement: Placement
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._times = times
        self._placement = placement
        self.audit = Audit(use_fp64=config.use_fp64_gumbel)
        self._uncounted: list[tuple[DraftSession, Message, Answered]] = []

    def handle(self, session: DraftSession, answer: Answered) -> None:
        """Process a drafter's answer to one of its unanswered messages."""
        drafts = answer.drafts
        message = session.unanswered.get(drafts.step_id)
        wrong = self._find_wrong(drafts, message)
        if message is None or wrong:
            self._placement.give_up(session, wrong, expel=True)
            return
        for step_id in [s for s in session.unanswered if s <= drafts.step_id]:
            del session.unanswered[step_id]
        if session.committed is not None and session.committed.step_id <= drafts.step_id:
            session.committed = None
        session.is_late = session.is_late and bool(session.unanswered)
        try:
            session.stream.record_answer(drafts)
            self._store_drafts(session, drafts)
        except InvalidArgumentError as error:
            self._placement.give_up(session, f"wrong answer: {error}", expel=True)
        for binding in session.bindings:
            if binding.asked_step <= drafts.step_id:
                binding.wait_until = None
        self._uncounted.append((session, message, answer))

    def count(self, step_s: float) -> None:
        """Update pacing and breakers with the times and the load of the answers since the last call.

        This is not part of `handle`, so that a step can start with the answer's drafts first. `step_s`: seconds of a
        step of the target.
        """
        for session, message, answer in self._uncounted:
            received, drafts = max(answer.received, message.sent), answer.drafts
            session.pace.take_answer(message, received, step_s)
            if message.sequences:
                session.breaker.take_answer(received - max(message.sent, session.last_received), received)
            session.last_received = received
            session.take_load(drafts.load)
        self._uncounted.clear()
        for stream in self._placement.sessions:
            stream.count_received()

    @staticmethod
    def _find_wrong(drafts: draft_pb2.Drafts, message: Message | None) -> str:
        """Return why an answer is wrong as a whole; empty if it is valid."""
        if message is None:
            return f"answered step {drafts.step_id}, which had no answer due"
        if not 0 <= drafts.compute_time_s < math.inf:
            return f"computed for {drafts.compute_time_s} s"
        if len(drafts.sequence_ids) > message.rows:
            return f"answered for more sequences than step {drafts.step_id} had rows"
        return ""

    def _store_drafts(self, session: DraftSession, answer: draft_pb2.Drafts) -> None:
        decoded = decode_answer(
            answer,
            self._config,
            self._vocab_size,
            session.stream.head.draft_vocab_size,
            session.draft_token_ids,
            session.stream.receiver,
            confidences=session.stream.head.confidences,
        )
        tokens, logits, sure = decoded.tokens, decoded.logits, decoded.confidences
        answered: list[tuple[Request, ReadyDrafts]] = []
        start = end = 0
        for sequence_id, status, committed_length, last_token, num_drafts in zip(*decoded[:5], strict=True):
            start, end = end, end + num_drafts
            binding = session.sequences.get(sequence_id)
            if binding is None:
                continue
            if status != draft_pb2.SEQUENCE_STATUS_OK:
                self._placement.unbind(binding)
            elif committed_length == binding.asked_length:
                if num_drafts > binding.asked_drafts:
                    raise InvalidArgumentError("drafts.num_drafts", num_drafts, f"{binding.asked_drafts} were asked")
                binding.wait_until = None
                request, known = binding.request, binding.request.tokens
                # Drafts of a request in flight are late: a running step will add tokens.
                if request.num_in_flight == 0 and committed_length == len(known) and last_token == known[-1]:
                    own = None if sure is None else sure[start:end]
                    drafts = ReadyDrafts(committed_length, last_token, tokens[start:end], logits, start, own)
                    answered.append((request, drafts))
        if logits is not None:
            self._times.count_logits(logits.carrier, len(tokens) * logits.row_bytes)
            address, is_on_trial = session.stream.address, session.breaker.is_on_trial
            unusable = {id(drafts) for drafts in self.audit.find_unusable(address, answered, is_on_trial=is_on_trial)}
            answered = [(request, drafts) for request, drafts in answered if id(drafts) not in unusable]
        for request, drafts in answered:
            if self._placement.is_bound(request):  # a later entry of the answer may have ended the sequence
                request.drafts = drafts
