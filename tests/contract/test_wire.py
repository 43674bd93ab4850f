"""Addresses and gRPC channel options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from draftwire.contract.addresses import CHANNEL_OPTIONS, parse_address
from draftwire.contract.errors import InvalidArgumentError


@pytest.mark.parametrize("name", [name for name, _ in CHANNEL_OPTIONS])
def test_grpc_knows_the_option(name: str) -> None:
    # gRPC ignores unknown options; the names of known options are in its library.
    assert name.encode() in Path(cygrpc.__file__).read_bytes()


def test_pings_are_no_more_frequent_than_the_other_side_allows() -> None:
    options = dict(CHANNEL_OPTIONS)
    assert options["grpc.keepalive_time_ms"] >= options["grpc.http2.min_ping_interval_without_data_ms"]


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:x", "host:65536", "a..b:1", "a/b:1", f"{'a' * 64}:1"]
)
def test_an_address_that_nothing_can_be_dialled_by_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"drafters = .*must be HOST:PORT"):
        parse_address(address, "drafters")


@pytest.mark.parametrize("scheme", ["http", "https", "grpc", "dns"])
@pytest.mark.parametrize("end", ["", "/", "/v1"])
def test_an_address_with_a_scheme_is_named_as_the_wrong_form(scheme: str, end: str) -> None:
    allowed = f"must be HOST:PORT without {scheme}://, as in localhost:50051; TLS is turned on by options"
    with pytest.raises(InvalidArgumentError, match=re.escape(allowed)):
        parse_address(f"{scheme}://localhost:50051{end}", "server")


@pytest.mark.parametrize("host", ["a.b", "a.b.", "bücher.example", "10.0.0.1", "[fd00::1]"])
def test_names_and_addresses_are_hosts(host: str) -> None:
    assert parse_address(f"{host}:50052", "drafters") == (host, 50052)
