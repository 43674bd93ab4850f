"""The engine process: load the target, and run the engine by the messages of the client process."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence

from draftwire.contract.errors import DraftwireError, ServerError
from draftwire.server.bootstrap import SWITCH_INTERVAL_S
from verifier_service.host.access import Output
from verifier_service.host.channel import Outbox, receive
from verifier_service.host.host import EngineHost
from verifier_service.host.start import hosting_engine
from verifier_service.options import VerifierOptions
from verifier_service.settings import check_options

logger = logging.getLogger(__name__)


def serve_engine(options: VerifierOptions, connection: socket.socket) -> bool:
    """Load an engine and run it; send an error and return False if it cannot be loaded."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    outbox = Outbox(connection)
    try:
        with hosting_engine(options, check_options(options)) as host:
            run_engine(host, connection, outbox)
            return True
    except DraftwireError as error:
        outbox.send(("refused", error))
        return False
    finally:
        outbox.close()


def run_engine(host: EngineHost, connection: socket.socket, outbox: Outbox) -> None:
    """Start an engine, and handle the messages of the client process until ("stop",)."""

    def deliver(outputs: Sequence[tuple[int, Output]]) -> None:
        outbox.send(("deliver", [(number, _encode(output)) for number, output in outputs]))

    host.start(deliver, lambda: outbox.send(("failed",)))
    outbox.send(("ready", host.facts))
    while True:
        match receive(connection):
            case ("submit", submission):
                try:
                    host.submit(submission)
                except Exception as error:
                    logger.exception("a request cannot be submitted")
                    failure = ServerError(f"the request cannot be submitted: {error}")
                    deliver([(number, failure) for number in submission.numbers])
            case ("cancel", number, reason, output_tokens):
                host.cancel(number, reason, output_tokens)
            case ("count_refused",):
                host.count_refused()
            case ("flush_cache",):
                host.flush_cache(lambda left: outbox.send(("cache_flushed", left)))
            case ("watch_cache",):
                host.watch_cache(lambda events: outbox.send(("cache_events", events)))
            case ("info",):
                outbox.send(("info", _info(host)))
            case ("end_requests", reason):
                host.end_requests(reason)
                outbox.send(("requests_ended",))
            case ("stop",):
                host.stop()
                return


def _info(host: EngineHost) -> bytes | DraftwireError:
    try:
        return host.info().SerializeToString()
    except Exception as error:
        logger.exception("the engine's information cannot be read")
        return ServerError(f"the engine's information cannot be read: {error}")


def _encode(output: Output) -> bytes | DraftwireError:
    return output if isinstance(output, DraftwireError) else output.SerializeToString()
