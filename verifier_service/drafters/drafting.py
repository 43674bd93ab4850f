"""The engine's side of drafting: messages to the drafters, their answers, and the cost of drafts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from draftwire.contract import validation as cfg
from draftwire.v1 import config_pb2, draft_pb2, generate_pb2
from verifier_service.core.batch import ScheduledRows
from verifier_service.core.request import Request
from verifier_service.core.step_times import StepTimes
from verifier_service.drafters.answer_intake import AnswerIntake
from verifier_service.drafters.breaker import Breaker
from verifier_service.drafters.budgeting import DraftBudget
from verifier_service.drafters.draft_wait import DraftWaitPolicy
from verifier_service.drafters.early_features import begin_early
from verifier_service.drafters.features import FeatureKind, FeatureStore
from verifier_service.drafters.placement import Placement
from verifier_service.drafters.sender import StepSender
from verifier_service.drafters.session import DraftSession, EarlyFeatures
from verifier_service.drafters.stream import Answered, Connected, Disconnected, Draining, LinkEvent, Loaded, Stream
from verifier_service.pacing import Calibration, Limit, Pace, Profile, StepCount, VerificationBudget
from verifier_service.sampling.sampler import synthetic_rates

# A drafter with more bytes of unanswered features counts as lost.
MAX_UNANSWERED_BYTES = 512 * 1024 * 1024
# A request's drafter, by its calibration, which outlives the session, or None; and the number of drafts received.
DraftsOf = tuple[Calibration | None, int]


class Drafting:
    """Sends features to the drafters and collects drafts. Only the engine's thread uses it.

    No request waits past the deadline. A drafter that misses the deadline is late until it has answered every message,
    and no request waits for a late drafter. If drafts lower the throughput, nothing is sent to the drafter
    (`pacing.policy`).

    Attributes:
        placement: The place of each request at a drafter.
        wait_policy: Decides which requests wait for drafts, and for how long.
        answers: Checks the drafters' answers.
        budget: Chooses which of the received drafts are verified.
        is_adaptive: Whether fewer drafts than configured are requested and verified if that is faster.
    """

    def __init__(
        self,
        config: config_pb2.SpeculativeConfig,
        vocab_size: int,
        deadline_s: float | None,
        device: torch.device,
        times: StepTimes,
        *,
        adaptive_k: bool | None = None,
        profile: Profile | None = None,
    ) -> None:
        """
        Args:
            config: The verifier's settings.
            vocab_size: Size of the target's vocabulary.
            deadline_s: Maximum wait for drafts in seconds. With None the wait ends with an answer or the loss of the
                drafter.
            device: The target's device.
            times: Counts steps, bytes and rows.
            adaptive_k: Whether fewer drafts than configured, or none, are requested if that is faster. None means yes
                if there is a deadline and acceptance is not synthetic, because measurements need the configured number
                of drafts.
            profile: Measured seconds of the target's passes.
        """
        self._config = config
        self._deadline_s = deadline_s
        self._device = device
        self.placement = Placement()
        self._sessions, self._bindings = self.placement.sessions, self.placement.bindings
        self.answers = AnswerIntake(config, vocab_size, times, self.placement)
        is_synthetic = config.rejection_sample_method == cfg.SYNTHETIC
        self.is_adaptive = deadline_s is not None and not is_synthetic if adaptive_k is None else adaptive_k
        rates = synthetic_rates(config)
        self._mean_rates = None if rates is None else rates.mean(1).tolist()
        budget = VerificationBudget(profile or Profile(), is_adaptive=self.is_adaptive)
        self.budget = DraftBudget(self._bindings, budget, rates)
        self.wait_policy = DraftWaitPolicy(self._sessions, self._bindings)
        self._sender = StepSender(config, times, self.wait_policy)
        self._pinned_drafts: int | None = None
        self._num_running = 0  # requests at the last flush
        self._wants_drafts = False  # whether any of these requests wants drafts
        self._had_prompts = True  # whether the last counted step had prompts
        self._landed = 0.0  # monotonic time at which the host had the last step's tokens

    def pin(self, num_drafts: int, limit: Limit) -> None:
        """Fix the number of drafts of each drafter that connects later, and the limit; for tests and measurements."""
        self._pinned_drafts = num_drafts
        self.budget.budget.pin(limit)

    @property
    def sessions(self) -> Mapping[Stream, DraftSession]:
        """The connected drafters."""
        return self._sessions

    @property
    def feature_kinds(self) -> set[FeatureKind]:
        """Return the kinds of features that the connected heads need."""
        return {stream.head.kind for stream in self._sessions}

    def describe(self, status: generate_pb2.DrafterStatus) -> None:
        """Fill in the status of the drafter at the status' address; callable from any thread."""
        address = status.address
        status.sequences = self.placement.sequences_at(address)
        status.drafted, status.accepted = self.budget.verified[address], self.budget.accepted[address]
        status.offered, status.expected = self.budget.offered[address], self.budget.expected.get(address, 0.0)
        session = next((one for one in list(self._sessions.values()) if one.stream.address == address), None)
        status.other_sequences = 0 if session is None else session.others
        status.kv_cache_usage = 0.0 if session is None else session.kv_cache_usage
        plan = None if session is None else session.pace.describe(self.wait_policy.step_s)
        if plan is None:
            status.ClearField("plan")
        else:
            status.plan.CopyFrom(plan)

    def handle(self, event: LinkEvent) -> None:
        """Handle an event of a drafter's stream."""
        if isinstance(event, Connected):
            ids = event.stream.head.draft_token_ids
            self._sessions[event.stream] = DraftSession(
                event.stream,
                None if ids is None else ids.to(self._device),
                Pace(
                    min(self._config.num_speculative_tokens, event.stream.head.max_drafts),
                    self._deadline_s,
                    self.budget.budget.costs,
                    is_adaptive=self.is_adaptive,
                    is_local=event.stream.sender.carrier != draft_pb2.CARRIER_BYTES,
                    rates=self._mean_rates,
                ),
                Breaker(self._deadline_s, on_trial=event.stream.on_trial),
            )
            if self._pinned_drafts is not None:
                self._sessions[event.stream].pace.policy.pin(self._pinned_drafts)
        elif event.stream in self._sessions:
            session = self._sessions[event.stream]
            if isinstance(event, Answered):
                self.answers.handle(session, event)
            elif isinstance(event, Loaded):
                session.take_load(event.load)
            elif isinstance(event, Draining):
                session.is_draining = True
            elif isinstance(event, Disconnected):
                self.placement.drop(session)

    def next_deadline(self) -> float | None:
        """Return the earliest monotonic time at which a wait ends or a drafter counts as lost; None without one."""
        first = min([self.wait_policy.next_deadline, *(session.lost_at for session in self._sessions.values())])
        return None if first == float("inf") else first

    def release(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._sender.forget(request)
        self.placement.release(request)

    def flush(
        self, requests: Sequence[Request], stores: dict[FeatureKind, FeatureStore], *, watches: bool = True
    ) -> None:
        """Send every drafter its missing rows, and request drafts for sequences without a backlog.

        `watches`: whether to check for slow and drained drafters; false while answers may be unprocessed.
        """
        self.answers.count(self.wait_policy.step_s)
        now = time.monotonic()
        if watches:
            self.placement.leave_drained()
            self.placement.watch_circuits(now)
        self.placement.place(requests, stores, now)
        for session in list(self._sessions.values()):
            store = stores[session.stream.head.kind]
            if session.is_draining:
                continue
            if session.pace.is_off:
                if watches:  # once a step
                    self.placement.leave_behind(session)
                if session.closed_ids and session.has_room:
                    self._sender.send_closed(session, store)
            elif session.has_room:
                self._sender.send(session, store, now)
            elif not session.catches_up:  # else the next message requests no drafts
                self._hold(session, now)
            if session.unanswered_bytes > MAX_UNANSWERED_BYTES:
                self.placement.give_up(session, f"more than {MAX_UNANSWERED_BYTES} bytes are unanswered")
        for session in self._sessions.values():
            session.give_up_early()
        self._sender.note_rows(requests)
        self._num_running = len(requests)
        self._wants_drafts = any(request.num_speculative_tokens > 0 for request in requests)

    def announce(
        self,
        rows: Sequence[ScheduledRows],
        drawn: torch.Tensor,
        stores: Mapping[FeatureKind, FeatureStore],
    ) -> dict[DraftSession, EarlyFeatures]:
        """Announce a launched step to the drafters of its requests, as described in `early_features`.

        The device writes the step's features to the send buffer, so that the step's message does not wait for the
        device. `drawn`: the tokens of `rows`, on the device.
        """
        begun: dict[DraftSession, EarlyFeatures] = {}
        sessions = [one for one in self._sessions.values() if not one.is_draining and one.is_counted_on]
        if not sessions:
            return begun
        verified = {one.request: (place, one) for place, one in enumerate(rows) if one.is_decoding}
        try:
            for session in sessions:
                early = begin_early(session, stores[session.stream.head.kind], verified, drawn)
                if early is not None:
                    begun[session] = early
        except BaseException:
            self.commit(begun)
            raise
        return begun

    def commit(self, begun: dict[DraftSession, EarlyFeatures]) -> None:
        """Keep the early features of a committed step, which `announce` returned, for the next `flush`.

        `begun` is cleared, because a step outlives its features and must not keep memory that is shared with a
        disconnected drafter.
        """
        while begun:
            session, early = begun.popitem()
            session.give_up_early()
            session.early = early
            if session.stream not in self._sessions:
                session.give_up_early()

    def count_step(
        self,
        *,
        has_prompts: bool,
        step_s: float,
        host_s: float,
        verified: Mapping[DraftsOf, int],
        num_rows: int,
        num_prompt_rows: int,
        num_waiting: int,
        landed: float,
        is_beside: bool | None,
    ) -> None:
        """Update the measured cost of drafts from a step.

        Args:
            has_prompts: Whether the step had rows of prompts, or the host launched a step with such rows before it read
                this step's tokens.
            step_s: Seconds of the step itself, excluding waits, as in `StepTimes`.
            host_s: Seconds of the host before the step, excluding waits, as in `StepTimes`.
            verified: Number of decoding requests in the step, by drafter and received drafts.
            num_rows: Rows of the step.
            num_prompt_rows: Rows of prompts among them.
            num_waiting: Number of waiting requests that can be admitted.
            landed: Monotonic time at which the host had the step's tokens.
            is_beside: Whether the step was launched while another step ran. None if steps never overlap; then the
                host's time counts.
        """
        self.budget.learn()
        seconds, self._landed = landed - self._landed, landed
        is_slowed, self._had_prompts = has_prompts or self._had_prompts, has_prompts
        pass_s = step_s + host_s if is_beside is None else step_s
        budget, num_decoding = self.budget.budget, sum(verified.values())
        if not is_slowed:
            self.wait_policy.count_step(pass_s)
            has_drafts = any(count > 0 for _, count in verified)
            budget.count_step(num_decoding, num_rows, pass_s, seconds, has_drafts=has_drafts)
        elif not budget.costs.is_known:
            return  # the time of the prompts' rows is unknown
        elif num_prompt_rows > 0:
            decoding_s = budget.costs.seconds(num_decoding, num_rows - num_prompt_rows) if num_decoding > 0 else 0.0
            prompts_s = max(0.0, pass_s - decoding_s)
            seconds, pass_s = seconds - prompts_s, pass_s - prompts_s
        if not self._wants_drafts:
            return
        for session in self._sessions.values():
            step = self._step_count(session, seconds, pass_s, verified, num_waiting, has_prompts=is_slowed)
            session.pace.policy.count(step)

    def _step_count(
        self,
        session: DraftSession,
        seconds: float,
        pass_s: float,
        verified: Mapping[DraftsOf, int],
        num_waiting: int,
        *,
        has_prompts: bool,
    ) -> StepCount:
        """Return the step as the policy of one session's drafter counts it."""
        own = session.pace.calibration
        drafts = max((drafts for calibration, drafts in verified if calibration is own), default=0)
        drafted, other_tokens = 0, 0.0
        for (calibration, count), sequences in verified.items():
            if calibration is own and count == drafts > 0:
                drafted += sequences
            else:
                expected = 1.0 if calibration is None or count == 0 else calibration.expected_tokens()[count]
                other_tokens += sequences * expected
        return StepCount(
            now=self._landed,
            seconds=seconds,
            pass_s=pass_s,
            requests=max(self._num_running, sum(verified.values())) + num_waiting,
            drafts=drafts,
            drafted=drafted,
            other_tokens=other_tokens,
            others_draft=any(
                one is not session and one.is_counted_on and bool(one.bindings) for one in self._sessions.values()
            ),
            catches_up=session.catches_up,
            has_prompts=has_prompts,
        )

    def count_by_drafter(self, rows: Sequence[ScheduledRows]) -> Counter[DraftsOf]:
        """Return the number of decoding requests of a step, by drafter and received drafts."""
        bindings = self._bindings
        return Counter(
            (
                bindings[one.request].session.pace.calibration if one.request in bindings else None,
                0 if one.offered is None else len(one.offered.tokens),
            )
            for one in rows
            if one.is_decoding
        )

    def _hold(self, session: DraftSession, now: float) -> None:
        """Let the requests of a drafter with too many unanswered steps wait, within the deadline, for their message."""
        until = now + session.pace.patience_s(session.pace.num_drafts, self.wait_policy.step_s)
        for binding in session.bindings:
            request = binding.request
            wants_drafts = request.is_decoding and request.num_drafts_wanted > 0
            if wants_drafts and binding.asked_length != len(request.tokens) and binding.wait_until is None:
                binding.wait_until = until
