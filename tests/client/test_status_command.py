"""`draftwire status` against a fake verifier."""

from __future__ import annotations

import itertools
from concurrent import futures

import grpc
import pytest
from click.testing import CliRunner

from draftwire.v1 import draft_pb2
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from draftwire_cli.main import main


class Busy(GenerationServicer):
    """A verifier that runs 10 steps of 5 rows between two info calls; verification takes half of the time."""

    def __init__(self) -> None:
        self._looks = itertools.count(1)

    def GetVerifierInfo(self, request, context):  # noqa: N802, ARG002
        look = next(self._looks)
        return pb.GetVerifierInfoResponse(
            target="demo\x1b[2J",
            device="cpu",
            dtype="float32",
            requests_running=3,
            max_num_seqs=64,
            requests_waiting=7,
            max_queue=1024,
            server_memory=draft_pb2.MemoryUse(peak_host_bytes=9 << 20),
            counters=pb.EngineCounters(
                steps=10 * look,
                verify_steps=10 * look,
                verify_rows=50 * look,
                accepted_drafts=15 * look,
                fallbacks=[pb.FallbackCount(cause=pb.FALLBACK_CAUSE_NO_DRAFTER, tokens=1234)],
                times=pb.PhaseTimes(verify_s=2.0 * look, draft_s=1.0 * look, host_s=1.0 * look),
            ),
            drafters=[
                pb.DrafterStatus(
                    address="10.0.0.1:50052", state=pb.DRAFTER_STATE_READY, head_fingerprint="f00d", sequences=3,
                    other_sequences=5, kv_cache_usage=0.25, drafted=40 * look, accepted=30 * look,
                    features_carrier=draft_pb2.CARRIER_SHM, features_are_fused=True,
                    plan=pb.DraftPlan(
                        num_drafts=0, best_num_drafts=3, expected_gain=0.75, answer_s=0.0015, step_s=0.005,
                        tokens_per_s=[200.0, 0.0, 140.0, 150.0],
                    ),
                    memory=draft_pb2.MemoryUse(
                        kv_cache_token_bytes=1024, kv_cache_tokens=2048, draft_logits_bytes=32_768_000,
                        peak_gpu_allocated_bytes=5 << 20, peak_gpu_reserved_bytes=6 << 20, peak_host_bytes=7 << 20,
                    ),
                ),
                pb.DrafterStatus(
                    address="10.0.0.2:50052", state=pb.DRAFTER_STATE_REFUSED, detail="vocab_size does not match"
                ),
            ],
        )


@pytest.fixture
def address():
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_GenerationServicer_to_server(Busy(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_one_look_shows_the_verifier_and_its_drafters(address):
    result = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["status", "--server", address, "--interval", "0.1"])
    assert result.exit_code == 0
    verifier = next(line for line in result.output.splitlines() if "3 of 64" in line)
    cells = [cell.strip() for cell in verifier.strip("│ ").split("│")]
    assert cells[:2] == ["3 of 64", "7 of 1024"]
    assert cells[5:] == ["2.50", "25", "0", "50", "0", "25", "0"]
    steps, rows, drafts = (int(cell) for cell in cells[2:5])
    assert steps > 0
    assert abs(rows - 5 * steps) <= 5
    assert abs(drafts - 4 * steps) <= 5
    drafter = next(line for line in result.output.splitlines() if "10.0.0.1:50052" in line)
    cells = [cell.strip() for cell in drafter.strip("│ ").split("│")]
    assert cells[:4] == ["10.0.0.1:50052", "ready", "3 + 5 of others", "25"]
    assert cells[5:8] == ["75", "fused by shm", "f00d"]
    assert "vocab_size does not match" in result.output
    fallback = next(line for line in result.output.splitlines() if "no_drafter" in line)
    assert fallback.split("│")[3].strip() == "1234"


def test_one_look_shows_what_drafters_are_asked_for_and_why(address):
    result = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["status", "--server", address, "--interval", "0.1"])
    shown = result.output.partition("drafts requested")[2].partition("tokens without drafts")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown if line.startswith("│")]
    assert rows == [["10.0.0.1:50052", "0", "3", "0.75", "1.50", "5.00", "200", "-", "140", "150"]]


def test_one_look_shows_the_memory_of_each_reporting_process(address):
    result = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["status", "--server", address, "--interval", "0.1"])
    shown = result.output.partition("memory, MiB")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown if line.startswith("│")]
    assert [row[0] for row in rows] == ["verifier", "verifier's server", "drafter 10.0.0.1:50052"]
    assert rows[1][1:] == ["0", "0", "0.0", "0.0", "0.0", "0.0", "0.0", "9.0"]
    assert rows[2][1:] == ["1024", "2048", "2.0", "0.0", "31.2", "5.0", "6.0", "7.0"]


def test_a_name_cannot_steer_the_terminal(address):
    result = CliRunner(env={"COLUMNS": "160"}).invoke(main, ["status", "--server", address, "--interval", "0.1"])
    assert "\x1b[2J" not in result.output


def test_no_server_is_an_error():
    result = CliRunner().invoke(main, ["status", "--server", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "127.0.0.1:1" in result.output
