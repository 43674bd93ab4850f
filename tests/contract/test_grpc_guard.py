"""`GuardedServer` survives invalid method names, and gRPC's private base class is the tested one."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path

import grpc
from grpc._cython import cygrpc
from half_sent import HalfSender

from draftwire.server.grpc_guard import GuardedServer
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1 import generate_pb2_grpc

# Of grpcio 1.85.3. If this set differs, review `_server_main_loop`: it decodes names and calls `_request_call`.
METHODS = {
    "_make_request_call_future",
    "_request_call",
    "_request_registered_call",
    "_server_main_loop",
    "_serving_task_crash_handler",
    "_start_shutting_down",
    "add_generic_rpc_handlers",
    "add_insecure_port",
    "add_registered_method_handlers",
    "add_secure_port",
    "is_running",
    "shutdown",
    "start",
    "wait_for_termination",
}


class Servicer(generate_pb2_grpc.GenerationServicer):
    async def GetVerifierInfo(self, request, context):  # noqa: N802, ARG002
        return pb.GetVerifierInfoResponse(version="here")


def test_a_method_name_that_is_not_utf8_stops_nothing():
    async def run() -> None:
        server = GuardedServer()
        generate_pb2_grpc.add_GenerationServicer_to_server(Servicer(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        for path in ("/draftwire.v1.Generation/\udcff\udcfe", "/\udc80", "/draftwire.v1.Generation/Nothing"):
            async with HalfSender(address) as client:
                await client.begin(path)
                await client.wait_for_ends(1, 100)
                assert not client.dropped
        async with grpc.aio.insecure_channel(address) as channel:
            info = await generate_pb2_grpc.GenerationStub(channel).GetVerifierInfo(pb.GetVerifierInfoRequest())
            assert info.version == "here"
        await server.stop(None)

    asyncio.run(run())


def test_the_private_class_is_the_one_that_was_tested():
    public = {name for name in dir(cygrpc.AioServer) if not name.startswith("__")}
    assert public == METHODS


def test_grpcio_is_of_the_version_that_is_fixed():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"grpcio=={grpc.__version__}" in project["dependencies"]
