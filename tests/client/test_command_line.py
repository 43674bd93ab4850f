"""`draftwire generate` and the command group, against a scripted server."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import click
import grpc
import pytest
from click.testing import CliRunner, Result

import draftwire_cli as cli
from draftwire.client import Statistics
from draftwire.contract.errors import CheckpointError, InvalidArgumentError
from draftwire.contract.version import VERSION
from draftwire.server.lazy_commands import Source
from draftwire_cli import main as main_module
from draftwire_cli.main import COMMANDS, main
from draftwire_cli.output import statistics_text, visible

STATISTICS_LINE = "4 tokens, 8.0 tokens/s, first token 250 ms, acceptance length 2.00 (per position 1.00 0.00)"
GREEN, RESET = "\x1b[32m", "\x1b[0m"


def run(*arguments: str, **kwargs) -> Result:
    return CliRunner().invoke(main, arguments, **kwargs)


def generate(verifier, *arguments: str, **kwargs) -> Result:
    return run("generate", "--server", verifier.address, *arguments, **kwargs)


def in_terminal(*arguments: str, **environment: str) -> str:
    """Return the output of `draftwire ARGUMENTS` in a colour terminal."""
    parent, child = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "draftwire_cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=child,
        env={**variables, "TERM": "xterm-256color", **environment},
    )
    os.close(child)
    shown = b""
    try:
        while data := os.read(parent, 4096):
            shown += data
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(parent)
        assert process.wait(30) == 0
    return shown.decode().replace("\r\n", "\n")


def test_piped_output_is_the_text_alone(verifier):
    result = generate(verifier, "--prompt", "abc")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "é b end", STATISTICS_LINE + "\n")


def test_json_is_one_object_on_standard_output(verifier):
    result = generate(verifier, "--prompt", "abc", "--json")
    printed = json.loads(result.stdout)
    assert result.stderr == ""
    assert printed["text"] == "é b end"
    assert printed["token_ids"] == [5, 6, 7, 8]
    assert (printed["finish_reason"], printed["stop_token_id"], printed["stop_text"]) == ("stop", 8, None)
    assert printed["statistics"]["acceptance_length"] == 2.0
    assert printed["statistics"]["acceptance_rates"] == [1.0, 0.0]


def test_terminal_shows_text_and_statistics(verifier):
    shown = in_terminal("generate", "--server", verifier.address, "--prompt", "abc")
    assert shown == f"é b end\n{STATISTICS_LINE}\n"


def test_terminal_colours_accepted_drafts(verifier):
    shown = in_terminal("generate", "--server", verifier.address, "--prompt", "abc", "--show-drafts")
    assert shown == f"é{GREEN} b{RESET} {GREEN}end{RESET}\n{STATISTICS_LINE}\n"


def test_no_color_is_respected(verifier):
    shown = in_terminal("generate", "--server", verifier.address, "--prompt", "abc", "--show-drafts", NO_COLOR="1")
    assert shown == f"é b end\n{STATISTICS_LINE}\n"


def test_a_position_of_which_nothing_was_drafted_has_no_rate():
    one = Statistics(verify_steps=4, verify_tokens=6, drafted=(4, 2, 0), accepted=(2, 0, 0))
    assert "(per position 0.50 0.00 -)" in statistics_text(one)


def test_text_cannot_steer_the_terminal():
    assert visible("a\x1b[31mb\tc\nd\x9b\x07é") == "a�[31mb\tc\nd��é"


def test_every_option_reaches_the_server(verifier):
    arguments = (
        "--prompt x --max-tokens 9 --min-tokens 2 --temperature 0.5 --top-p 0.75 --top-k 3 --min-p 0.25 "
        "--repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty -0.5 --logit-bias 7=-1.5 --logit-bias 8=2 "
        "--seed -4 --stop END --stop STOP --stop-token-id 3 --ignore-eos --logprobs 2 --num-speculative-tokens 1 "
        "--allowed-token-id 5 --allowed-token-id 6 --bad-word darn --keep-special-tokens --include-stop-text "
        "--prompt-logprobs 3 --truncate-prompt-tokens 7 --priority -2 --cache-salt pepper"
    )
    assert generate(verifier, *arguments.split()).exit_code == 0
    (request,) = verifier.requests
    params = request.sampling_params
    assert (params.max_tokens, params.min_tokens, params.temperature) == (9, 2, 0.5)
    assert (params.top_p, params.top_k, params.min_p) == (0.75, 3, 0.25)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.5, -0.5)
    assert dict(params.logit_bias) == {7: -1.5, 8: 2.0}
    assert (params.seed, list(params.stop), list(params.stop_token_ids)) == (-4, ["END", "STOP"], [3])
    assert (params.ignore_eos, params.logprobs, request.num_speculative_tokens) == (True, 2, 1)
    assert (list(params.allowed_token_ids), list(params.bad_words)) == ([5, 6], ["darn"])
    assert (params.HasField("skip_special_tokens"), params.skip_special_tokens) == (True, False)
    assert (params.include_stop_text, params.prompt_logprobs) == (True, 3)
    assert (request.truncate_prompt_tokens, request.priority, request.cache_salt) == (7, -2, "pepper")


def test_options_not_given_are_left_to_the_server(verifier):
    generate(verifier, "--prompt", "abc")
    (request,) = verifier.requests
    assert not request.sampling_params.ListFields()
    assert not request.HasField("num_speculative_tokens")


def test_prompt_from_a_file_and_from_standard_input(verifier, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("from ä file\n", encoding="utf-8")
    generate(verifier, "--prompt-file", str(file))
    generate(verifier, "--prompt-file", "-", input="from stdin")
    assert [request.text for request in verifier.requests] == ["from ä file\n", "from stdin"]


def test_chat_sends_a_user_message(verifier):
    generate(verifier, "--prompt", "hello", "--chat", "--template-arguments", '{"enable_thinking": false}')
    (message,) = verifier.requests[0].chat.messages
    assert (message.role, message.content) == ("user", "hello")
    assert verifier.requests[0].chat.template_arguments == '{"enable_thinking": false}'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs exactly one of --prompt and --prompt-file"),
        (["--prompt", "a", "--prompt-file", "-"], "needs exactly one of --prompt and --prompt-file"),
        (["--prompt", "a", "--logit-bias", "x=1"], "'x=1' is not ID=VALUE"),
        (["--prompt", "a", "--temperature", "-1"], "sampling_params.temperature = -1.0: allowed range [0, inf)"),
        (["--prompt", ""], "prompt = ''"),
        (["--prompt", "a", "--n", "2"], "--n needs --json"),
        (["--prompt", "a", "--timeout", "-1"], "timeout = -1.0"),
    ],
)
def test_wrong_commands_exit_with_2(verifier, arguments, message):
    result = generate(verifier, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert not verifier.requests


def test_file_that_is_not_text_is_refused(verifier, tmp_path):
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"\xff\xfe\x00")
    result = generate(verifier, "--prompt-file", str(file))
    assert result.exit_code == 2
    assert "not UTF-8 text" in result.stderr


def test_failure_is_one_line_and_exit_code_1(verifier):
    verifier.script, verifier.failure = [], (grpc.StatusCode.RESOURCE_EXHAUSTED, "256 requests\nwait")
    result = generate(verifier, "--prompt", "abc")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "Error: 256 requests wait\n")


def test_interrupt_prints_the_statistics_so_far(verifier):
    verifier.endless = True
    # In a shell's background job, the tests and their child processes ignore SIGINT. Popen's preexec_fn is unsuitable,
    # because it would fork this process with its gRPC threads, which write errors.
    code = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-m", "draftwire_cli", "generate", "--server", verifier.address, "--prompt", "abc"]
    process = subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not verifier.requests and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout.decode()) == (130, "é b ")
    assert re.fullmatch(
        r"interrupted after 3 tokens in \d+\.\d s, first token \d+ ms, 1 tokens were accepted drafts\n", stderr.decode()
    )
    assert verifier.left.wait(120)


def test_statistics_without_drafts_and_with_synthetic_acceptance():
    statistics = Statistics(output_tokens=2, total_time_s=1.0)
    assert statistics_text(statistics) == "2 tokens, 2.0 tokens/s, first token 0 ms, no drafts"
    assert "SYNTHETIC" in statistics_text(replace(statistics, synthetic_acceptance=True))


def test_version():
    assert run("--version").output == f"draftwire, version {VERSION}\n"


def test_help_lists_the_commands_without_importing_them():
    code = (
        "import sys; from draftwire_cli.main import main; main(['--help'], standalone_mode=False); "
        "assert not {'torch', 'drafter_service', 'verifier_service', 'draftwire_cli.demo_run'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in result.stdout for name in COMMANDS)


def test_unknown_command_exits_with_2():
    result = run("serve")
    assert result.exit_code == 2
    assert "No such command 'serve'" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"), [(InvalidArgumentError("k", 17, "at most 16"), 2), (CheckpointError("no such directory"), 1)]
)
def test_errors_of_any_command_take_one_line(monkeypatch, error, code):
    @click.command()
    def failing() -> None:
        raise error

    monkeypatch.setattr(cli, "failing", failing, raising=False)
    monkeypatch.setitem(main_module.COMMANDS, "failing", Source("draftwire_cli", "failing", ""))
    result = run("failing")
    assert (result.exit_code, result.stderr) == (code, f"Error: {error}\n")
