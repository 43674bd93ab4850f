"""The command `draftwire demo-gateway`: both services behind the gateway smg, called with OpenAI's client."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from draftwire.client import Client
from draftwire.contract.errors import ServerError
from draftwire_bench.gateway_process import GatewayProcess
from draftwire_bench.processes import start_drafter, start_verifier
from draftwire_bench.services import wait_for_drafters
from draftwire_cli.demo_run import CPU, MODELS

QUESTION = [{"role": "user", "content": "Write a function that sorts a list."}]
ASK_WEATHER = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look up the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["quicksort", "mergesort"]}, "is_stable": {"type": "boolean"}},
    "required": ["name", "is_stable"],
    "additionalProperties": False,
}


@click.command()
@click.option(
    "--head", type=click.Path(path_type=Path), default=MODELS / "demo" / "eagle3", help="Directory of the EAGLE head."
)
@click.option(
    "--target", type=click.Path(path_type=Path), default=MODELS / "demo" / "target", help="Directory of the target."
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens per answer.")
def demo_gateway(head: Path, target: Path, max_tokens: int) -> None:
    """Run the demo pair behind the gateway smg, and call it through OpenAI's HTTP API.

    Starts a drafter, a verifier and smg on free local ports, on the CPU, and stops them at the end. OpenAI's official
    client streams a chat, calls a tool and requests JSON with a schema; `usage` has the number of accepted drafts.
    """
    console = Console(highlight=False)
    if importlib.util.find_spec("openai") is None:
        raise ServerError("the package openai is not installed; pip install 'draftwire[gateway]'")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    with console.status("starting the drafter") as status, start_drafter(head, target, *CPU) as drafter:
        status.update("starting the verifier")
        with start_verifier(target, [drafter.address], *CPU, "--kv-events") as verifier:
            with Client(verifier.address) as client:
                wait_for_drafters(client)
            status.update("starting the gateway")
            with GatewayProcess([verifier.address]) as gateway:
                status.stop()
                console.print(f"OpenAI's API on {gateway.api_url}: {gateway.model()}")
                run(gateway, console, max_tokens)


def run(gateway: GatewayProcess, console: Console, max_tokens: int) -> None:
    """Send three requests to the gateway and print the answers."""
    from openai import OpenAI

    with OpenAI(base_url=gateway.api_url, api_key="none") as client:
        chat: Any = client.chat.completions
        shared = {"model": gateway.model(), "max_tokens": max_tokens, "temperature": 0}
        _heading(console, "a chat, streamed", QUESTION)
        usage = None
        for chunk in chat.create(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **shared):
            for choice in chunk.choices:
                console.print(choice.delta.content or "", end="", markup=False)
            usage = chunk.usage or usage
        _print_usage(console, usage)
        # Without a penalty, such a small model fills the JSON with white space.
        shared["frequency_penalty"] = 1
        _heading(console, "a tool", ASK_WEATHER)
        answer = chat.create(messages=ASK_WEATHER, tools=[WEATHER], tool_choice="required", **shared)
        for call in answer.choices[0].message.tool_calls or ():
            console.print(f"{call.function.name}({json.loads(call.function.arguments)})", markup=False)
        _print_usage(console, answer.usage)
        _heading(console, "JSON by a schema", QUESTION)
        form = {"type": "json_schema", "json_schema": {"name": "sort", "strict": True, "schema": SCHEMA}}
        answer = chat.create(messages=QUESTION, response_format=form, **shared)
        console.print(json.loads(answer.choices[0].message.content), markup=False)
        _print_usage(console, answer.usage)


def _heading(console: Console, what: str, messages: list[dict[str, str]]) -> None:
    console.rule(what, align="left")
    console.print(messages[-1]["content"], style="dim", markup=False)


def _print_usage(console: Console, usage: Any) -> None:
    details = usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens or 0, details.rejected_prediction_tokens or 0
    drafts = f"{accepted} drafts accepted, {rejected} rejected"
    console.print(f"\nusage: {usage.prompt_tokens} tokens in, {usage.completion_tokens} out, {drafts}\n", style="dim")
