"""The command `draftwire generate`."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TextIO

import click

from draftwire.client import ChatMessage, Chunk, Client, Completion, Options, Stream
from draftwire.client.missing_drafts import explain_missing_drafts
from draftwire.contract.addresses import parse_address, split_addresses
from draftwire.contract.errors import DraftwireError
from draftwire.contract.validation import parse_json_object
from draftwire.server.cli_options import OTLP_ENDPOINT, client_security, client_security_options
from draftwire.server.tracing import exporting_traces
from draftwire.v1 import generate_pb2 as pb
from draftwire_cli.output import completion_mapping, has_colour, interrupted_text, statistics_text, write_chunk
from draftwire_cli.structured_output import structured_output_options, take_structured_output


class LogitBias(click.ParamType):
    """ID=VALUE, a token id and the value to add to its logit."""

    name = "id=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """Return (token id, bias)."""
        if isinstance(value, tuple):
            return value
        token_id, _, bias = str(value).partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not ID=VALUE, as in 42=-1.5", param, ctx)


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of SamplingParams; ranges are checked by the client."""
    options = [
        click.option("--temperature", type=float, help="0 is greedy decoding.  [default: 1]"),
        click.option("--top-k", type=int, help="Keep the K most likely tokens; 0 keeps all.  [default: 0]"),
        click.option("--top-p", type=float, help="Keep the most likely tokens up to this sum.  [default: 1]"),
        click.option("--min-p", type=float, help="Least probability, relative to the highest.  [default: 0]"),
        click.option("--repetition-penalty", type=float, help="Penalty of tokens in prompt or output.  [default: 1]"),
        click.option("--presence-penalty", type=float, help="Penalty of tokens in the output.  [default: 0]"),
        click.option("--frequency-penalty", type=float, help="Penalty per occurrence in the output.  [default: 0]"),
        click.option("--logit-bias", type=LogitBias(), multiple=True, help="Add to a token's logit; repeatable."),
        click.option("--seed", type=int, help="Seed of the sampling noise.  [default: random]"),
        click.option("--max-tokens", type=int, help="Maximum number of tokens to generate.  [default: 16]"),
        click.option("--min-tokens", type=int, help="Least tokens to generate.  [default: 0]"),
        click.option("--stop", metavar="TEXT", multiple=True, help="Text that ends the output; repeatable."),
        click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="The same for a token."),
        click.option("--ignore-eos", is_flag=True, default=None, help="Continue after the end-of-sequence token."),
        click.option("--logprobs", type=int, metavar="N", help="Report the N most likely tokens, with --json."),
        click.option("--prompt-logprobs", type=int, metavar="N", help="The same for the prompt's tokens, with --json."),
        click.option("--allowed-token-id", "allowed_token_ids", type=int, multiple=True, help="Only these tokens."),
        click.option("--bad-word", "bad_words", metavar="TEXT", multiple=True, help="Text to avoid; repeatable."),
        click.option("--skip-special-tokens/--keep-special-tokens", default=None, help="In the text.  [default: skip]"),
        click.option("--include-stop-text", is_flag=True, default=None, help="Include the stop text in the output."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.option("--server", required=True, metavar="HOST:PORT[,...]", help="Address of the verifier, or of several.")
@click.option("--prompt", metavar="TEXT", help="Text to continue.")
@click.option("--prompt-file", type=click.File(encoding="utf-8"), help="File with the text; - is standard input.")
@click.option("--chat", is_flag=True, help="Send the prompt as a user message.")
@click.option("--template-arguments", metavar="JSON|FILE", help="Arguments of the chat template, with --chat.")
@sampling_options
@structured_output_options
@click.option("--num-speculative-tokens", type=int, help="Draft tokens per step; 0 for none.  [default: the server's]")
@click.option("--truncate-prompt-tokens", type=int, metavar="N", help="Keep the prompt's last N tokens.")
@click.option("--n", type=int, help="Number of outputs, with --json, one line each.  [default: 1]")
@click.option("--priority", type=int, help="Lower is served first, if the server uses priorities.  [default: 0]")
@click.option("--cache-salt", metavar="TEXT", help="Share cached blocks only with this salt.  [default: none]")
@click.option("--timeout", type=float, metavar="SECONDS", help="Give up after this time.  [default: never]")
@client_security_options
@OTLP_ENDPOINT
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object at the end instead of text.")
@click.option("--show-drafts/--no-show-drafts", help="Colour accepted drafts in a terminal.  [default: no]")
def generate(
    server: str,
    prompt: str | None,
    prompt_file: TextIO | None,
    chat: bool,
    template_arguments: str | None,
    as_json: bool,
    show_drafts: bool,
    otlp_endpoint: str | None,
    logit_bias: tuple[tuple[int, float], ...],
    **given: Any,
) -> None:
    """Generate text from a prompt.

    Text is streamed to standard output, and a line of statistics goes to standard error. With one server the line gives
    the reason for missing drafts. Ctrl-C aborts the request and prints the statistics so far. The exit code is 1 after
    a failure, 2 after a wrong command.
    """
    if given["n"] not in (None, 1) and not as_json:
        raise click.UsageError("--n needs --json")
    text = _prompt_text(prompt, prompt_file)
    messages: list[ChatMessage] = [{"role": "user", "content": text}]
    security = client_security(given)
    structured_output = take_structured_output(given)
    options: Options = {**given, "logit_bias": dict(logit_bias), "structured_output": structured_output}  # type: ignore
    if template_arguments is not None:
        options["template_arguments"] = parse_json_object("template_arguments", template_arguments)
    with (
        exporting_traces("draftwire-client", otlp_endpoint, insecure=security.insecure),
        Client(server, security) as client,
    ):
        before = None if as_json or not _is_one_host(server) else _info(client)
        with client.generate(messages if chat else text, **options) as stream:
            if as_json:
                for completion in Completion.all_from_chunks(list(stream), given["n"] or 1):
                    click.echo(json.dumps(completion_mapping(completion), ensure_ascii=False))
                return
            completion = _write_text(stream, show_drafts)
        parts = [statistics_text(completion.statistics)]
        after = None if before is None else _info(client)
        if before is not None and after is not None:
            parts += filter(None, [explain_missing_drafts(completion.statistics, before, after)])
        click.echo("; ".join(parts), err=True)


def _is_one_host(server: str) -> bool:
    """Return whether all requests to an address go to one server, whose counters then include this request."""
    addresses = split_addresses(server, "server")
    host, port = parse_address(addresses[0], "server")
    try:
        found = {entry[0::4] for entry in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    per_family = Counter(family for family, _ in found)
    return len(addresses) == 1 and max(per_family.values()) == 1


def _info(client: Client) -> pb.GetVerifierInfoResponse | None:
    """Return the verifier's description; None if the call fails, because the generation does not depend on it."""
    try:
        return client.info(timeout=2.0)
    except DraftwireError:
        return None


def _write_text(stream: Stream, show_drafts: bool) -> Completion:
    """Write each chunk as it arrives; on Ctrl-C end the line and write the statistics so far."""
    terminal = sys.stdout.isatty()
    coloured = show_drafts and has_colour()
    chunks: list[Chunk] = []
    arrivals: list[float] = []
    sent = time.monotonic()
    try:
        for chunk in stream:
            arrivals.append(time.monotonic() - sent)
            chunks.append(chunk)
            write_chunk(chunk, coloured, terminal)
        completion = Completion.from_chunks(chunks)
    except KeyboardInterrupt:
        stream.cancel()
        _end_line(chunks, terminal)
        click.echo(interrupted_text(chunks, arrivals, time.monotonic() - sent), err=True)
        raise
    _end_line(chunks, terminal)
    return completion


def _end_line(chunks: list[Chunk], terminal: bool) -> None:
    if not "".join(chunk.text for chunk in chunks).endswith("\n"):
        if terminal:
            click.echo()
        elif sys.stderr.isatty():
            click.echo(err=True)


def _prompt_text(prompt: str | None, prompt_file: TextIO | None) -> str:
    if prompt is not None and prompt_file is None:
        return prompt
    if prompt is None and prompt_file is not None:
        try:
            return prompt_file.read()
        except UnicodeDecodeError as error:
            raise click.UsageError(f"--prompt-file: not UTF-8 text ({error})") from error
    raise click.UsageError("needs exactly one of --prompt and --prompt-file")
