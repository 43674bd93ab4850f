"""`draftwire bench transport`: every way between two real processes, and the reason for each missing way."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner, Result

from draftwire.contract.errors import BenchmarkError
from draftwire.transport.segment import SegmentError
from draftwire.v1 import draft_pb2 as pb
from draftwire_bench.transport import transport as module
from draftwire_bench.transport.transport import TransportOptions, Way, measure_transport
from draftwire_cli.main import main

KIB = 1024
CPU = torch.device("cpu")
# The last GPU, which differs from the first if there are two.
LAST_GPU = f"cuda:{max(torch.cuda.device_count(), 1) - 1}"


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "transport", *arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(console output, JSON) of one run from CPU to CPU."""
    path = tmp_path_factory.mktemp("transport") / "out.json"
    result = bench("--sizes", "8KiB,132,256KiB", "--repeats", "10", "--json", str(path))
    assert result.exit_code == 0, result.output
    return result.output, json.loads(path.read_text())


def test_every_size_is_measured_by_every_way_that_carries_it(run):
    rows = run[1]["rows"]
    found = {(row["carrier"], row["message_by"], row["num_bytes"]) for row in rows if row["median_us"]}
    ways = [("bytes", "gRPC"), ("bytes", "ring"), ("shm", "gRPC"), ("shm", "ring")]
    every = {(*way, size) for way in ways for size in (132, 8 * KIB, 256 * KIB)}
    assert found == every - {("bytes", "ring", 256 * KIB)}
    for row in rows:
        if row["median_us"]:
            assert row["repeats"] == 10
            assert 0 < row["median_us"] <= row["p99_us"]
            assert row["gb_per_s"] == pytest.approx(row["num_bytes"] / row["median_us"] / 1000)


def test_a_way_that_is_not_there_has_a_row_that_says_why(run):
    output, document = run
    missing = {(row["carrier"], row["message_by"]): row["missing"] for row in document["rows"] if row["missing"]}
    assert missing == {
        ("bytes", "ring"): "a message of the ring has at most 131072 bytes",
        ("cuda_ipc", "ring"): "not possible for tensors on cpu",
    }
    assert "not available: not possible for tensors on cpu" in output


def test_json_says_on_what_it_was_measured(run):
    document = run[1]
    assert document["benchmark"] == "transport"
    assert (document["sender_device"], document["receiver_device"]) == ("cpu", "cpu")
    assert {"machine", "versions", "command"} <= set(document)


def test_a_row_ends_when_it_has_taken_long_enough(monkeypatch):
    monkeypatch.setattr(module, "WAYS", module.WAYS[:1])
    monkeypatch.setattr(module, "LONGEST_S", 0.0)
    (row,) = measure_transport(TransportOptions(CPU, CPU, [64], 1000))
    assert row.repeats == 1


def test_memory_that_cannot_be_had_is_a_reason(monkeypatch):
    monkeypatch.setattr(module, "WAYS", (Way(pb.CARRIER_SHM, is_direct=True),))
    for name in ("draftwire.transport.rendezvous.attach_segment", "draftwire_bench.transport.transport.create_segment"):
        monkeypatch.setattr(name, refuse)
    (row,) = measure_transport(TransportOptions(CPU, CPU, [64], 1))
    assert (row.median_us, row.missing) == (None, "no memory today")


def refuse(*_: object) -> None:
    raise SegmentError("no memory today")


@pytest.mark.parametrize("way", module.WAYS[:4], ids=str)
def test_other_bytes_than_were_sent_fail_the_command(way, monkeypatch):
    monkeypatch.setattr(module, "WAYS", (way,))
    monkeypatch.setattr(module, "pattern", lambda count: torch.zeros(count, dtype=torch.int32))
    with pytest.raises(BenchmarkError, match="the 64 bytes differ from those that were sent"):
        measure_transport(TransportOptions(CPU, CPU, [64], 1))


@pytest.mark.parametrize("sizes", ["", "7", "10", "1GiB", "256MiB", "8KiB,-4"])
def test_sizes_that_are_not_allowed_are_named(sizes):
    result = bench("--sizes", sizes)
    assert result.exit_code == 2
    assert "sizes = " in result.output


def test_a_device_that_is_not_there_is_named():
    result = bench("--sender-device", "cuda:99")
    assert result.exit_code == 1
    assert "device = 'cuda:99'" in result.output


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda:0", LAST_GPU), ("cuda:0", "cpu"), ("cpu", LAST_GPU)], ids=str)
def test_tensors_of_gpus_arrive_as_they_were_sent(devices):
    sender, receiver = map(torch.device, devices)
    rows = measure_transport(TransportOptions(sender, receiver, [8 * KIB, 1 << 20], 10))
    found = {(row.carrier, row.message_by, row.num_bytes) for row in rows if row.median_us}
    assert {("bytes", "gRPC", 1 << 20), ("shm", "gRPC", 1 << 20), ("shm", "ring", 1 << 20)} <= found
    assert all(row.median_us or row.missing for row in rows)
    if "cpu" not in devices:
        assert ("cuda_ipc", "ring", 1 << 20) in found
