"""The table of limits in docs/contract.md matches the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafter_service.limits import EngineLimits
from drafter_service.options import MAX_SPECULATIVE_TOKENS
from drafter_service.server import service as drafter
from drafter_service.server import stream
from draftwire.contract import addresses as wire
from draftwire.server import message_reading, metrics
from draftwire.server.bootstrap import CONNECTION_LIMITS, limits_of_others
from draftwire.transport import segment
from draftwire.v1 import config_pb2, generate_pb2
from verifier_service.api import response_stream as unread
from verifier_service.api.statuses import MAX_TEXT_BYTES
from verifier_service.drafters import connection as drafter_link
from verifier_service.drafters import handshake
from verifier_service.engine.engine import EngineLimits as VerifierLimits
from verifier_service.main import reading_limits
from verifier_service.options import VerifierOptions

PAGE = (Path(__file__).parents[2] / "docs" / "contract.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip(): cells[1].strip()
    for line in PAGE.partition("## Limits")[2].partition("## ")[0].splitlines()
    if line.startswith("| ") and (cells := line.strip("|").split("|"))
}


def field(message: type, name: str) -> config_pb2.Limits:
    return message.DESCRIPTOR.fields_by_name[name].GetOptions().Extensions[config_pb2.limits]


def mib(size: int) -> str:
    return f"{size >> 20} MiB"


SAMPLING, OPTIONS, ENGINE = config_pb2.SamplingParams, VerifierOptions(target=""), EngineLimits()
VERIFIER = VerifierLimits(OPTIONS.max_num_seqs, OPTIONS.max_queue, 1, 1, None)
VERIFIER_READING = reading_limits(VERIFIER.max_open)
OTHERS = limits_of_others(VERIFIER_READING)
READINGS = (VERIFIER_READING, drafter.READING)


def both(name: str) -> str:
    """Return a limit of the verifier and of the drafter, each in total and per connection, as the table words it."""
    return "; ".join(
        f"{getattr(limits, name)}, and {getattr(limits, f'{name}_of_peer')} per connection" for limits in READINGS
    )


def options(name: str) -> str:
    """Return the value of a gRPC server option at the verifier and at the drafter."""
    return "; ".join(str(dict(limits.options())[name]) for limits in READINGS)


WORDS = {
    "the text of an error to a client": [f"{MAX_TEXT_BYTES} bytes"],
    "a message to a verifier": [mib(wire.MAX_REQUEST_BYTES)],
    "a message to a drafter": [mib(wire.MAX_MESSAGE_BYTES)],
    "a message from a drafter": [mib(drafter_link.LEAST_ANSWER_BYTES)],
    "a connection before HTTP/2": [f"{dict(CONNECTION_LIMITS)['grpc.server_handshake_timeout_ms'] // 1000} s"],
    "time until a message has arrived completely": [
        f"{message_reading.MESSAGE_S:g} s from", f"{message_reading.CONTENDED_S:g} s of reading"
    ],
    "messages read at once by a verifier; by a drafter, including hellos": [both("max_readers")],
    "calls whose message has not arrived, at a verifier; at a drafter; at health and reflection of either": [
        both("max_unread"), f"{OTHERS.max_unread}, and {OTHERS.max_unread_of_peer} per host"
    ],
    "messages to health and reflection read at once by a verifier; by a drafter": [
        f"{OTHERS.max_readers}, and {OTHERS.max_readers_of_peer} per host; ",
        f"; {limits_of_others(drafter.READING).max_readers}",
    ],
    "bytes that a call may send before its message is read, to a verifier; to a drafter": [
        f"{VERIFIER_READING.window_bytes >> 10} KiB; {mib(drafter.READING.window_bytes)}"
    ],
    "open calls of a connection to a verifier; to a drafter": [options("grpc.max_concurrent_streams")],
    "calls that have arrived and are not accepted yet, at a verifier; at a drafter": [
        options("grpc.server.max_pending_requests"), options("grpc.server.max_pending_requests_hard_limit")
    ],
    "messages of a chat; a role": [
        str(field(generate_pb2.Chat, "messages").max_items),
        f"{field(generate_pb2.ChatMessage, 'role').max_bytes} bytes",
    ],
    "tools of a chat, and calls of tools of a message; template arguments; a name or call id": [
        f"{field(generate_pb2.Chat, 'tools').max_items} of {field(generate_pb2.Chat, 'tools').max_bytes} bytes each",
        f"{field(generate_pb2.ChatMessage, 'tool_calls').max_items} of",
        f"; {field(generate_pb2.Chat, 'template_arguments').max_bytes} bytes",
        f"; {field(generate_pb2.ChatMessage, 'name').max_bytes} bytes",
    ],
    "`logit_bias`, `stop_token_ids`": [
        str(field(SAMPLING, "logit_bias").max_items), f"{field(SAMPLING, 'stop_token_ids').max_items} entries"
    ],
    "`allowed_token_ids`": [f"{field(SAMPLING, 'allowed_token_ids').max_items} entries"],
    "`bad_words`; `bad_word_ids`": [
        f"{field(SAMPLING, 'bad_words').max_items} texts of at most {field(SAMPLING, 'bad_words').max_bytes} bytes",
        f"{field(SAMPLING, 'bad_word_ids').max_items} sequences of at most "
        f"{field(config_pb2.TokenSequence, 'ids').max_items} tokens",
    ],
    "`stop`": [f"{field(SAMPLING, 'stop').max_items} texts", f"{field(SAMPLING, 'stop').max_bytes} bytes"],
    "`logprobs`, `prompt_logprobs`": [
        f"{field(SAMPLING, 'logprobs').max:g}", f"{field(SAMPLING, 'prompt_logprobs').max:g}"
    ],
    "`n`": [f"{field(generate_pb2.GenerateRequest, 'n').max:g}, and at most"],
    "`priority`; `cache_salt`": [
        f"{field(generate_pb2.GenerateRequest, 'priority').min:.0f} to "
        f"{field(generate_pb2.GenerateRequest, 'priority').max:.0f}; "
        f"{field(generate_pb2.GenerateRequest, 'cache_salt').max_bytes} bytes"
    ],
    "`request_id` or metadata `x-request-id`; name of a verifier": [
        f"{field(generate_pb2.GenerateRequest, 'request_id').max_bytes} bytes"
    ],
    "outputs computed at once; waiting": [f"{OPTIONS.max_num_seqs}; {OPTIONS.max_queue}"],
    "outputs that are not read to their end, including those": [
        f"{VERIFIER.max_open}: twice `--max-num-seqs`, plus `--max-queue`"
    ],
    "reading an output": [
        f"{unread.STALL_S:g} s for a message", f"{unread.READ_S / 60:g} minutes after the last token"
    ],
    "connections to the metrics": [f"{metrics.MAX_CONNECTIONS}, one more", f"{metrics.TIMEOUT_S:g} s each"],
    "sessions of a drafter": [f"{ENGINE.max_sessions};"],
    "sequences of a session, and of all sessions": [f"at most {ENGINE.max_num_seqs} in all"],
    "drafts of a sequence in a step": [f"at most {MAX_SPECULATIVE_TOKENS}"],
    "steps of a stream that are unanswered": [
        f"{stream.MAX_UNANSWERED_STEPS}, and {mib(stream.MAX_UNANSWERED_BYTES)}"
    ],
    "a stream without a hello": [
        f"{message_reading.MESSAGE_S:g} s from a verifier", f"{drafter_link.HELLO_TIMEOUT_S:g} s from a drafter"
    ],
    "a shared segment": [f"{segment.MAX_SEGMENT_BYTES >> 30} GiB", mib(segment.segment_bytes(1 << 40))],
    "layers whose states a head uses": [str(handshake.MAX_FEATURE_LAYERS)],
}


@pytest.mark.parametrize("row", WORDS)
def test_the_table_says_what_is_enforced(row):
    for words in WORDS[row]:
        assert words in ROWS[row]
