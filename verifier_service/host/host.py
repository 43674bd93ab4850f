"""An engine with the connections to its drafters, in the process of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from draftwire.contract.client_security import ClientSecurity
from draftwire.contract.errors import DraftwireError, UnavailableError
from draftwire.contract.fields import with_defaults
from draftwire.contract.version import VERSION
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.transport import ALL_CARRIERS
from draftwire.v1 import config_pb2, draft_pb2, generate_pb2
from verifier_service.core.cache_events import DeliverCacheEvents
from verifier_service.core.request import Request
from verifier_service.core.stop_conditions import StopConditions
from verifier_service.drafters.connection import DrafterLink
from verifier_service.drafters.pool import DrafterPool
from verifier_service.engine.engine import Engine, EngineLimits
from verifier_service.engine.outputs import Item
from verifier_service.grammar.vocabulary import Vocabulary
from verifier_service.host.access import Deliver, EngineFacts, Submission
from verifier_service.host.metrics import VerifierCollector
from verifier_service.host.ranks import Workers
from verifier_service.host.request_grammars import RequestGrammars
from verifier_service.target.target import Target


class EngineHost:
    """Takes requests from any thread and delivers their outputs by number."""

    def __init__(
        self,
        target: Target,
        config: config_pb2.SpeculativeConfig,
        limits: EngineLimits,
        drafters: Sequence[str],
        drafter_security: ClientSecurity,
        carriers: Sequence[draft_pb2.Carrier] = ALL_CARRIERS,
        rendezvous_dir: Path | None = None,
        *,
        fuses_features: bool = True,
        workers: Workers | None = None,
        vocabulary: Vocabulary | str = "this server has no tokenizer",
        served_model_name: str | None = None,
        vllm_metrics: bool = False,
    ) -> None:
        """`carriers`, `rendezvous_dir` and `fuses_features` as of `DrafterLink`, `workers` as of `Engine`, `vocabulary`
        as of `GrammarCompiler`.

        `served_model_name` is the target's name for clients and metrics; default: its own name. `vllm_metrics` adds
        metrics under vLLM's names.
        """
        self._model_name = served_model_name or target.name
        self._vllm_metrics = vllm_metrics
        self._target = target
        self._config = config
        self._limits = limits
        self._workers = workers
        self._requests: WeakValueDictionary[int, Request] = WeakValueDictionary()  # the engine owns them
        self._grammars = RequestGrammars(vocabulary, target.eos_token_ids, config)
        self.facts = EngineFacts(
            target.vocab_size, target.max_model_len, limits.max_num_seqs, limits.max_queue, limits.max_open
        )
        self.engine = Engine(target, config, limits, self._deliver_items, lambda: self._on_failure(), workers)
        self._drafters = DrafterPool(
            drafters,
            lambda address, host: DrafterLink(
                address,
                target,
                config,
                limits.max_num_seqs,
                self.engine.post,
                self.engine.times.traffic,
                drafter_security,
                host,
                carriers,
                rendezvous_dir,
                fuses_features=fuses_features,
                confidences=self.engine.drafting.is_adaptive,
            ),
        )

    def start(self, deliver: Deliver, on_failure: Callable[[], None]) -> None:
        """Start the engine and the connections to the drafters.

        `deliver` is called with a step's output. `on_failure` is called after a fatal failure of the engine and the
        requests' errors, or after the loss of a rank. Both are called in other threads and must not block.
        """
        self._deliver, self._on_failure = deliver, on_failure
        self.engine.start()
        self._drafters.start()
        if self._workers is not None:
            self._workers.on_loss = on_failure

    def submit(self, submission: Submission) -> None:
        """Submit a request; its outputs, or an error for each, are delivered."""
        requests: list[Request] = []
        for number, keys in zip(submission.numbers, submission.keys, strict=True):
            request = Request(
                request_id=submission.request_id,
                prompt=submission.prompt,
                params=submission.params,
                num_speculative_tokens=submission.num_speculative_tokens,
                keys=keys,
                stops=StopConditions(submission.params, self._target.eos_token_ids),
                max_length=submission.max_length,
                traceparent=submission.traceparent,
                number=number,
                priority=submission.priority,
                cache_salt=submission.cache_salt,
                leader=requests[0] if requests else None,
                arrived=submission.arrived,
            )
            requests.append(request)
            self._requests[number] = request
        if submission.grammar is None:
            self.engine.submit(*requests)
        else:
            self._grammars.prepare(requests, submission.grammar, self._submit_prepared)

    def _submit_prepared(self, requests: Sequence[Request], error: DraftwireError | None) -> None:
        """Submit requests with their grammar, or deliver the error of the grammar."""
        if error is None:
            self.engine.submit(*requests)
            return
        for request in requests:
            self.engine.count_refused()
            self._deliver([(request.number, error)])

    def cancel(self, number: int, reason: str = "abort", output_tokens: int = 0) -> None:
        request = self._requests.get(number)
        if request is not None and not self._grammars.drop(request):
            self.engine.cancel(request, reason, output_tokens)

    def count_refused(self) -> None:
        """Count a request that was not submitted."""
        self.engine.count_refused()

    def flush_cache(self, on_done: Callable[[int], object]) -> None:
        self.engine.flush_cache(on_done)

    def watch_cache(self, deliver: DeliverCacheEvents) -> None:
        self.engine.watch_cache(deliver)

    def end_requests(self, reason: str) -> None:
        """End all present and future requests with UnavailableError and this reason."""
        self._grammars.stop(UnavailableError(reason))
        self.engine.stop(reason)

    def stop(self) -> None:
        """Stop the engine and the connections to the drafters; requests that are left get an error."""
        self._grammars.stop(UnavailableError("the server is shutting down"))
        self.engine.stop()  # first: its thread uses the event loop of the connections
        self._drafters.stop()

    @property
    def collector(self) -> VerifierCollector:
        """Return the collector of the metrics."""
        return VerifierCollector(
            self.engine, self._model_name, lambda: self._drafters.statuses, vllm_names=self._vllm_metrics
        )

    def info(self) -> generate_pb2.GetVerifierInfoResponse:
        """Return the answer of `GetVerifierInfo`; thread-safe."""
        target, scheduler = self._target, self.engine.scheduler
        drafters = self._drafters.statuses
        for status in drafters:
            self.engine.drafting.describe(status)
        return generate_pb2.GetVerifierInfoResponse(
            version=VERSION,
            target=self._model_name,
            target_fingerprint=target.fingerprint,
            vocab_size=target.vocab_size,
            max_model_len=target.max_model_len,
            max_num_seqs=self._limits.max_num_seqs,
            max_queue=self._limits.max_queue,
            speculative_config=with_defaults(self._config),
            drafters=drafters,
            requests_running=len(scheduler.running),
            requests_waiting=len(scheduler.waiting) + self._grammars.num_waiting,
            waiting_tokens=sum(len(request.tokens) for request in list(scheduler.waiting)),
            kv_cache_tokens=(self._limits.num_blocks - 1) * BLOCK_SIZE,  # block 0 is padding
            kv_cache_usage=self.engine.kv_cache_usage,
            device=str(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
            counters=self.engine.counters(),
            memory=self.engine.memory,
        )

    def _deliver_items(self, items: Sequence[tuple[Request, Item]]) -> None:
        self._deliver([(request.number, item) for request, item in items])
