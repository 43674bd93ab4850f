"""The HTTP port of the metrics."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from certificates import Authority
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from waiting import wait_for

from draftwire.contract.errors import InvalidArgumentError, ServerError
from draftwire.server import metrics
from draftwire.server.metrics import serving_metrics
from draftwire.server.security import ServerSecurity

PLAIN = ServerSecurity()
# Errors of a client whose connection the server ends.
CUT = (urllib.error.URLError, ConnectionError, ssl.SSLError, http.client.HTTPException)


class Answer(Collector):
    def collect(self):
        yield GaugeMetricFamily("answer", "To everything.", value=42)


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        return response.read().decode()


def scrape_encrypted(port: int, ca: Path, own: tuple[Path, Path] | None = None) -> str:
    context = ssl.create_default_context(cafile=str(ca))
    if own is not None:
        context.load_cert_chain(*own)
    with urllib.request.urlopen(f"https://localhost:{port}/metrics", timeout=30, context=context) as response:
        return response.read().decode()


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def other(tmp_path) -> Authority:
    return Authority(tmp_path / "other")


def test_collectors_and_process_are_shown_while_serving():
    with serving_metrics("127.0.0.1:0", [Answer()], PLAIN) as port:
        text = scrape(port)
    assert "\nanswer 42.0\n" in text
    assert "\nprocess_open_fds " in text
    with pytest.raises(urllib.error.URLError):
        scrape(port)


@pytest.mark.parametrize("accepted", ["application/openmetrics-text; version=\xe9", "text/plain;version=1.x.0"])
def test_an_accept_header_that_cannot_be_read_counts_as_none(accepted, capfd):
    with serving_metrics("127.0.0.1:0", [Answer()], PLAIN) as port:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accepted})
        with urllib.request.urlopen(request, timeout=30) as response:
            assert "\nanswer 42.0\n" in response.read().decode()
    assert "Traceback" not in capfd.readouterr().err


def test_no_address_serves_nothing():
    with serving_metrics(None, [Answer()], PLAIN) as port:
        assert port is None


def test_a_port_in_use_and_a_wrong_address_are_refused():
    with serving_metrics("127.0.0.1:0", [], PLAIN) as port:
        with pytest.raises(ServerError, match=f"metrics_listen = '127.0.0.1:{port}': cannot be bound"):
            serving_metrics(f"127.0.0.1:{port}", [], PLAIN).__enter__()
        with pytest.raises(InvalidArgumentError, match="metrics_listen = 'nowhere': must be HOST:PORT"):
            serving_metrics("nowhere", [], PLAIN).__enter__()


def test_an_ipv6_address_is_bound():
    if not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    with serving_metrics("[::1]:0", [], PLAIN) as port:
        urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=30).close()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0"])
def test_plain_text_outside_of_loopback_must_be_asked_for(listen):
    with pytest.raises(InvalidArgumentError, match=r"metrics_listen = .* needs insecure; or give tls_cert"):
        serving_metrics(listen, [], PLAIN).__enter__()
    with serving_metrics("0.0.0.0:0", [Answer()], ServerSecurity(insecure=True)) as port:
        assert "\nanswer 42.0\n" in scrape(port)


def test_a_certificate_makes_it_https_and_nothing_else(authority, other):
    with serving_metrics("0.0.0.0:0", [Answer()], ServerSecurity(*authority.issue("localhost"))) as port:
        assert "\nanswer 42.0\n" in scrape_encrypted(port, authority.file)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            scrape_encrypted(port, other.file)
        with pytest.raises(CUT):
            scrape(port)


def test_mutual_tls_lets_in_whom_the_authority_knows(authority, other):
    security = ServerSecurity(*authority.issue("localhost"), client_ca=authority.file)
    with serving_metrics("127.0.0.1:0", [Answer()], security) as port:
        assert "\nanswer 42.0\n" in scrape_encrypted(port, authority.file, authority.issue("prometheus"))
        for own in (None, other.issue("stranger")):
            with pytest.raises(CUT):
                scrape_encrypted(port, authority.file, own)


def test_a_renewed_certificate_is_used_once_it_is_whole(authority, other):
    certificate, key = authority.issue("localhost")
    with serving_metrics("127.0.0.1:0", [], ServerSecurity(certificate, key)) as port:
        scrape_encrypted(port, authority.file)
        new_certificate, new_key = other.issue("localhost")
        certificate.write_bytes(new_certificate.read_bytes())  # without its key
        scrape_encrypted(port, authority.file)
        key.write_bytes(new_key.read_bytes())
        scrape_encrypted(port, other.file)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            scrape_encrypted(port, authority.file)
        key.unlink()
        scrape_encrypted(port, other.file)


def test_authorities_of_clients_are_read_again(authority, other):
    theirs = authority.file.with_name("clients.pem")
    theirs.write_bytes(authority.file.read_bytes())
    certificate, key = authority.issue("localhost")
    with serving_metrics("127.0.0.1:0", [], ServerSecurity(certificate, key, theirs)) as port:
        own = other.issue("prometheus")
        with pytest.raises(CUT):
            scrape_encrypted(port, authority.file, own)
        theirs.write_bytes(other.file.read_bytes())
        scrape_encrypted(port, authority.file, own)


def test_a_client_that_does_not_shake_hands_holds_up_nobody(authority):
    with (
        serving_metrics("127.0.0.1:0", [], ServerSecurity(*authority.issue("localhost"))) as port,
        socket.create_connection(("127.0.0.1", port)),
    ):
        scrape_encrypted(port, authority.file)


@pytest.mark.parametrize("encrypted", [False, True])
def test_slow_connections_take_few_threads_and_block_nobody(authority, encrypted):
    security = ServerSecurity(*authority.issue("localhost")) if encrypted else PLAIN
    others = set(threading.enumerate())  # threads of earlier tests, which may end at any time
    few = 2 * metrics.MAX_CONNECTIONS  # threads of cut connections may not have ended yet
    with ExitStack() as slow:
        port = slow.enter_context(serving_metrics("127.0.0.1:0", [Answer()], security))
        for _ in range(300):
            client = slow.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            with suppress(OSError):  # the server may have cut the connection
                client.sendall(b"\x16\x03\x01" if encrypted else b"GET /metrics HT")
            assert len(set(threading.enumerate()) - others) <= few
        text = scrape_encrypted(port, authority.file) if encrypted else scrape(port)
        assert "\nanswer 42.0\n" in text
        assert len(set(threading.enumerate()) - others) <= few
    wait_for(lambda: set(threading.enumerate()) <= others)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_connection_that_trickles_is_cut_in_time(authority, encrypted, monkeypatch):
    monkeypatch.setattr(metrics, "TIMEOUT_S", 1.0)
    security = ServerSecurity(*authority.issue("localhost")) if encrypted else PLAIN
    with (
        serving_metrics("127.0.0.1:0", [], security) as port,
        socket.create_connection(("127.0.0.1", port), timeout=0.1) as client,
    ):
        drops = iter(client_hello() if encrypted else b"GET /" + b"x" * 1000)
        wait_for(lambda: is_cut(client, next(drops)))


def client_hello() -> bytes:
    """Return the first TLS message of a client."""
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def is_cut(client: socket.socket, byte: int) -> bool:
    """Send a byte; return whether the server has closed the connection."""
    try:
        client.sendall(bytes([byte]))
        return client.recv(1000) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_missing_files_and_bad_certificates_are_named_at_start(tmp_path, authority):
    _, key = authority.issue("localhost")
    with pytest.raises(ServerError, match=r"none\.pem cannot be read: No such file"):
        serving_metrics("127.0.0.1:0", [], ServerSecurity(tmp_path / "none.pem", key)).__enter__()
    with pytest.raises(ServerError, match=r"tls_cert = .*"):
        serving_metrics("127.0.0.1:0", [], ServerSecurity(key, key)).__enter__()
