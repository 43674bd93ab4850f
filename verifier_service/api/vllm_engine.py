"""`vllm.grpc.engine.VllmEngine`, the service that gateways such as smg call; smg-grpc-proto has the contract."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vp

from draftwire.contract.errors import DraftwireError, InvalidArgumentError, StalledClientError
from draftwire.contract.fields import rounded
from draftwire.contract.request_id import choose_request_id
from draftwire.contract.version import VERSION
from draftwire.model.kv_cache import BLOCK_SIZE
from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb
from verifier_service.api.kv_events import KvEventHub
from verifier_service.api.model_files import ModelFiles
from verifier_service.api.request_log import Metadata
from verifier_service.api.requests import AbortedError, RequestHandler
from verifier_service.api.response_stream import Write
from verifier_service.api.statuses import status_of
from verifier_service.api.vllm_messages import ResponseWriter, read_request

SERVICE_NAME: str = vp.DESCRIPTOR.services_by_name["VllmEngine"].full_name
Context = grpc.aio.ServicerContext
# Gets the function that ends a request, when the request is submitted.
_Submitted = asyncio.Future[Callable[[], None]]
# Maximum seconds that FlushCache waits for requests, and seconds between two tries.
MAX_FLUSH_S = 600.0
FLUSH_AGAIN_S = 0.05
_NO_PROFILER = "this server has no profiler; its metrics have the phases of a step"


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Translates requests and responses of the handler, and answers gateways' questions about this server."""

    def __init__(self, handler: RequestHandler, files: ModelFiles, *, has_kv_events: bool) -> None:
        """Without `has_kv_events`, SubscribeKvEvents is refused: it shows the tokens of all clients' prompts."""
        self._handler = handler
        self._files = files
        self._events = KvEventHub(handler.watch_cache) if has_kv_events else None
        self._running: defaultdict[str, set[_Submitted]] = defaultdict(set)
        self._started = time.monotonic()
        self._last_request = 0.0  # seconds since the epoch

    # Writes through the context, as GenerationServicer does.
    async def Generate(self, request: vp.GenerateRequest, context: Context) -> None:  # noqa: N802
        """Compute one request; write chunks if the request streams, and the ends of its outputs."""
        self._last_request = time.time()
        metadata = context.invocation_metadata() or ()
        try:
            name = choose_request_id(request.request_id, metadata)
            read = read_request(request, self._handler.facts.max_model_len)
        except InvalidArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        prompt: Sequence[int] = read.token_ids.ids
        if read.truncate_prompt_tokens:
            prompt = prompt[-read.truncate_prompt_tokens :]
        writer = ResponseWriter(request, prompt)

        async def write(message: pb.GenerateResponse) -> None:
            for response in writer.write(message):
                await context.write(response)

        failure = await self._serve(read, name, metadata, write)
        if isinstance(failure, AbortedError):
            for response in writer.aborted():
                await context.write(response)
        elif failure is not None:
            await context.abort(*status_of(failure))

    async def _serve(
        self, request: pb.GenerateRequest, name: str, metadata: Metadata, write: Write
    ) -> DraftwireError | None:
        """Serve a request that Abort can end by name; as `RequestHandler.serve`."""
        submitted: _Submitted = asyncio.get_running_loop().create_future()
        self._running[name].add(submitted)
        try:
            return await self._handler.serve(request, name, metadata, write, submitted.set_result)
        finally:
            self._running[name].discard(submitted)
            if not self._running[name]:
                del self._running[name]

    async def Abort(self, request: vp.AbortRequest, context: Context) -> vp.AbortResponse:  # noqa: ARG002, N802
        """End requests by name. Unknown names are ignored, because their requests may have ended."""
        for name in request.request_ids:
            for submitted in self._running.get(name, ()):
                submitted.add_done_callback(lambda ended: ended.result()())
        return vp.AbortResponse()

    async def Embed(self, request: vp.EmbedRequest, context: Context) -> vp.EmbedResponse:  # noqa: ARG002, N802
        """Refuse, because there are no embeddings."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Embed: this server generates text and has no embeddings")

    async def StartProfile(self, request: common_pb2.StartProfileRequest, context: Context) -> None:  # noqa: ARG002, N802
        """Refuse, because there is no profiler."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"StartProfile: {_NO_PROFILER}")

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: Context) -> None:  # noqa: ARG002, N802
        """Refuse, because there is no profiler."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"StopProfile: {_NO_PROFILER}")

    async def HealthCheck(  # noqa: N802
        self,
        request: vp.HealthCheckRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> vp.HealthCheckResponse:
        """Return whether requests are accepted: the server is not draining, and the engine runs."""
        if self._handler.is_draining:
            return vp.HealthCheckResponse(healthy=False, message="draining")
        try:
            await self._handler.info()
        except DraftwireError as error:
            return vp.HealthCheckResponse(healthy=False, message=str(error))
        return vp.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(  # noqa: N802
        self,
        request: vp.GetModelInfoRequest,  # noqa: ARG002
        context: Context,
    ) -> vp.GetModelInfoResponse:
        """Describe the target."""
        info, files = await self._info(context), self._files
        return vp.GetModelInfoResponse(
            model_path=str(files.directory),
            tokenizer_path=str(files.directory) if info.has_tokenizer else "",
            served_model_name=info.target,
            is_generation=True,
            max_context_length=info.max_model_len,
            max_req_input_len=info.max_model_len - 1,
            vocab_size=info.vocab_size,
            model_type=str(files.config.get("model_type", "")),
            architectures=files.config.get("architectures") or [],
            eos_token_ids=files.eos_token_ids,
            bos_token_id=files.token_id("bos_token_id"),
            pad_token_id=files.token_id("pad_token_id"),
            default_sampling_params_json=_json_of(info.default_sampling_params),
        )

    async def GetServerInfo(  # noqa: N802
        self,
        request: vp.GetServerInfoRequest,  # noqa: ARG002
        context: Context,
    ) -> vp.GetServerInfoResponse:
        """Describe the server."""
        info = await self._info(context)
        return vp.GetServerInfoResponse(
            active_requests=info.requests_running + info.requests_waiting,
            last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",  # gateways recognise this contract by it
            data_parallel_size=1,
            kv_cache_dtype="auto",
            block_size=BLOCK_SIZE,
            model_dtype=f"torch.{info.dtype}",
            max_num_seqs=info.max_num_seqs,
        )

    async def GetLoads(self, request: vp.GetLoadsRequest, context: Context) -> vp.GetLoadsResponse:  # noqa: ARG002, N802
        """Return the load of the engine, which is one rank."""
        info = await self._info(context)
        counters = info.counters
        load = vp.SchedulerLoad(
            num_running_reqs=info.requests_running,
            num_waiting_reqs=info.requests_waiting,
            num_total_reqs=info.requests_running + info.requests_waiting,
            num_used_tokens=round(info.kv_cache_usage * info.kv_cache_tokens),
            max_total_num_tokens=info.kv_cache_tokens,
            token_usage=info.kv_cache_usage,
            gen_throughput=self._handler.tokens_per_s,
            cache_hit_rate=counters.prefix_cache_hits / max(counters.prefix_cache_queries, 1),
            utilization=info.requests_running / info.max_num_seqs,
            max_running_requests=info.max_num_seqs,
            num_waiting_uncached_tokens=info.waiting_tokens,
        )
        timestamp = datetime.now(UTC).isoformat()
        return vp.GetLoadsResponse(timestamp=timestamp, version=VERSION, dp_rank_count=1, loads=[load])

    async def GetTokenizer(  # noqa: N802
        self,
        request: common_pb2.GetTokenizerRequest,  # noqa: ARG002
        context: Context,
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Send the tokenizer's files as a zip archive."""
        try:
            chunks = await asyncio.to_thread(lambda: list(self._files.chunks()))
        except DraftwireError as error:
            await context.abort(*status_of(error))
        for chunk in chunks:
            yield chunk

    async def FlushCache(  # noqa: N802
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Forget cached prefixes; while requests use prefixes, try again for up to `timeout_s`."""
        timeout_s = request.timeout_s
        if not 0 <= timeout_s <= MAX_FLUSH_S:
            text = f"timeout_s = {timeout_s:g}: allowed range [0, {MAX_FLUSH_S:g}] s"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        deadline = time.monotonic() + timeout_s
        try:
            while (left := await self._handler.flush_cache()) and time.monotonic() < deadline:
                await asyncio.sleep(FLUSH_AGAIN_S)
        except DraftwireError as error:
            await context.abort(*status_of(error))
        message = f"{left} blocks are in use and stay" if left else "the prefix cache is empty"
        return common_pb2.FlushCacheResponse(success=left == 0, message=message)

    async def SubscribeKvEvents(  # noqa: N802
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Send a snapshot of the prefix cache's blocks, then every change."""
        if self._events is None:
            text = "SubscribeKvEvents: this server does not publish its prefix cache; start it with --kv-events"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
            return
        await context.send_initial_metadata(())
        batches = self._events.subscribe(request.start_sequence_number)
        try:
            async for batch in batches:
                yield batch
        except StalledClientError as error:
            await context.abort(*status_of(error))
        finally:
            await batches.aclose()

    async def _info(self, context: Context) -> pb.GetVerifierInfoResponse:
        try:
            return await self._handler.info()
        except DraftwireError as error:
            await context.abort(*status_of(error))
            raise  # not reached: the abort raises


def _json_of(defaults: config_pb2.SamplingParams) -> str:
    """Return default sampling parameters as a JSON object; empty without any. Gateways take none of max_tokens."""
    given = {field.name: rounded(value) for field, value in defaults.ListFields() if field.name != "max_tokens"}
    return json.dumps(given) if given else ""
