"""A network between verifier and drafter that resets connections and delays, limits or loses their bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from load import FaultRecord
from stage import Stage
from tcp_proxy import TcpProxy

from draftwire.v1 import draft_pb2
from draftwire_bench.link import Link, LinkQuality

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

Matrix = Callable[[FaultRecord], None]
BYTES = ("--carriers", "bytes")
NUM_CUTS = 6


@pytest.fixture
def proxy(stage: Stage) -> Iterator[TcpProxy]:
    with TcpProxy(stage.drafter().address) as proxy:
        yield proxy


def test_the_connection_is_cut_in_mid_message_again_and_again(stage: Stage, matrix: Matrix, proxy: TcpProxy) -> None:
    load = stage.load([proxy.address], *BYTES)
    with load.fault(f"connection cut in mid-message, {NUM_CUTS} times, both ways") as record:
        for number in range(NUM_CUTS):
            proxy.cut(from_service=number % 2 == 0)
            load.wait_for(lambda: proxy.is_cut, "a message is cut")
    matrix(record)


def test_the_drafters_host_vanishes_and_comes_back(stage: Stage, matrix: Matrix, proxy: TcpProxy) -> None:
    load = stage.load([proxy.address], *BYTES)
    with load.fault("no byte passes for 15 s, no connection ends", during_below=0.5) as record:
        proxy.is_silent = True
        time.sleep(15)
        proxy.is_silent = False
    matrix(record)


def test_every_packet_of_a_drafter_is_a_second_late(stage: Stage, matrix: Matrix, proxy: TcpProxy) -> None:
    load = stage.load([proxy.address], *BYTES)
    with load.fault("the drafter's bytes 1 s late, for 5 s", during_below=0.5) as record:
        proxy.delay_s = 1.0
        time.sleep(5)
        proxy.delay_s = 0.0
    matrix(record)


def test_the_link_becomes_narrow(stage: Stage, matrix: Matrix, proxy: TcpProxy) -> None:
    load = stage.load([proxy.address], *BYTES)
    with load.fault("20 kB/s each way, for 5 s") as record:
        proxy.bytes_per_s = 20e3
        time.sleep(5)
        proxy.bytes_per_s = None
    matrix(record)


def test_a_drafter_of_another_host_is_sent_features_in_messages(link: Link, stage: Stage) -> None:
    """An abstract socket exists in one network namespace, so the drafter in another cannot share memory."""
    drafter = stage.drafter(host=link.address, program=link.program)
    load = stage.load([drafter.address], "--insecure")
    load.measure()  # checks greedy output against transformers, and acceptance against that of undisturbed features
    [status] = load.drafters()
    assert (status.features_carrier, status.is_direct) == (draft_pb2.CARRIER_BYTES, False)


def test_packets_are_lost(link: Link, stage: Stage, matrix: Matrix) -> None:
    drafter = stage.drafter(host=link.address, program=link.program)
    load = stage.load([drafter.address], *BYTES, "--insecure")
    with load.fault("5 % of the packets lost each way, for 20 s") as record:
        link.set(LinkQuality(loss=0.05))
        time.sleep(20)
        num_lost = link.set(LinkQuality())
    assert num_lost > 20
    matrix(record)
