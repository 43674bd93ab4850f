"""`draftwire bench serve`, against a fake verifier and against the demo pair."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_verifier import ROW_BYTES, VOCAB_SIZE, FakeVerifier, served

from draftwire.contract.errors import InvalidArgumentError
from draftwire_bench import services
from draftwire_bench.processes import LOG_CHARS, both_ends
from draftwire_bench.serve.load import Planned
from draftwire_bench.serve.workload import Level, in_slots, random_prompts, read_prompts
from draftwire_cli.main import main

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
SHORT = ("--prompt-tokens", "5", "--output-tokens", "9", "--client-processes", "1")
SMALL = ("--concurrency", "2", *SHORT)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "serve", *arguments])


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory):
    """(verifier, console output, JSON) of a run against a fake verifier with correct counters."""
    verifier = FakeVerifier()
    path = tmp_path_factory.mktemp("serve") / "out.json"
    with served(verifier) as address:
        result = bench("--server", address, *SMALL, "--num-requests", "3", "--json", str(path))
    assert result.exit_code == 0, result.output
    return verifier, result.output, json.loads(path.read_text())


def test_requests_are_random_prompts_of_which_none_repeats(fake_run):
    verifier, _, _ = fake_run
    prompts = [tuple(request.token_ids.ids) for request in verifier.requests]
    assert len(prompts) == 2 * (2 + 3)  # warm-up and measurement, drafting off and on
    assert len(set(prompts)) == len(prompts)
    assert all(len(prompt) == 5 and max(prompt) < VOCAB_SIZE for prompt in prompts)


def test_requests_continue_past_the_end_of_sequence(fake_run):
    verifier, _, _ = fake_run
    assert all(request.sampling_params.ignore_eos for request in verifier.requests)
    assert {request.sampling_params.temperature for request in verifier.requests} == {1.0}
    seeds = [request.sampling_params.seed for request in verifier.requests]
    assert len(set(seeds)) == len(seeds)


def test_requests_have_the_further_parameters_given(tmp_path):
    verifier, path = FakeVerifier(), tmp_path / "out.json"
    with served(verifier) as address:
        result = bench("--server", address, *SMALL, "--sampling-params", '{"top_k": 7}', "--json", str(path))
    assert result.exit_code == 0, result.output
    assert {request.sampling_params.top_k for request in verifier.requests} == {7}
    assert {request.sampling_params.temperature for request in verifier.requests} == {1.0}
    assert json.loads(path.read_text())["workload"]["sampling_params"] == {"top_k": 7}


def test_requests_have_the_numbers_of_drafts_given_in_turn(tmp_path):
    verifier, path = FakeVerifier(), tmp_path / "out.json"
    with served(verifier) as address:
        asked = ("--num-speculative-tokens", "0,2,1", "--warmup-tokens", "0", "--num-requests", "6")
        result = bench("--server", address, *SMALL, *asked, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert sorted(request.num_speculative_tokens for request in verifier.requests) == [*[0] * 6, 0, 0, 1, 1, 2, 2]
    assert json.loads(path.read_text())["workload"]["num_speculative_tokens"] == [0, 2, 1]


def test_requests_have_the_prompts_of_a_file_over_and_over(tmp_path):
    verifier, path = FakeVerifier(), tmp_path / "prompts.jsonl"
    path.write_text('{"text": "def f("}\n{"token_ids": [3, 1]}\n')
    with served(verifier) as address:
        asked = ("--prompts", str(path), "--warmup-tokens", "0", "--num-requests", "5")
        result = bench("--server", address, *SMALL, *asked)
    assert result.exit_code == 0, result.output
    prompts = Counter(request.text or tuple(request.token_ids.ids) for request in verifier.requests)
    assert prompts == {"def f(": 5, (3, 1): 5}  # drafting off uses the first prompt 3 times, drafting on the second


def test_requests_at_a_rate_are_served_without_a_steady_state(tmp_path):
    verifier, path = FakeVerifier(), tmp_path / "out.json"
    with served(verifier) as address:
        asked = ("--request-rate", "200", "--warmup-tokens", "0", "--num-requests", "12")
        result = bench("--server", address, *SHORT, *asked, "--json", str(path))
    assert result.exit_code == 0, result.output
    assert len(verifier.requests) == 2 * 12
    document = json.loads(path.read_text())
    assert [entry["level"] for entry in document["speed_up"]] == ["200/s"]
    assert [level["drafting"] for level in document["levels"]] == [False, True]
    for level in document["levels"]:
        assert (level["concurrency"], level["request_rate"], level["requests"]) == (None, 200, 12)
        assert level["whole_run"]["prompt_rows"] == 12 * 5
        assert level["steady"] is None
        assert level["tokens_per_s"]["steady"] is None
        assert level["tokens_per_s"]["whole_run"] == pytest.approx(9 * level["requests_per_s"])
        assert level["latency_s"].keys() == {"first_token", "inter_token", "per_output_token"}
        for seen in level["latency_s"].values():
            assert 0 <= seen["p50"] <= seen["p90"] <= seen["p99"]


def test_drafting_is_off_and_on_in_one_run(fake_run):
    verifier, _, document = fake_run
    off = [request for request in verifier.requests if request.HasField("num_speculative_tokens")]
    assert {request.num_speculative_tokens for request in off} == {0}
    assert len(off) == len(verifier.requests) / 2
    assert [level["drafting"] for level in document["levels"]] == [False, True]
    assert [entry["level"] for entry in document["speed_up"]] == ["2"]


def test_warm_up_is_not_counted(fake_run):
    _, _, document = fake_run
    for level in document["levels"]:
        assert (level["requests"], level["whole_run"]["prompt_rows"]) == (3, 15)


def test_counts_of_the_engine_are_those_of_the_level_alone(fake_run):
    off, on = fake_run[2]["levels"]
    assert off["whole_run"]["verify_rows"] == off["whole_run"]["verify_steps"] == 3 * 8
    # Each request: three steps of two drafts, of which one is accepted, then a step of one draft and one of none.
    assert (on["acceptance"]["verify_steps"], on["acceptance"]["drafted"]) == (3 * 5, [3 * 4, 3 * 3])
    assert on["whole_run"]["verify_rows"] == 3 * 12
    traffic = on["whole_run"]["traffic"]["bytes"]
    assert traffic["feature_bytes"] == ROW_BYTES * traffic["feature_rows"] == ROW_BYTES * 3 * (5 + 9 - 1)


def test_json_says_on_what_it_was_measured(fake_run):
    document = fake_run[2]
    assert document["command"].startswith("draftwire")
    assert {"cpu", "cores", "gpus", "system"} <= set(document["machine"])
    assert {"draftwire", "python", "torch", "grpcio"} <= set(document["versions"])
    assert document["server"]["speculative_config"]["rejection_sample_method"] == "synthetic"


def test_output_names_the_clients_load_and_synthetic_acceptance(fake_run):
    output = fake_run[1]
    assert "The client processes" in output
    assert "acceptance is synthetic" in output


def test_skipped_rows_fail_a_synthetic_run():
    with served(FakeVerifier(forgotten_rows=1)) as address:
        result = bench("--server", address, *SMALL, "--drafting", "on")
    assert result.exit_code == 1
    assert "work was skipped" in result.output
    assert "44 rows were verified instead of 48" in result.output


def test_skipped_rows_are_shown_where_acceptance_is_real():
    with served(FakeVerifier(forgotten_rows=1, synthetic=False)) as address:
        result = bench("--server", address, *SMALL, "--drafting", "on")
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "2 on: 44 rows were verified instead of 48" in text
    assert "So this is not the speed with a fixed number of drafts in every step" in text


def test_a_verifier_that_others_use_is_not_measured():
    with served(FakeVerifier(running=3)) as address:
        result = bench("--server", address, *SMALL, "--warmup-tokens", "0")
    assert result.exit_code == 1
    assert "3 requests of other clients" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--concurrency", "9"), "concurrency = 9: the verifier runs at most 8 requests concurrently"),
        (("--concurrency", "4", "--num-requests", "2"), "num_requests = 2: must be at least the concurrency, 4"),
        (("--concurrency", "0"), "'0' is not a list of numbers above 0"),
        (("--concurrency", "1", "--request-rate", "2"), "at most one of --concurrency and --request-rate"),
        (("--head", "x"), "either --server or --target and --head"),
        (("--sampling-params", '{"top_k": -1}'), "sampling_params.top_k = -1: allowed range"),
        (("--sampling-params", '{"top_j": 1}'), "sampling_params.top_j"),
        (("--sampling-params", '{"stop": ["x"]}'), "sampling_params.stop = ['x']: cannot be set in a measurement"),
        (("--sampling-params", '{"min_tokens": 5}'), "sampling_params.min_tokens = 5: cannot be set in a measurement"),
        (("--num-speculative-tokens", "4,-1"), "'4,-1' is not a list of numbers from 0 on"),
        (("--num-speculative-tokens", "0,3"), "num_speculative_tokens = 3: the verifier drafts at most 2"),
        (("--sampling-params", "[1"), "must be a JSON object or the path of a file with one"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    with served(FakeVerifier()) as address:
        result = bench("--server", address, *arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_drafting_without_drafters_is_refused():
    with served(FakeVerifier(drafters=0)) as address:
        assert "served without drafters" in bench("--server", address, *SMALL).output
        assert bench("--server", address, *SMALL, "--drafting", "off").exit_code == 0


def test_a_server_that_is_not_there_is_named():
    result = bench("--server", "127.0.0.1:1", *SMALL)
    assert result.exit_code == 1
    assert "127.0.0.1:1 cannot be reached" in result.output


def test_requests_at_a_rate_arrive_as_a_poisson_process():
    planned = [Planned(b"")] * 4000
    slots = in_slots(planned, Level(request_rate=20.0), seed=1)
    times = [slot[0].not_before_s for slot in slots]
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # The gaps of a Poisson process have a standard deviation equal to their mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert in_slots(planned, Level(request_rate=20.0), seed=1) == slots


def test_requests_at_a_concurrency_follow_each_other_in_slots():
    slots = in_slots([Planned(bytes([n])) for n in range(5)], Level(concurrency=2), seed=0)
    assert [[planned.request for planned in slot] for slot in slots] == [[b"\0", b"\2", b"\4"], [b"\1", b"\3"]]


def test_random_prompts_are_the_same_for_the_same_seed():
    first, second, other = random_prompts(4, 50, 1), random_prompts(4, 50, 1), random_prompts(4, 50, 2)
    assert [next(first) for _ in range(3)] == [next(second) for _ in range(3)]
    assert next(first) != next(other)


def test_a_prompt_file_has_text_or_token_ids(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "def f(", "path": "x.py"}\n\n{"token_ids": [3, 1]}\n')
    assert read_prompts(path) == ["def f(", [3, 1]]


@pytest.mark.parametrize(
    ("content", "text"),
    [("", "at least one line"), ("[1]\n", r":1 = '\[1\]'"), ('{"text": ""}\n', ":1 ="), ("{\n", ":1 =")],
)
def test_a_wrong_prompt_file_is_named_with_its_line(tmp_path, content, text):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError, match=text):
        read_prompts(path)


def test_the_demo_pair_from_start_to_report(tmp_path):
    path = tmp_path / "out.json"
    result = bench(
        *("--target", str(DEMO / "target"), "--head", str(DEMO / "eagle3")),
        *("--verifier-device", "cpu", "--drafter-device", "cpu"),
        *("--speculative-config", '{"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3}'),
        *("--concurrency", "3", "--prompt-tokens", "16", "--output-tokens", "21", "--warmup-tokens", "6"),
        *("--json", str(path)),
    )
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["shapes"]["target"]["num_hidden_layers"] == 4
    assert [(level["concurrency"], level["drafting"]) for level in document["levels"]] == [(3, False), (3, True)]
    for level in document["levels"]:
        assert level["work_skipped_or_repeated"] == []
        assert level["tokens_per_s"]["whole_run"] == pytest.approx(21 * level["requests_per_s"])
        times = level["whole_run"]["ms_per_step"]
        assert (times["draft"] > 0) == level["drafting"]
        assert min(times["verify"], times["sample"], times["host"]) > 0
    on = document["levels"][1]
    assert on["acceptance"]["rates"] == [1.0, 1.0, 0.0, 0.0]
    # Keys and values of 4 layers with 2 heads of 64, float32; the head has one such layer.
    (verifier, of_verifier), (drafter, of_drafter) = document["memory_bytes"].items()
    assert (verifier, drafter.partition(":")[0]) == ("verifier", "drafter 127.0.0.1")
    for use, layers in ((of_verifier, 4), (of_drafter, 1)):
        assert use["kv_cache_token_bytes"] == layers * 2 * (64 + 64) * 4
        assert use["kv_cache_tokens"] > 0
        assert use["draft_logits_bytes"] == use["peak_gpu_allocated_bytes"] == use["peak_gpu_reserved_bytes"] == 0
        assert use["peak_host_bytes"] > 100 << 20
    assert of_verifier["features_bytes"] > of_drafter["features_bytes"] == 0
    assert "memory, MiB" in result.output
    assert "no work was skipped" in result.output


def test_a_service_that_ends_meanwhile_is_named_with_its_log(monkeypatch):
    def killed_after_a_while(*arguments):
        verifier = services.start_verifier(str(DEMO / "target"), arguments[1], "--device", "cpu")
        threading.Timer(1.0, verifier.send_signal, [signal.SIGABRT]).start()
        return verifier

    monkeypatch.setattr(services, "verifier_process", killed_after_a_while)
    result = bench(
        *("--target", str(DEMO / "target"), "--head", str(DEMO / "eagle3")),
        *("--verifier-device", "cpu", "--drafter-device", "cpu", "--drafting", "off"),
        *("--concurrency", "2", "--prompt-tokens", "16", "--output-tokens", "900"),
    )
    assert result.exit_code == 1
    output = " ".join(result.output.split())
    # faulthandler reads the frames of threads that still run, which may fault while a frame changes.
    statuses = f"{signal.SIGABRT.value}|{signal.SIGSEGV.value}"
    assert re.search(f"the verifier ended with status -({statuses}); its log: ", output)
    assert "Fatal Python error: Aborted" in output


def test_a_long_log_keeps_what_came_first_and_last():
    log = "".join(f"line {i}\n" for i in range(2000))
    shown = both_ends(log)
    assert shown.startswith("line 0\n")
    assert shown.endswith("line 1999\n")
    assert len(shown) < 2 * LOG_CHARS + 40
    assert both_ends("short") == "short"
