"""Grammars are compiled concurrently, within limits, and once each."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from typing import Any

import pytest
from drafting_scene import make_request
from grammar_scene import END, matcher_of, source_of, vocabulary

from draftwire.contract.errors import InvalidArgumentError, UnavailableError
from draftwire.contract.validation import speculative_config_from_mapping
from verifier_service.core.request import Request
from verifier_service.grammar import compiler
from verifier_service.grammar.compiler import CompiledGrammar, GrammarCompiler, Result
from verifier_service.grammar.matcher import Matcher
from verifier_service.grammar.translation import GrammarSource
from verifier_service.grammar.trial import Trial
from verifier_service.host import request_grammars
from verifier_service.host.request_grammars import RequestGrammars

WAIT_S = 120.0
SLOW = {"json_schema": {"type": "integer", "multipleOf": 9999991}}  # takes more than a minute to compile


@pytest.fixture
def made():
    own = GrammarCompiler(vocabulary(), quick_s=1.5, limit_s=4.0)
    yield own
    own.close()


class Results(queue.SimpleQueue):
    def of(self, name: str | int):
        return lambda result: self.put((name, result))

    def next(self) -> tuple[str | int, Result]:
        return self.get(timeout=WAIT_S)


def slow_source(number: int) -> GrammarSource:
    return source_of({"json_schema": {**SLOW["json_schema"], "title": str(number)}})


def test_a_slow_grammar_is_refused_and_delays_no_other(request):
    # On a busy machine the process for the quick grammar starts in seconds, so the slow ones have more.
    made = GrammarCompiler(vocabulary(), quick_s=0.5, limit_s=15.0)
    request.addfinalizer(made.close)
    results = Results()
    made.compile(source_of({"choice": ["warm"]}), results.of("warm"))
    results.next()
    for number in range(3):  # one more than there are threads
        made.compile(slow_source(number), results.of(number))
    made.compile(source_of({"choice": ["a"]}), results.of("quick"))
    name, result = results.next()
    assert (name, type(result)) == ("quick", CompiledGrammar)
    number, result = results.next()
    assert isinstance(result, InvalidArgumentError)
    assert "takes more than 15 s to compile" in str(result)
    began = time.monotonic()
    made.compile(slow_source(number), results.of("again"))
    assert results.next()[0] == "again"
    assert time.monotonic() - began < 1.0, "what takes too long is tried once"


def test_a_grammar_is_compiled_once_for_all_that_wait(made):
    results, source = Results(), source_of({"regex": "a+"})
    for _ in range(5):
        made.compile(source, results.of("one"))
    found = {id(results.next()[1]) for _ in range(5)}
    made.compile(source, results.of("later"))
    assert found == {id(results.next()[1])}


def test_the_oldest_of_too_many_grammars_is_forgotten(made, monkeypatch):
    monkeypatch.setattr(compiler, "MOST_CACHED", 2)
    results = Results()
    first = []
    for text in ("a", "b", "c", "a"):
        made.compile(source_of({"choice": [text]}), results.of(text))
        name, result = results.next()
        first += [result] if name == "a" else []
    assert first[0] is not first[1]


def test_what_is_wrong_with_a_grammar_names_its_field(made):
    results = Results()
    made.compile(source_of({"json_schema": {"type": "poem"}}), results.of("wrong"))
    error = results.next()[1]
    assert isinstance(error, InvalidArgumentError)
    assert str(error).startswith("sampling_params.structured_output.json_schema = ")
    assert "Invalid type: poem" in str(error)


def test_without_a_vocabulary_every_grammar_is_refused():
    own, results = GrammarCompiler("this server has no tokenizer"), Results()
    own.compile(source_of({"choice": ["a"]}), results.of("any"))
    assert "this server has no tokenizer" in str(results.next()[1])
    own.close()


def test_a_closed_compiler_answers_that_the_server_ends(made):
    made.close()
    results = Results()
    made.compile(source_of({"choice": ["a"]}), results.of("late"))
    assert isinstance(results.next()[1], UnavailableError)


def test_copies_of_a_compiled_grammar_are_independent():
    one, other = matcher_of({"choice": ["ab", "ba"]}), matcher_of({"choice": ["ab", "ba"]})
    one.follow([0])
    assert other.num_tokens == 0


def test_a_trial_that_was_killed_leaves_no_process() -> None:
    """A trial may be killed at any time, also before its process has started."""
    others = multiprocessing.active_children()
    trial = Trial()
    trial.kill()
    assert "to compile" in trial.error_of(source_of({"regex": "a"}).text, 30.0)
    assert set(multiprocessing.active_children()) <= set(others)


def test_a_trial_that_ended_between_two_grammars_is_started_anew() -> None:
    others = multiprocessing.active_children()
    trial, grammar = Trial(), source_of({"regex": "a"}).text
    assert trial.error_of(grammar, 30.0) == ""
    (process,) = set(multiprocessing.active_children()) - set(others)
    process.kill()
    process.join()
    assert trial.error_of(grammar, 30.0) == ""
    trial.close()


def test_the_limit_of_a_trial_is_cpu_time() -> None:
    others = multiprocessing.active_children()
    trial, grammar = Trial(), source_of({"regex": "a"}).text
    assert trial.error_of(grammar, 1.0) == ""
    (process,) = set(multiprocessing.active_children()) - set(others)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    resumed = threading.Timer(2.0, os.kill, (process.pid, signal.SIGCONT))
    resumed.start()
    assert trial.error_of(grammar, 1.0) == ""
    resumed.join()
    with pytest.raises(TimeoutError):
        trial.error_of(source_of(SLOW).text, 1.0)
    assert trial.error_of(grammar, 1.0) == ""
    trial.close()


def test_a_request_cancelled_as_it_gets_its_matcher_is_dropped(monkeypatch):
    """Otherwise the engine would get the cancellation before the request, and compute output without a client."""
    config = speculative_config_from_mapping({"num_speculative_tokens": 4})
    grammars = RequestGrammars(vocabulary(), frozenset([END]), config)
    gone, kept = make_request([1]), make_request([1])
    was_waiting = []

    def cancelling(*arguments: Any, **options: Any) -> Matcher:
        if not was_waiting:
            was_waiting.append(grammars.drop(gone))
        return Matcher(*arguments, **options)

    monkeypatch.setattr(request_grammars, "Matcher", cancelling)
    prepared: queue.SimpleQueue[list[Request]] = queue.SimpleQueue()
    try:
        grammars.prepare([gone, kept], source_of({"choice": ["a"]}), lambda requests, _: prepared.put(list(requests)))
        assert (prepared.get(timeout=WAIT_S), was_waiting) == ([kept], [True])
    finally:
        grammars.stop(UnavailableError("the test is over"))
