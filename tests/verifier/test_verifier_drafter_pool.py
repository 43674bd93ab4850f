"""The drafter pool follows the addresses of its names."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
import time

import pytest

from draftwire.v1 import generate_pb2
from verifier_service.drafters import pool as drafter_pool
from verifier_service.drafters.pool import DrafterPool

CONNECTING = generate_pb2.DRAFTER_STATE_CONNECTING


class FakeLink:
    """A link that runs until it is cancelled."""

    def __init__(self, address: str) -> None:
        self.status = generate_pb2.DrafterStatus(address=address, state=CONNECTING)
        self.ended = queue.SimpleQueue()
        self.is_needed = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.put(True)


class Names:
    """A fake name server."""

    def __init__(self, **hosts: list[str]) -> None:
        self.hosts = hosts

    def getaddrinfo(self, host, port, *args, **kwargs):  # noqa: ARG002
        if host not in self.hosts:
            raise socket.gaierror("no such name")
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in self.hosts[host]]
        return [
            (family, socket.SOCK_STREAM, 6, "", (address, port))
            for family, address in zip(families, self.hosts[host], strict=True)
        ]


@pytest.fixture
def names(monkeypatch):
    served = Names(one=["10.0.0.1"], many=["10.0.0.2", "10.0.0.3"])
    monkeypatch.setattr(socket, "getaddrinfo", served.getaddrinfo)
    monkeypatch.setattr(drafter_pool, "RESOLVE_INTERVAL_S", 0.01)
    return served


@pytest.fixture
def start():
    pools = []

    def make(*given: str) -> tuple[DrafterPool, dict[str, FakeLink]]:
        links = {}
        pool = DrafterPool(given, lambda address, _: links.setdefault(address, FakeLink(address)))
        pools.append(pool)
        pool.start()
        return pool, links

    yield make
    for pool in pools:
        pool.stop()


def wait_for(pool: DrafterPool, *addresses: str) -> None:
    deadline = time.monotonic() + 30
    while sorted(status.address for status in pool.statuses) != sorted(addresses):
        assert time.monotonic() < deadline, pool.statuses
        time.sleep(0.005)


def test_every_name_is_shown_before_it_is_looked_up():
    pool = DrafterPool(["one:50052", "many:50052"], lambda address, _: FakeLink(address))
    assert [(status.address, status.state) for status in pool.statuses] == [
        ("one:50052", CONNECTING),
        ("many:50052", CONNECTING),
    ]


def test_a_name_stands_for_a_drafter_at_each_of_its_addresses(names, start):  # noqa: ARG001
    pool, _ = start("one:1", "many:2")
    wait_for(pool, "10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:2")


def test_an_address_named_twice_is_one_drafter(names, start):
    names.hosts["other"] = ["10.0.0.1"]
    pool, _ = start("one:1", "other:1")
    wait_for(pool, "10.0.0.1:1")


def test_a_host_of_both_families_is_one_drafter(names, start):
    names.hosts["both"] = ["::1", "127.0.0.1"]
    pool, _ = start("both:1")
    wait_for(pool, "127.0.0.1:1")


def test_an_address_of_version_6_is_bracketed(names, start):
    names.hosts["six"] = ["fd00::1"]
    pool, _ = start("six:1")
    wait_for(pool, "[fd00::1]:1")


def test_new_addresses_are_found(names, start):
    pool, _ = start("one:1")
    wait_for(pool, "10.0.0.1:1")
    names.hosts["one"] = ["10.0.0.1", "10.0.0.9"]
    wait_for(pool, "10.0.0.1:1", "10.0.0.9:1")


def test_an_unneeded_link_whose_address_is_gone_is_closed(names, start):
    pool, links = start("many:2")
    wait_for(pool, "10.0.0.2:2", "10.0.0.3:2")
    links["10.0.0.3:2"].is_needed = True
    names.hosts["many"] = ["10.0.0.4"]
    wait_for(pool, "10.0.0.3:2", "10.0.0.4:2")
    assert links["10.0.0.2:2"].ended.get(timeout=30)
    links["10.0.0.3:2"].is_needed = False
    wait_for(pool, "10.0.0.4:2")


def test_a_name_without_an_address_is_shown_and_not_dialled(names, start):
    pool, links = start("late:7")
    wait_for(pool, "late:7")
    assert pool.statuses[0].detail == "the name has no address"
    names.hosts["late"] = ["10.0.0.7"]
    wait_for(pool, "10.0.0.7:7")
    assert list(links) == ["10.0.0.7:7"]


def test_a_name_server_that_fails_takes_no_drafter_away(names, start):
    pool, links = start("many:2", "one:1")
    wait_for(pool, "10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:2")
    del names.hosts["many"]
    wait_for(pool, "10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:2", "many:2")
    names.hosts["one"] = ["10.0.0.9"]  # other names are still resolved
    wait_for(pool, "10.0.0.2:2", "10.0.0.3:2", "10.0.0.9:1", "many:2")
    names.hosts["many"] = ["10.0.0.2", "10.0.0.3"]
    wait_for(pool, "10.0.0.2:2", "10.0.0.3:2", "10.0.0.9:1")
    assert links["10.0.0.2:2"].ended.empty()


def test_stopping_ends_all_links(names, start):  # noqa: ARG001
    pool, links = start("many:2")
    wait_for(pool, "10.0.0.2:2", "10.0.0.3:2")
    pool.stop()
    assert all(link.ended.get(timeout=30) for link in links.values())


def test_nobody_waits_for_a_name_that_takes_long(names, start, monkeypatch):
    """A slow lookup delays neither the other names nor `stop`."""
    answered, asked = threading.Event(), threading.Event()

    def getaddrinfo(host, *args, **kwargs):
        if host == "slow":
            asked.set()
            answered.wait()
        return names.getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    pool, _ = start("slow:1", "one:1")
    assert asked.wait(120)
    wait_for(pool, "slow:1", "10.0.0.1:1")
    names.hosts["one"] = ["10.0.0.9"]
    wait_for(pool, "slow:1", "10.0.0.9:1")
    pool.stop()
    assert not answered.is_set()
    answered.set()


def test_a_look_up_that_fails_in_an_unknown_way_is_tried_again(names, start, monkeypatch):
    failures = [RuntimeError("out of order"), RuntimeError("again")]

    def getaddrinfo(host, *args, **kwargs):
        if failures:
            raise failures.pop()
        return names.getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    pool, _ = start("one:1")
    wait_for(pool, "10.0.0.1:1")
    assert not failures
