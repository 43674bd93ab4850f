"""Requests that wait for their grammars outside of the engine's queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from draftwire.contract.errors import DraftwireError, InvalidArgumentError
from draftwire.contract.structured_output import FIELD
from draftwire.contract.validation import NONE, SYNTHETIC
from draftwire.v1 import config_pb2
from verifier_service.core.request import Request
from verifier_service.grammar.compiler import CompiledGrammar, GrammarCompiler, Result
from verifier_service.grammar.matcher import Matcher
from verifier_service.grammar.translation import GrammarSource
from verifier_service.grammar.vocabulary import Vocabulary

OnPrepared = Callable[[Sequence[Request], DraftwireError | None], None]


class RequestGrammars:
    """Gives requests their matchers. Thread-safe.

    A request enters the queue after its grammar was compiled, so that no other request waits for the grammar.
    """

    def __init__(
        self, vocabulary: Vocabulary | str, eos_token_ids: frozenset[int], config: config_pb2.SpeculativeConfig
    ) -> None:
        """`vocabulary` as of `GrammarCompiler`."""
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids
        has_logits = config.draft_logits.form != NONE
        self._keeps_rejected = has_logits and config.rejection_sample_method != SYNTHETIC
        self._compiler = GrammarCompiler(vocabulary)
        self._waiting: dict[Request, OnPrepared] = {}
        self._stopped: DraftwireError | None = None
        self._lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that wait for their grammars."""
        return len(self._waiting)

    def prepare(self, requests: Sequence[Request], source: GrammarSource, on_prepared: OnPrepared) -> None:
        """Call `on_prepared`, in any thread, when the outputs of one request have their grammar, or with an error.

        Outputs that were dropped meanwhile are left out. `on_prepared` must not call this object.
        """
        params = requests[0].params
        error: DraftwireError | None = None
        if not self._eos_token_ids and not params.stop_token_ids:
            allowed = "needs an end token: this target has none, so stop_token_ids must have at least one"
            error = InvalidArgumentError(FIELD, source.given, allowed)
        with self._lock:
            error = error or self._stopped
            if error is None:
                self._waiting.update(dict.fromkeys(requests, on_prepared))
        if error is None:
            self._compiler.compile(source, partial(self._finish, requests))
        else:
            on_prepared(requests, error)

    def _finish(self, requests: Sequence[Request], result: Result) -> None:
        error = None if isinstance(result, CompiledGrammar) else result
        if isinstance(result, CompiledGrammar):
            for request in requests:
                request.grammar = self._matcher(request, result)
        with self._lock:  # so that the engine gets a request before its cancellation
            left = {request: self._waiting.pop(request) for request in requests if request in self._waiting}
            if left:  # else dropped, or ended with the engine
                next(iter(left.values()))(list(left), error)

    def _matcher(self, request: Request, compiled: CompiledGrammar) -> Matcher:
        assert isinstance(self._vocabulary, Vocabulary)
        return Matcher(
            compiled.source,
            self._vocabulary,
            compiled.matcher.deep_copy(),
            self._eos_token_ids | set(request.params.stop_token_ids),
            min_tokens=request.params.min_tokens,
            keeps_rejected=self._keeps_rejected,
        )

    def drop(self, request: Request) -> bool:
        """Forget a cancelled request; return whether it was waiting."""
        with self._lock:
            return self._waiting.pop(request, None) is not None

    def stop(self, error: DraftwireError) -> None:
        """Answer all waiting and future requests with an error, and stop compiling."""
        with self._lock:
            self._stopped = error
            waiting, self._waiting = self._waiting, {}
        self._compiler.close()
        for request, on_prepared in waiting.items():
            on_prepared([request], error)
