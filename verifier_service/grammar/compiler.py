"""Compile grammars in threads, so that no grammar delays other requests."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import llguidance

from draftwire.contract.errors import DraftwireError, InvalidArgumentError, ServerError, UnavailableError
from verifier_service.grammar.translation import GrammarSource
from verifier_service.grammar.trial import Trial, grammar_error
from verifier_service.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

# A grammar that takes more CPU time than the first limit moves to the slow lane, and is refused after the second.
QUICK_LIMIT_S = 0.5
COMPILE_LIMIT_S = 10.0
QUICK_THREADS = 2
# Maximum number of cached grammars, each with at most the lexer states of `trial.limits`.
MOST_CACHED = 32


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled grammar, shared by requests."""

    source: GrammarSource
    matcher: llguidance.LLMatcher  # at the beginning; each request copies it


Result = CompiledGrammar | DraftwireError
CLOSED = UnavailableError("the server is shutting down")


class GrammarCompiler:
    """Compiles in two lanes of threads, each thread with a `Trial` process. Thread-safe.

    A grammar is compiled twice: by the trial, which can be killed, then against the target's vocabulary. Results and
    errors are cached. All requests that wait for the same grammar get its result together.
    """

    def __init__(
        self, vocabulary: Vocabulary | str, *, quick_s: float = QUICK_LIMIT_S, limit_s: float = COMPILE_LIMIT_S
    ) -> None:
        """`vocabulary` is the target's, or the reason why there is none."""
        self._vocabulary = vocabulary
        self._limits_s = quick_s, limit_s
        self._lock = threading.Lock()
        self._results: OrderedDict[bytes, Result] = OrderedDict()
        self._waiting: dict[bytes, list[Callable[[Result], None]]] = {}
        self._trials = threading.local()
        self._all_trials: list[Trial] = []
        self._quick = ThreadPoolExecutor(QUICK_THREADS, "grammar")
        self._slow = ThreadPoolExecutor(1, "slow-grammar")

    def compile(self, source: GrammarSource, on_done: Callable[[Result], None]) -> None:
        """Call `on_done` with the compiled grammar or an error: at once if the result is cached, else in a thread."""
        if isinstance(self._vocabulary, str):
            on_done(source.error(self._vocabulary))
            return
        key = hashlib.sha256(f"{source.field}\n{source.text}".encode()).digest()
        with self._lock:
            result = self._results.get(key)
            if result is not None:
                self._results.move_to_end(key)
            elif key in self._waiting:
                self._waiting[key].append(on_done)
            else:
                self._waiting[key] = [on_done]
                if not self._submit(self._quick, key, source, self._limits_s[0], self._vocabulary):
                    del self._waiting[key]
                    result = CLOSED
        if result is not None:
            on_done(result)

    def close(self) -> None:
        """End the processes and refuse further grammars."""
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            trials, self._all_trials = self._all_trials, []
        for trial in trials:
            trial.kill()

    def _submit(
        self, pool: ThreadPoolExecutor, key: bytes, source: GrammarSource, limit_s: float, vocabulary: Vocabulary
    ) -> bool:
        """Compile a grammar in a thread; return False if the compiler is closed."""
        try:
            pool.submit(self._run, key, source, limit_s, vocabulary)
        except RuntimeError:
            return False
        return True

    def _run(self, key: bytes, source: GrammarSource, limit_s: float, vocabulary: Vocabulary) -> None:
        """Compile a grammar within a limit, or leave it to the slow lane."""
        result: Result
        try:
            result = self._compile(source, limit_s, vocabulary)
        except TimeoutError:
            is_quick = limit_s < self._limits_s[1]
            if is_quick and self._submit(self._slow, key, source, self._limits_s[1], vocabulary):
                return
            result = CLOSED if is_quick else source.error(f"takes more than {limit_s:g} s to compile")
        except Exception as error:
            logger.exception("a grammar cannot be compiled")
            result = ServerError(f"the grammar cannot be compiled: {error}")
        with self._lock:
            if isinstance(result, CompiledGrammar | InvalidArgumentError):
                self._results[key] = result
                if len(self._results) > MOST_CACHED:
                    self._results.popitem(last=False)
            waiting = self._waiting.pop(key)
        for on_done in waiting:
            on_done(result)

    def _compile(self, source: GrammarSource, limit_s: float, vocabulary: Vocabulary) -> Result:
        error = self._trial().error_of(source.text, limit_s)
        if error:
            return _refusal(source, error)
        matcher, error = grammar_error(vocabulary.tokenizer, source.text)
        return _refusal(source, error) if error else CompiledGrammar(source, matcher)

    def _trial(self) -> Trial:
        """Return the trial of the calling thread."""
        trial: Trial | None = getattr(self._trials, "own", None)
        if trial is None:
            trial = self._trials.own = Trial()
            with self._lock:
                self._all_trials.append(trial)
        return trial


def _refusal(source: GrammarSource, error: str) -> InvalidArgumentError:
    return source.error(f"cannot be used: {error}")
