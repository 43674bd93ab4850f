"""TLS, mutual TLS and bearer tokens, against a real port."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest
from certificates import Authority

from draftwire import AsyncClient, Client
from draftwire.contract.addresses import is_loopback
from draftwire.contract.client_security import ClientSecurity
from draftwire.contract.errors import InvalidArgumentError, RequestError, ServerError
from draftwire.server.security import ServerSecurity, TokenInterceptor
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1 import generate_pb2_grpc

SERVICE = "draftwire.v1.Generation"


class Servicer(generate_pb2_grpc.GenerationServicer):
    """A verifier with fixed responses."""

    async def GetVerifierInfo(self, request, context):  # noqa: N802, ARG002
        return pb.GetVerifierInfoResponse(version="here")

    async def Generate(self, request, context):  # noqa: N802, ARG002
        statistics = pb.RequestStatistics()
        yield pb.GenerateResponse(token_ids=[1], statistics=statistics, finish_reason=pb.FINISH_REASON_LENGTH)


class Serving:
    """A running server with the given security, on an event loop in a separate thread."""

    def __init__(self, security: ServerSecurity) -> None:
        self._security = security
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(120)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        token_file = self._security.token_file
        interceptors = [TokenInterceptor(token_file, [SERVICE])] if token_file else []
        server = grpc.aio.server(interceptors=interceptors)
        generate_pb2_grpc.add_GenerationServicer_to_server(Servicer(), server)
        credentials = self._security.credentials("127.0.0.1:0")
        add = server.add_insecure_port if credentials is None else None
        port = add("127.0.0.1:0") if add else server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        self.address = f"localhost:{port}"
        self._started.set()
        await self._stop.wait()
        await server.stop(None)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture
def serve():
    servers = []

    def start(security: ServerSecurity) -> str:
        servers.append(Serving(security))
        return servers[-1].address

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def other(tmp_path) -> Authority:
    return Authority(tmp_path / "other")


def version(address: str, **security) -> str:
    with Client(address, ClientSecurity(**security)) as client:
        return client.info(timeout=30).version


def refused(address: str, **security) -> str:
    with pytest.raises(RequestError) as error:
        version(address, **security)
    return str(error.value)


def test_a_client_that_trusts_the_authority_gets_through(serve, authority):
    address = serve(ServerSecurity(*authority.issue("localhost")))
    assert version(address, ca=authority.file) == "here"


def test_a_server_of_another_authority_or_name_is_not_trusted(serve, authority, other):
    refused(serve(ServerSecurity(*other.issue("localhost"))), ca=authority.file)
    refused(serve(ServerSecurity(*authority.issue("elsewhere"))), ca=authority.file)


def test_each_of_several_servers_shows_its_own_certificate(serve, authority):
    named = serve(ServerSecurity(*authority.issue("localhost")))
    numbered = serve(ServerSecurity(*authority.issue("127.0.0.1"))).replace("localhost", "127.0.0.1")
    with Client([named, numbered], ClientSecurity(ca=str(authority.file))) as client:
        found = set()
        deadline = time.monotonic() + 60.0
        while found != {named, numbered} and time.monotonic() < deadline:
            with client.generate([1]) as stream:
                assert [chunk.token_ids for chunk in stream] == [(1,)]
                found.add(stream.address)
    assert found == {named, numbered}


def test_plain_text_does_not_reach_a_server_with_tls(serve, authority):
    text = refused(serve(ServerSecurity(*authority.issue("localhost"))))
    assert "serves TLS, but this client speaks plain text: give --tls, or --tls-ca FILE" in text


def test_plain_text_to_a_stream_of_asyncio_is_named_too(serve, authority):
    address = serve(ServerSecurity(*authority.issue("localhost")))

    async def use() -> None:
        async with AsyncClient(address) as client:
            await client.complete([1])

    with pytest.raises(RequestError, match="serves TLS, but this client speaks plain text"):
        asyncio.run(use())


def test_tls_to_a_plain_port_is_named(serve, authority):
    text = refused(serve(ServerSecurity()), ca=authority.file)
    assert "serves plain text, but this client speaks TLS" in text


def test_mutual_tls_lets_in_whom_the_authority_knows(serve, authority, other):
    address = serve(ServerSecurity(*authority.issue("localhost"), client_ca=authority.file))
    certificate, key = authority.issue("verifier")
    assert version(address, ca=authority.file, certificate=certificate, key=key) == "here"
    assert "takes only clients with a certificate, and this client shows none" in refused(address, ca=authority.file)
    assert "serves TLS, but this client speaks plain text" in refused(address)
    certificate, key = other.issue("stranger")
    refused(address, ca=authority.file, certificate=certificate, key=key)


def test_a_renewed_certificate_is_used_by_the_next_connection(serve, authority, other):
    certificate, key = authority.issue("localhost")
    address = serve(ServerSecurity(certificate, key))
    assert version(address, ca=authority.file) == "here"
    new_certificate, new_key = other.issue("localhost")
    certificate.write_bytes(new_certificate.read_bytes())
    key.write_bytes(new_key.read_bytes())
    assert version(address, ca=other.file) == "here"
    refused(address, ca=authority.file)


def test_a_damaged_renewal_leaves_the_old_certificate_in_force(serve, authority):
    certificate, key = authority.issue("localhost")
    address = serve(ServerSecurity(certificate, key))
    assert version(address, ca=authority.file) == "here"
    key.unlink()
    assert version(address, ca=authority.file) == "here"


def test_a_broken_renewal_leaves_the_old_certificate_in_force(serve, authority, other):
    certificate, key = authority.issue("localhost")
    address = serve(ServerSecurity(certificate, key))
    assert version(address, ca=authority.file) == "here"
    certificate.write_text("not yet written\n")
    assert version(address, ca=authority.file) == "here"
    new_certificate, new_key = other.issue("localhost")
    certificate.write_bytes(new_certificate.read_bytes())  # without its key
    assert version(address, ca=authority.file) == "here"
    key.write_bytes(new_key.read_bytes())
    assert version(address, ca=other.file) == "here"


@pytest.mark.parametrize("emptied", ["", "# all revoked\n"])
def test_an_empty_token_file_leaves_the_old_tokens_in_force(serve, tmp_path, caplog, emptied):
    known, own = tmp_path / "tokens", tmp_path / "own"
    known.write_text("first\n")
    own.write_text("first\n")
    address = serve(ServerSecurity(token_file=known))
    assert version(address, token_file=own) == "here"
    known.write_text(emptied)
    assert version(address, token_file=own) == "here"
    assert "keeping the previous tokens" in caplog.text
    known.write_text("that nobody has\n")  # the way to revoke all tokens
    assert "UNAUTHENTICATED" in refused(address, token_file=own)


def test_an_emptied_authority_file_leaves_the_old_one_in_force(serve, authority, other):
    trusted = authority.file.with_name("clients.pem")
    trusted.write_bytes(authority.file.read_bytes())
    address = serve(ServerSecurity(*authority.issue("localhost"), client_ca=trusted))
    good, bad = ({"certificate": pair[0], "key": pair[1]} for pair in (authority.issue("v"), other.issue("v")))
    assert version(address, ca=authority.file, **good) == "here"
    trusted.write_text("")
    assert version(address, ca=authority.file, **good) == "here"
    refused(address, ca=authority.file, **bad)
    refused(address, ca=authority.file)


def test_a_token_of_the_file_lets_in_and_no_other(serve, tmp_path):
    known, own = tmp_path / "tokens", tmp_path / "own"
    known.write_text("# of operations\nfirst\nsecond\n")
    address = serve(ServerSecurity(token_file=known))
    own.write_text("second\n")
    assert version(address, token_file=own) == "here"
    with Client(address, ClientSecurity(token_file=own)) as client:
        assert client.complete([1]).token_ids == (1,)
    own.write_text("secon\n")
    assert "a bearer token that this server knows is needed" in refused(address, token_file=own)
    assert "UNAUTHENTICATED" in refused(address)


def test_a_client_takes_the_first_token_of_a_servers_own_file(serve, tmp_path):
    known = tmp_path / "tokens"
    known.write_text("\n# of operations\nfirst\nsecond\n")
    address = serve(ServerSecurity(token_file=known))
    assert version(address, token_file=known) == "here"


def test_a_token_comes_as_text_or_from_the_environment(serve, authority, tmp_path, monkeypatch):
    known, own = tmp_path / "tokens", tmp_path / "own"
    known.write_text("first\nsecond\n")
    address = serve(ServerSecurity(*authority.issue("localhost"), token_file=known))
    assert version(address, ca=authority.file, token="second") == "here"
    assert "UNAUTHENTICATED" in refused(address, ca=authority.file)
    monkeypatch.setenv("DRAFTWIRE_TOKEN", "first\n")
    assert version(address, ca=authority.file) == "here"
    assert "UNAUTHENTICATED" in refused(address, ca=authority.file, token="third")  # arguments come first
    own.write_text("third\n")
    assert "UNAUTHENTICATED" in refused(address, ca=authority.file, token_file=own)
    monkeypatch.setenv("DRAFTWIRE_TOKEN", "")
    assert "UNAUTHENTICATED" in refused(address, ca=authority.file)


def test_asyncio_sends_the_token_too(serve, authority, tmp_path):
    (tmp_path / "tokens").write_text("first\n")
    address = serve(ServerSecurity(*authority.issue("localhost"), token_file=tmp_path / "tokens"))

    async def use() -> tuple[int, ...]:
        async with AsyncClient(address, ClientSecurity(ca=authority.file, token="first")) as client:
            return (await client.complete([1])).token_ids

    assert asyncio.run(use()) == (1,)


def test_a_token_is_given_in_one_way(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"token_file = .* must be left out where token is given"):
        ClientSecurity(token="first", token_file=tmp_path / "own")


def test_a_token_is_not_shown():
    assert "hidden" not in repr(ClientSecurity(token="hidden"))


@pytest.mark.parametrize("token", ["", " ", "g\u00e9heim", "geh\neim"])
def test_an_unsendable_token_is_refused_without_its_text(token, monkeypatch):
    with pytest.raises(InvalidArgumentError, match=r"^token = \(not shown\): must be printable ASCII, not empty$"):
        Client("127.0.0.1:1", ClientSecurity(token=token))
    if token:
        monkeypatch.setenv("DRAFTWIRE_TOKEN", token)
        with pytest.raises(InvalidArgumentError, match=r"^DRAFTWIRE_TOKEN = \(not shown\): must be printable ASCII"):
            Client("127.0.0.1:1")


@pytest.mark.parametrize("text", ["", "# of operations\n", "g\u00e9heim\n", "geh\x00eim\n"])
def test_an_unsendable_token_file_is_refused_without_its_text(tmp_path, text):
    own = tmp_path / "own"
    own.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"^token_file = '.*own': must ") as caught:
        Client("127.0.0.1:1", ClientSecurity(token_file=own))
    assert "eim" not in str(caught.value).removeprefix(f"token_file = {str(own)!r}")


def test_an_unsendable_token_is_refused_at_start_ignored_later(serve, tmp_path, caplog):
    known, own = tmp_path / "tokens", tmp_path / "own"
    known.write_bytes(b"\xff\xfe\n")
    with pytest.raises(InvalidArgumentError, match="token_file"):
        TokenInterceptor(known, [SERVICE])
    for file in (known, own):
        file.write_text("first\n")
    address = serve(ServerSecurity(token_file=known))
    assert version(address, token_file=own) == "here"
    known.write_bytes(b"second\n\xff\xfe\n")
    assert version(address, token_file=own) == "here"
    assert "keeping the previous tokens: token_file" in caplog.text


def test_a_stream_needs_the_token_too(serve, tmp_path):
    known = tmp_path / "tokens"
    known.write_text("first\n")
    with Client(serve(ServerSecurity(token_file=known))) as client, pytest.raises(RequestError, match="UNAUTHENT"):
        client.complete([1])


def test_tokens_are_read_again_when_the_file_changes(serve, tmp_path):
    known, own = tmp_path / "tokens", tmp_path / "own"
    known.write_text("first\n")
    own.write_text("another\n")
    address = serve(ServerSecurity(token_file=known))
    refused(address, token_file=own)
    known.write_text("first\nanother\n")
    assert version(address, token_file=own) == "here"


def test_a_file_without_tokens_is_refused_at_start(tmp_path):
    (tmp_path / "tokens").write_text("# none yet\n")
    with pytest.raises(ServerError, match="there is no token in it"):
        TokenInterceptor(tmp_path / "tokens", [SERVICE])
    with pytest.raises(ServerError, match="there is no token in it"):
        ServerSecurity(token_file=tmp_path / "tokens").check_tokens()
    with pytest.raises(ServerError, match="none cannot be read: No such file"):
        ServerSecurity(token_file=tmp_path / "none").check_tokens()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.3.2.1:1", "localhost:1", "[::1]:1"])
def test_loopback(address):
    assert is_loopback(address)
    assert ServerSecurity().credentials(address) is None
    assert ClientSecurity().credentials(address) is None


@pytest.mark.parametrize("address", ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "drafter:1", "localhost.example:1"])
def test_plain_text_outside_of_loopback_must_be_asked_for(address):
    assert not is_loopback(address)
    with pytest.raises(InvalidArgumentError, match="plain text outside of loopback needs insecure"):
        ServerSecurity().credentials(address)
    with pytest.raises(InvalidArgumentError, match=r"address = .* plain text outside of loopback"):
        Client(address)
    assert ServerSecurity(insecure=True).credentials(address) is None
    assert ClientSecurity(insecure=True).credentials(address) is None


def test_half_a_pair_of_files_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="needs tls_key beside it"):
        ServerSecurity(certificate=tmp_path)
    with pytest.raises(InvalidArgumentError, match="needs tls_key beside it"):
        ClientSecurity(key=tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"tls_client_ca = .* needs tls_cert"):
        ServerSecurity(client_ca=tmp_path)


def test_wrong_files_and_files_that_do_not_match_are_named(authority, tmp_path):
    (certificate, key), (_, foreign) = authority.issue("localhost"), authority.issue("elsewhere")
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("a secret that stays one\n")
    for files in ((certificate, foreign), (certificate, damaged), (damaged, key), (certificate, key, damaged)):
        with pytest.raises(ServerError, match=r"tls_cert = .*\.pem', or a file beside it: ") as error:
            ServerSecurity(*files).credentials("127.0.0.1:1")
        assert "secret" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    missing = tmp_path / "none.pem"
    with pytest.raises(ServerError, match=r"none\.pem cannot be read: No such file"):
        ServerSecurity(missing, missing).credentials("127.0.0.1:1")
    with pytest.raises(ServerError, match=r"none\.pem cannot be read: No such file"):
        Client("127.0.0.1:1", ClientSecurity(ca=missing))
