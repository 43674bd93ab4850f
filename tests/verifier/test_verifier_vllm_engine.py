"""The calls of gateways to vllm.grpc.engine.VllmEngine, over a tiny target."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from service_scene import MAX_TOKENS, Served, error_of, outputs_of, play, served, tokens_of
from service_scene import request as own_request
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vp
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from draftwire.contract.validation import build_sampling_params
from draftwire.v1.generate_pb2_grpc import GenerationStub
from verifier_service.api.preparation import RequestRules
from verifier_service.core.request import Request

# Output tokens that take the tiny target a while.
LONG = 240
# Requests that a test aborts until one has not ended before.
TRIES = 5


def request(*, stream: bool = True, name: str = "", **params: Any) -> vp.GenerateRequest:
    given = {"max_tokens": MAX_TOKENS, "temperature": 0.0, **params}
    return vp.GenerateRequest(
        request_id=name,
        tokenized=vp.TokenizedInput(input_ids=[3, 1, 4]),
        sampling_params=vp.SamplingParams(**given),
        stream=stream,
    )


@asynccontextmanager
async def calling(scene: Served) -> AsyncIterator[tuple[VllmEngineStub, GenerationStub]]:
    async with scene.serve() as address, grpc.aio.insecure_channel(address) as channel:
        yield VllmEngineStub(channel), GenerationStub(channel)


async def read_all(call: Any) -> list[vp.GenerateResponse]:
    return [response async for response in call]


@pytest.mark.parametrize("behind_socket", [False, True])
@play
async def test_tokens_are_those_of_the_own_service(behind_socket):
    async with calling(served(behind_socket=behind_socket)) as (stub, own):
        expected = tokens_of(await outputs_of(own.Generate(own_request())))
        *chunks, last = await read_all(stub.Generate(request()))
        assert [token for one in chunks for token in one.chunk.token_ids] == expected
        assert list(last.complete.output_ids) == expected
        (only,) = await read_all(stub.Generate(request(stream=False)))
        assert list(only.complete.output_ids) == expected
        assert (only.complete.finish_reason, only.complete.completion_tokens) == ("length", MAX_TOKENS)


@play
async def test_a_seed_gives_the_same_tokens_to_both_services():
    async with calling(served(behind_socket=False)) as (stub, own):
        params = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
        expected = tokens_of(await outputs_of(own.Generate(own_request(**params))))
        (only,) = await read_all(stub.Generate(request(stream=False, **params)))
        assert list(only.complete.output_ids) == expected


async def abort_one(scene: Served, caller: VllmEngineStub, stub: VllmEngineStub, num_tokens: int) -> None:
    """Abort requests of `caller` after so many tokens, until one has not ended before."""
    for _ in range(TRIES):
        call = caller.Generate(request(name="one", max_tokens=LONG, logprobs=15))
        first = await call.read()
        while any(stream.num_tokens < num_tokens for stream in scene.handler.open_outputs):
            await asyncio.sleep(0.01)
        await stub.Abort(vp.AbortRequest(request_ids=["one", "unknown"]))
        *chunks, last = [first, *await outputs_of(call)]
        assert list(last.complete.output_ids) == [token for one in chunks for token in one.chunk.token_ids]
        await scene.until_idle()
        assert scene.host.engine.kv_cache_usage == 0
        if last.complete.finish_reason == "abort":
            return
        assert last.complete.finish_reason == "length"
    pytest.fail("no request was aborted")


@play
async def test_abort_ends_a_request_and_frees_its_place():
    scene = served(behind_socket=False)
    async with calling(scene) as (stub, _):
        await abort_one(scene, stub, stub, 1)


@play
async def test_abort_ends_a_request_whose_client_does_not_read():
    """The request's slot is free at once; the client gets the last message when it reads."""
    scene = served(behind_socket=False)
    # A window of constant size that a few messages fill.
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with calling(scene) as (stub, _), grpc.aio.insecure_channel(scene.address, window) as slow:
        await abort_one(scene, VllmEngineStub(slow), stub, MAX_TOKENS // 2)


@pytest.mark.parametrize("is_async", [False, True])
@play
async def test_dropped_streams_are_in_one_more_step_at_most(is_async, monkeypatch):
    """The engine counts a step when it begins, so a step that runs at the time of the cancel is already counted."""
    scene = served(behind_socket=False, is_async=is_async)
    engine = scene.host.engine
    cancel, steps_when_cancelled = engine.cancel, []

    def note_and_cancel(cancelled: Request, *given: Any) -> None:
        steps_when_cancelled.append(engine.counters().steps)
        cancel(cancelled, *given)

    monkeypatch.setattr(engine, "cancel", note_and_cancel)
    async with calling(scene) as (stub, _):
        calls = [stub.Generate(request(max_tokens=LONG)) for _ in range(2)]
        for call in calls:
            await call.read()
        for call in calls:
            call.cancel()
        await scene.until_idle()
        assert len(steps_when_cancelled) == 2
        assert engine.counters().steps <= steps_when_cancelled[-1] + 1 < LONG
        assert engine.kv_cache_usage == 0


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        (lambda stub: stub.Generate(request(temperature=-1.0)).read(), "INVALID_ARGUMENT", "sampling_params.temp"),
        (lambda stub: stub.Generate(request(stop=["a"])).read(), "INVALID_ARGUMENT", "this server has no tokenizer"),
        (lambda stub: stub.Generate(vp.GenerateRequest()).read(), "INVALID_ARGUMENT", "input = None"),
        (lambda stub: stub.Generate(request(name="a b")).read(), "INVALID_ARGUMENT", "request_id"),
        (
            lambda stub: stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=-1)),
            "INVALID_ARGUMENT",
            "allowed range [0, 600] s",
        ),
        (lambda stub: stub.Embed(vp.EmbedRequest()), "UNIMPLEMENTED", "Embed: this server"),
        (lambda stub: stub.StartProfile(common_pb2.StartProfileRequest()), "UNIMPLEMENTED", "StartProfile: this"),
        (lambda stub: stub.StopProfile(common_pb2.StopProfileRequest()), "UNIMPLEMENTED", "StopProfile: this server"),
    ],
)
@play
async def test_what_is_not_served_has_a_status(call, code, text):
    async with calling(served(behind_socket=False)) as (stub, _):
        found, details = await error_of(call(stub))
        assert found.name == code
        assert text in details


