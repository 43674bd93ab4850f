"""The requests of a measurement."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from draftwire.client.request import Prompt, build_request
from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.validation import build_sampling_params, parse_json_object
from draftwire_bench.serve.load import Planned

# Seconds for which requests arrive in a level with a request rate, unless their number is set.
RATE_SECONDS = 30.0
# Parameters that a measurement sets, that could end an output early, or that have no effect (min_tokens).
OWN_PARAMETERS = {"max_tokens", "min_tokens", "temperature", "ignore_eos", "seed", "stop", "stop_token_ids"}


@dataclass(frozen=True, slots=True)
class Level:
    """A number of concurrent requests, or a rate of random arrivals per second; exactly one is set."""

    concurrency: int | None = None
    request_rate: float | None = None

    @property
    def default_requests(self) -> int:
        """Return the number of requests if none is set."""
        if self.concurrency is not None:
            return 2 * self.concurrency
        assert self.request_rate is not None
        return max(1, round(RATE_SECONDS * self.request_rate))

    def __str__(self) -> str:
        return str(self.concurrency) if self.concurrency is not None else f"{self.request_rate:g}/s"


@dataclass(frozen=True, slots=True)
class Shape:
    """The options that all requests of a measurement share."""

    output_tokens: int
    temperature: float
    seed: int
    sampling: Mapping[str, Any] = field(default_factory=dict)  # further parameters, see `parse_sampling`
    num_speculative_tokens: Sequence[int | None] = (None,)  # alternating over requests; None for the server's

    def request(self, prompt: Prompt, number: int, *, drafting: bool, max_tokens: int) -> Planned:
        """Return request `number`, which ignores the end of sequence."""
        ks = self.num_speculative_tokens
        options: dict[str, Any] = {
            **self.sampling,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "seed": self.seed + number,
            "num_speculative_tokens": ks[number % len(ks)] if drafting else 0,
        }
        return Planned(build_request(prompt, options)[0].SerializeToString())


def parse_sampling(argument: str) -> dict[str, Any]:
    """Return the sampling parameters of all requests, from a JSON object or a file with one.

    Raises:
        InvalidArgumentError: If there is no such object, or if a parameter is invalid or one of OWN_PARAMETERS.
    """
    options = parse_json_object("sampling_params", argument)
    for name in sorted(OWN_PARAMETERS & options.keys()):
        raise InvalidArgumentError(f"sampling_params.{name}", options[name], "cannot be set in a measurement")
    build_sampling_params(**options)
    return options


def random_prompts(length: int, vocab_size: int, seed: int) -> Iterator[list[int]]:
    """Yield endless prompts of random tokens, which share no prefix."""
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(vocab_size) for _ in range(length)]


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file of JSON lines, each with `token_ids` or `text`.

    Raises:
        InvalidArgumentError: If the file cannot be read, or a line is not such an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError("prompts", str(path), f"must be a file of JSON lines ({error})") from error
    prompts = [_prompt(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise InvalidArgumentError("prompts", str(path), "must have at least one line")
    return prompts


def _prompt(line: str, number: int, path: Path) -> Prompt:
    allowed = 'must be a JSON object with "token_ids", a list of token ids, or "text"'
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidArgumentError(f"{path}:{number}", line, f"{allowed} ({error})") from error
    given = entry if isinstance(entry, dict) else {}
    ids, text = given.get("token_ids"), given.get("text")
    if isinstance(ids, list) and ids and all(isinstance(token, int) for token in ids):
        return ids
    if isinstance(text, str) and text:
        return text
    raise InvalidArgumentError(f"{path}:{number}", line, allowed)


def in_slots(requests: Sequence[Planned], level: Level, seed: int) -> list[list[Planned]]:
    """Return a level's requests: in `concurrency` slots, or one per slot at the times of a Poisson process."""
    if level.concurrency is not None:
        return [list(requests[slot :: level.concurrency]) for slot in range(level.concurrency)]
    assert level.request_rate is not None
    rng = random.Random(seed)
    gaps = (rng.expovariate(level.request_rate) for _ in requests)
    return [[Planned(planned.request, at)] for planned, at in zip(requests, accumulate(gaps), strict=True)]
