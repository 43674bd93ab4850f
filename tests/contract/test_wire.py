"""Options of the connections."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from draftwire.wire import CHANNEL_OPTIONS


@pytest.mark.parametrize("name", [name for name, _ in CHANNEL_OPTIONS])
def test_grpc_knows_the_option(name: str) -> None:
    # gRPC passes over options that it does not know; the names stand in its library.
    assert name.encode() in Path(cygrpc.__file__).read_bytes()


def test_pings_are_no_more_frequent_than_the_other_side_allows() -> None:
    options = dict(CHANNEL_OPTIONS)
    assert options["grpc.keepalive_time_ms"] >= options["grpc.http2.min_ping_interval_without_data_ms"]
