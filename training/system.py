"""Counting of acceptance in the real system: a verifier answers the prompts and reports what it verified.

The counts are the sums of RequestStatistics over all requests. They differ from those of one process
(`training/acceptance.py`) at the end of a request: the verifier asks for no more drafts than max_tokens leaves room
for, so that the last steps draft fewer than k tokens and emit at most one token more than they draft. Such steps are
counted like any other, which lowers the acceptance length a little, and more so for short outputs. Rates per position
are over the drafts made there, so these steps do not lower them.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rich.progress import track

from draftwire import Client
from draftwire.client import Completion, Options
from draftwire.contract.errors import ServerError
from draftwire.v1 import generate_pb2 as pb
from draftwire_bench.processes import start_drafter, start_verifier
from training.acceptance import Acceptance, repeats_little
from training.paths import HEAD, TARGET

DRAFTER_TIMEOUT_S = 30.0


@contextmanager
def services(device: str, dtype: str, k: int) -> Iterator[str]:
    """The address of a verifier of the demo pair with one drafter; both run while the context lasts.

    A step waits for its drafts however long they take, so that a slow machine counts the same as a fast one.
    """
    place = ("--device", device, "--dtype", dtype)
    speculation = ("--speculative-config", f'{{"num_speculative_tokens": {k}}}', "--draft-deadline-ms", "off")
    with (
        start_drafter(HEAD, TARGET, *place) as drafter,
        start_verifier(TARGET, [drafter.address], *place, *speculation) as verifier,
    ):
        yield verifier.address


def wait_for_drafter(client: Client) -> pb.GetVerifierInfoResponse:
    """What the verifier serves, once it has a drafter that is ready.

    Raises
    ------
    ServerError
        When it has none within DRAFTER_TIMEOUT_S.
    """
    deadline = time.monotonic() + DRAFTER_TIMEOUT_S
    while True:
        info = client.info()
        if any(drafter.state == pb.DRAFTER_STATE_READY for drafter in info.drafters):
            return info
        if time.monotonic() > deadline:
            reasons = "; ".join(f"{drafter.address}: {drafter.detail}" for drafter in info.drafters) or "it knows none"
            raise ServerError(f"{client.address} has no drafter that is ready, so there is nothing to count: {reasons}")
        time.sleep(0.05)


def complete_all(
    client: Client, prompts: Sequence[list[int]], concurrency: int, temperature: float, new_tokens: int, k: int
) -> list[Completion]:
    """The continuations of all prompts, `concurrency` at a time; the seed of each is its index.

    A continuation ends with its first <|endoftext|>, as it does where acceptance is counted in one process.
    """

    def complete(index: int) -> Completion:
        options: Options = {
            "temperature": temperature,
            "seed": index,
            "max_tokens": new_tokens,
            "ignore_eos": False,
            "num_speculative_tokens": k,
        }
        return client.complete(prompts[index], **options)

    with ThreadPoolExecutor(concurrency) as pool:
        answers = pool.map(complete, range(len(prompts)))
        return list(track(answers, f"temperature {temperature:g}", total=len(prompts), transient=True))


def count_completions(completions: Sequence[Completion], k: int) -> tuple[Acceptance, Acceptance]:
    """Sums of the statistics of all continuations, and of those that repeat little.

    Raises
    ------
    ServerError
        When the server accepts drafts synthetically.
    """
    everything, varied = Acceptance(k), Acceptance(k)
    for completion in completions:
        if completion.statistics.synthetic_acceptance:
            raise ServerError("the server accepts drafts synthetically, so its acceptance tells nothing about the head")
        everything.add(completion.statistics)
        if repeats_little(completion.token_ids):
            varied.add(completion.statistics)
    return everything, varied
