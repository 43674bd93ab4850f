"""Records a verifier's pacing decisions and their inputs, for `draftwire_bench.pacing_record`."""

from __future__ import annotations

import functools
import gzip
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from methods import wrapping  # type: ignore[import-not-found]  # in this directory, which is on the path

WRITE_EVERY_S = 0.5


class PacingRecord:
    """Collects records of the engine's thread; another thread appends them to a file, compressed if it ends in .gz.

    The `add` methods run after a recorded call, with the object, the call's result and its arguments.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events: deque[dict[str, Any]] = deque()
        self._writing = threading.Lock()
        self._drafters: dict[Any, str] = {}  # addresses by `Pace`

    def start(self, *_: Any) -> None:
        """Start writing periodically."""
        threading.Thread(target=self._write_periodically, name="pacing-record", daemon=True).start()

    def _write_periodically(self) -> None:
        while True:
            time.sleep(WRITE_EVERY_S)
            self.write()

    def write(self, *_: Any) -> None:
        """Append the records since the last call."""
        with self._writing:
            events = [self._events.popleft() for _ in range(len(self._events))]
            lines = "".join(json.dumps(event, default=float) + "\n" for event in events).encode()  # float: of NumPy
            if lines:
                with self._path.open("ab") as file:
                    file.write(gzip.compress(lines) if self._path.suffix == ".gz" else lines)

    def add_session(self, session: Any, *_args: Any, **_kwargs: Any) -> None:
        """Record the drafter of a session's pace."""
        for one in (session.pace, session.pace.policy):
            self._drafters[one] = session.stream.address

    def add_step(self, _drafting: Any, _: None, *, verified: Mapping[Any, int], **about: Any) -> None:
        """Add a counted step."""
        about |= {"verified": _as_list(verified)}
        self._events.append({"event": "step", "at": time.monotonic(), **about})

    def add_plan(self, policy: Any, _: None, step: Any) -> None:
        """Add a policy's choice after a step, with the step and the measured throughput."""
        about = {"num_drafts": policy.num_drafts, "is_off": policy.is_off, "speeds": policy.speeds()}
        self._add(policy, "plan", about | {"step": step._asdict()})

    def add_message(self, pace: Any, message: Any, *_args: Any, **_kwargs: Any) -> None:
        """Add a sent message."""
        self._add(pace, "message", vars(message))

    def add_answer(self, pace: Any, _: None, message: Any, received: float, _step_s: float) -> None:
        """Add a counted answer."""
        self._add(pace, "answer", vars(message) | {"received": received})

    def _add(self, of: Any, event: str, about: dict[str, Any]) -> None:
        if of in self._drafters:
            self._events.append({"event": event, "at": time.monotonic(), "drafter": self._drafters[of], **about})


def _as_list(verified: Mapping[Any, int]) -> list[tuple[str, int, int]]:
    """Return (drafter, drafts, requests) of each entry."""
    return [(drafter, drafts, count) for (drafter, drafts), count in verified.items()]


def wrappers(path: Path) -> dict[str, Callable[[ModuleType], None]]:
    """Return by module the wrappers that record pacing at `path`."""
    record = PacingRecord(path)
    followed: dict[str, dict[str, Callable[..., None]]] = {
        "verifier_service.engine.engine": {"Engine.start": record.start, "Engine.stop": record.write},
        "verifier_service.drafters.session": {"DraftSession.__init__": record.add_session},
        "verifier_service.drafters.drafting": {"Drafting.count_step": record.add_step},
        "verifier_service.pacing.policy": {"DraftingPolicy.count": record.add_plan},
        "verifier_service.pacing.pace": {"Pace.send": record.add_message, "Pace.take_answer": record.add_answer},
    }
    return {
        module: wrapping({name: functools.partial(_followed, then) for name, then in calls.items()})
        for module, calls in followed.items()
    }


def _followed(then: Callable[..., None], call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def followed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(self, *args, **kwargs)
        then(self, result, *args, **kwargs)
        return result

    return followed