@play
async def test_model_and_server_are_described_and_the_tokenizer_comes(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["A"], "eos_token_id": 7})
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    (tmp_path / "tokenizer.json").write_text("{}")
    scene = served(behind_socket=False, directory=tmp_path)
    # The defaults of --generation-config, which may be another file.
    scene.rules = RequestRules(default_sampling_params=build_sampling_params(top_p=0.9, max_tokens=7))
    async with calling(scene) as (stub, _):
        model = await stub.GetModelInfo(vp.GetModelInfoRequest())
        assert (model.served_model_name, model.model_path, model.model_type) == ("tiny", str(tmp_path), "llama")
        assert (model.max_context_length, model.vocab_size, model.max_req_input_len) == (64, 20, 63)
        assert (list(model.architectures), list(model.eos_token_ids), model.is_generation) == (["A"], [7], True)
        assert json.loads(model.default_sampling_params_json) == {"top_p": 0.9}
        assert (model.tokenizer_path, model.supports_vision) == ("", False)
        server = await stub.GetServerInfo(vp.GetServerInfoRequest())
        assert (server.server_type, server.data_parallel_size, server.max_num_seqs) == ("vllm-grpc", 1, 2)
        assert (server.block_size, server.model_dtype, server.active_requests) == (16, "torch.float32", 0)
        assert (await stub.HealthCheck(vp.HealthCheckRequest())).healthy
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        assert chunks[-1].sha256 == hashlib.sha256(b"".join(chunk.data for chunk in chunks)).hexdigest()


