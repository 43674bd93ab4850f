"""Draftwire's service `draftwire.v1.Generation`."""

from __future__ import annotations

import grpc

from draftwire.contract.errors import DraftwireError, InvalidArgumentError
from draftwire.contract.request_id import REQUEST_ID_KEY, choose_request_id
from draftwire.v1 import generate_pb2, generate_pb2_grpc
from verifier_service.api.requests import RequestHandler
from verifier_service.api.statuses import status_of

SERVICE_NAME = generate_pb2.DESCRIPTOR.services_by_name["Generation"].full_name


class GenerationServicer(generate_pb2_grpc.GenerationServicer):
    """Passes requests to the handler, whose requests and responses are those of this service."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    # Writes through the context, where slow clients can be detected, and therefore is not an iterator.
    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: generate_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """See proto/draftwire/v1/generate.proto."""
        metadata = context.invocation_metadata() or ()
        try:
            name = choose_request_id(request.request_id, metadata)
        except InvalidArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await context.send_initial_metadata(((REQUEST_ID_KEY, name),))
        failure = await self._handler.serve(request, name, metadata, context.write)
        if failure is not None:
            # The abort may wait until the client has read all sent messages, so this frame must not hold the request.
            await context.abort(*status_of(failure))

    async def Tokenize(  # noqa: N802
        self, request: generate_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generate_pb2.TokenizeResponse:
        """See proto/draftwire/v1/generate.proto."""
        try:
            return await self._handler.tokenize(request)
        except DraftwireError as error:
            await context.abort(*status_of(error))

    async def Detokenize(  # noqa: N802
        self, request: generate_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generate_pb2.DetokenizeResponse:
        """See proto/draftwire/v1/generate.proto."""
        try:
            return await self._handler.detokenize(request)
        except DraftwireError as error:
            await context.abort(*status_of(error))

    async def GetVerifierInfo(  # noqa: N802
        self,
        request: generate_pb2.GetVerifierInfoRequest,  # noqa: ARG002
        context: grpc.aio.ServicerContext,
    ) -> generate_pb2.GetVerifierInfoResponse:
        """See proto/draftwire/v1/generate.proto."""
        try:
            return await self._handler.info()
        except DraftwireError as error:
            await context.abort(*status_of(error))
