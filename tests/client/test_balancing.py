"""One client with several servers: it uses them in turn and skips servers that are unreachable or not serving."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from click.testing import CliRunner
from grpc_health.v1.health_pb2 import HealthCheckResponse
from waiting import wait_for

from draftwire import AsyncClient, Client
from draftwire.contract.addresses import split_addresses
from draftwire.contract.errors import InvalidArgumentError, RequestError
from draftwire_cli.main import main

PATIENCE_S = 60.0


def complete(client: Client) -> str:
    """Complete one request; return the address of its server."""
    with client.generate("abc") as stream:
        list(stream)
        return stream.address


def completed(address: str | Sequence[str], count: int) -> list[str]:
    """Complete `count` requests with the asyncio client; return the addresses of their servers."""

    async def use() -> list[str]:
        async with AsyncClient(address) as client:
            return await _addresses(client, count)

    return asyncio.run(use())


async def _addresses(client: AsyncClient, count: int) -> list[str]:
    found = []
    for _ in range(count):
        async with client.generate("abc") as stream:
            assert [chunk async for chunk in stream]
            found.append(stream.address)
    return found


def uses(client: Client, *addresses: str) -> bool:
    """Return whether six requests are spread evenly over these servers; False if a request fails."""
    try:
        return Counter(complete(client) for _ in range(6)) == Counter({one: 6 // len(addresses) for one in addresses})
    except RequestError:
        return False


def free_address() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{unused.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a port that accepts connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_requests_go_to_the_servers_in_turn(start_verifier):
    first, second = start_verifier(), start_verifier()
    with Client([first.address, second.address]) as client:
        wait_for(lambda: uses(client, first.address, second.address))
        assert {client.info().version for _ in range(2)} == {"1.2.3"}
    assert first.requests
    assert second.requests


def test_asyncio_takes_the_servers_in_turn(start_verifier):
    addresses = [start_verifier().address, start_verifier().address]

    async def use() -> None:
        async with AsyncClient(",".join(addresses)) as client:
            async with asyncio.timeout(PATIENCE_S):
                while Counter(await _addresses(client, 6)) != Counter(dict.fromkeys(addresses, 3)):
                    await asyncio.sleep(0.01)

    asyncio.run(use())


def test_a_server_that_dies_is_left_out_until_it_is_back(start_verifier):
    first, second = start_verifier(), start_verifier()
    with Client([first.address, second.address]) as client:
        wait_for(lambda: uses(client, first.address, second.address))
        first.stop()
        wait_for(lambda: uses(client, second.address))
        start_verifier(first.address)
        wait_for(lambda: uses(client, first.address, second.address))


def test_a_server_that_does_not_serve_is_left_out(start_verifier):
    first, second = start_verifier(), start_verifier()
    with Client([first.address, second.address]) as client:
        wait_for(lambda: uses(client, first.address, second.address))
        first.health.set("", HealthCheckResponse.NOT_SERVING)
        wait_for(lambda: uses(client, second.address))
        first.health.set("", HealthCheckResponse.SERVING)
        wait_for(lambda: uses(client, first.address, second.address))


def test_the_first_request_passes_a_server_that_is_down(start_verifier):
    for _ in range(3):
        down, up = free_address(), start_verifier().address
        with Client([down, up]) as client:
            assert complete(client) == up
        assert completed([down, up], 3) == [up, up, up]


def test_a_silent_server_keeps_nobody_waiting(start_verifier, silent):
    up = start_verifier().address
    with Client([silent, up]) as client:
        assert [complete(client) for _ in range(3)] == [up, up, up]
    assert completed([silent, up], 3) == [up, up, up]


def test_without_any_server_the_error_names_one():
    addresses = [free_address(), free_address()]
    with Client(addresses) as client, pytest.raises(RequestError, match="cannot be reached") as caught:
        complete(client)
    assert caught.value.status == "UNAVAILABLE"
    assert any(address in str(caught.value) for address in addresses)
    with pytest.raises(RequestError, match="cannot be reached"):
        completed(addresses, 1)


def test_waiting_for_a_server_counts_into_the_timeout(silent):
    addresses = [silent, f"localhost:{silent.rpartition(':')[2]}"]
    began = time.monotonic()
    with Client(addresses) as client, pytest.raises(RequestError, match=r"timeout of 0\.3 s") as caught:
        client.complete("abc", timeout=0.3)
    assert caught.value.status == "DEADLINE_EXCEEDED"

    async def use() -> None:
        async with AsyncClient(addresses) as client:
            await client.complete("abc", timeout=0.3)

    with pytest.raises(RequestError, match=r"timeout of 0\.3 s"):
        asyncio.run(use())
    assert time.monotonic() - began < 10.0


def test_an_async_stream_may_be_left_before_a_server_is_found(silent):
    async def use() -> None:
        addresses = [silent, f"localhost:{silent.rpartition(':')[2]}"]
        async with AsyncClient(addresses) as client:
            async with client.generate("abc") as stream:
                await asyncio.sleep(0.05)
            assert [chunk async for chunk in stream] == []

    asyncio.run(use())


def test_a_name_of_several_hosts_has_its_requests_in_turn(start_verifier):
    first = start_verifier("127.0.0.1:0")
    port = first.address.rpartition(":")[2]
    try:
        second = start_verifier(f"[::1]:{port}")
    except RuntimeError:
        pytest.skip("needs IPv6 on the loopback interface")
    with Client(f"localhost:{port}") as client:
        wait_for(lambda: complete(client) != "" and bool(first.requests) and bool(second.requests))
        first.stop()
        wait_for(lambda: uses(client, client.address))
        before = len(second.requests)
        assert uses(client, client.address)
        assert len(second.requests) == before + 6


def test_the_command_takes_several_servers(start_verifier):
    down, up = free_address(), start_verifier()
    result = CliRunner().invoke(main, ["generate", "--server", f"{down},{up.address}", "--prompt", "abc"])
    assert result.exit_code == 0, result.output
    assert result.stdout == "é b end"
    assert len(up.requests) == 1


def test_addresses_come_as_a_list_or_with_commas():
    assert split_addresses("a:1, b:2", "address") == ("a:1", "b:2")
    assert split_addresses(["a:1", "[::1]:2"], "address") == ("a:1", "[::1]:2")
    assert split_addresses("a:1", "address") == ("a:1",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "address = []: must be HOST:PORT, or several of them"),
        (["a:1", 7], "address = ['a:1', 7]: must be HOST:PORT, or several of them"),
        ("a:1,", "address = '': must be HOST:PORT with a port"),
        ("a:1,b", "address = 'b': must be HOST:PORT with a port"),
        ("a:1,a:1", "address = 'a:1,a:1': must name each address once"),
    ],
)
def test_wrong_lists_of_addresses_are_named(given, message):
    with pytest.raises(InvalidArgumentError) as caught:
        split_addresses(given, "address")
    assert str(caught.value).startswith(message)
    with pytest.raises(InvalidArgumentError):
        Client(given)