@play
async def test_without_sampling_defaults_none_are_shown(tmp_path):
    """This is the case with --generation-config none."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    async with calling(served(behind_socket=False, directory=tmp_path)) as (stub, _):
        assert (await stub.GetModelInfo(vp.GetModelInfoRequest())).default_sampling_params_json == ""


@play
async def test_loads_are_those_of_the_engine():
    scene = served(behind_socket=False)
    async with calling(scene) as (stub, _):
        (idle,) = (await stub.GetLoads(vp.GetLoadsRequest())).loads
        assert (idle.num_running_reqs, idle.num_waiting_reqs, idle.token_usage, idle.gen_throughput) == (0, 0, 0, 0)
        assert (idle.max_total_num_tokens, idle.max_running_requests, idle.num_used_tokens) == (32 * 16, 2, 0)
        await read_all(stub.Generate(request()))
        await read_all(stub.Generate(request()))
        await scene.until_idle()
        answer = await stub.GetLoads(vp.GetLoadsRequest())
        assert answer.loads[0].gen_throughput > 0
        assert answer.loads[0].token_usage == 0
        assert (answer.dp_rank_count, len(answer.loads)) == (1, 1)


@play
async def test_a_draining_server_says_so_and_takes_nothing():
    scene = served(behind_socket=False)
    async with calling(scene) as (stub, _):
        await scene.handler.drain(1.0)
        health = await stub.HealthCheck(vp.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, "draining")
        code, _ = await error_of(stub.Generate(request()).read())
        assert code == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("behind_socket", [False, True])
@play
async def test_events_say_what_a_prompt_leaves_and_a_flush_drops(behind_socket):
    scene = served(behind_socket=behind_socket)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5, 0]
    async with calling(scene) as (stub, _):
        given = request(max_tokens=2, stream=False)
        given.tokenized.input_ids[:] = prompt
        await read_all(stub.Generate(given))  # without a subscriber, these blocks are not recorded
        events = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        assert (await events.read()).snapshot.count == 1
        (only,) = await read_all(stub.Generate(given))
        blocks: list[common_pb2.KvBlock] = []
        while len(blocks) < 2:
            blocks += [block for event in (await events.read()).events for block in event.stored.blocks]
        assert [list(block.token_ids) for block in blocks] == [prompt[:16], prompt[16:32]]
        (only,) = await read_all(stub.Generate(given))
        assert only.complete.cached_tokens == 32
        flushed = await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=60))
        assert flushed.success
        removed: set[int] = set()
        while len(removed) < 2:
            removed |= {one for event in (await events.read()).events for one in event.removed.block_hashes}
        assert removed == {block.block_hash for block in blocks}
        (only,) = await read_all(stub.Generate(given))
        assert only.complete.cached_tokens == 0
        events.cancel()


@play
async def test_events_need_the_option():
    scene = served(behind_socket=False)
    scene.has_kv_events = False
    async with calling(scene) as (stub, _):
        code, details = await error_of(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read())
        assert code == grpc.StatusCode.UNIMPLEMENTED
        assert "--kv-events" in details


@play
async def test_several_outputs_and_the_prompt_s_log_probabilities():
    async with calling(served(behind_socket=False)) as (stub, _):
        params = {"n": 2, "prompt_logprobs": 1, "max_tokens": 3, "temperature": 1.0, "seed": 1}
        answers = [one.complete for one in await read_all(stub.Generate(request(stream=False, **params)))]
        assert sorted(one.index for one in answers) == [0, 1]
        assert all(one.completion_tokens == 3 for one in answers)
        assert list(answers[0].input_logprobs.token_ids) == [3, 1, 4]
        assert len(answers[0].input_logprobs.token_logprobs) == 3
