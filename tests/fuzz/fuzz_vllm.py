"""Requests of gateways to `vllm.grpc.engine.VllmEngine` with values at and past every limit."""

from __future__ import annotations

from random import Random
from typing import Any

from fuzz_requests import FLOATS, GRAMMARS, INTEGERS, OBJECTS, SIGNED, TEXTS, set_common_parameter
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vp

from models import CONTEXT, VOCAB_SIZE

SERVICE = "/vllm.grpc.engine.VllmEngine"
CONSTRAINTS = ("json_schema", "regex", "grammar", "structural_tag")


def hostile_generate(rng: Random) -> vp.GenerateRequest:
    """Return a request whose input, sampling parameters or options may have any value that protobuf can carry."""
    request = vp.GenerateRequest(stream=rng.random() < 0.5)
    request.tokenized.input_ids.extend(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.choice((1, 3, 20))))
    params = request.sampling_params
    params.max_tokens, params.temperature = rng.choice((1, 2, 4)), rng.choice((0.0, 0.7, 1.0))
    for field in rng.sample(list(vp.SamplingParams.DESCRIPTOR.fields), rng.choice((0, 1, 1, 2, 5))):
        _set_parameter(rng, params, field)
    if rng.random() < 0.3:
        _set_input(rng, request)
    if rng.random() < 0.1:
        request.request_id = rng.choice(TEXTS)[:200]
    if rng.random() < 0.1:
        request.data_parallel_rank = rng.choice(SIGNED)
    if rng.random() < 0.1:
        _set_unsupported(rng, request)
    return request


def _set_input(rng: Random, request: vp.GenerateRequest) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        request.ClearField("input")
    elif kind == 1:
        request.tokenized.input_ids[:] = [rng.choice(INTEGERS) for _ in range(rng.randrange(4))]
    elif kind == 2:
        request.tokenized.input_ids[:] = [5] * rng.choice((CONTEXT - 1, CONTEXT, CONTEXT + 1, 20_000))
    else:
        request.text = rng.choice(TEXTS) * rng.choice((1, 1, CONTEXT * 8))


def _set_unsupported(rng: Random, request: vp.GenerateRequest) -> None:
    name = rng.choice(("kv_transfer_params", "mm_inputs", "media_refs", "extra_mm_inputs", "kv_transfer_params_json"))
    if name == "extra_mm_inputs":
        request.extra_mm_inputs.add()
    elif name == "kv_transfer_params_json":
        request.kv_transfer_params_json = rng.choice(OBJECTS)
    else:
        getattr(request, name).SetInParent()


def _set_parameter(rng: Random, params: vp.SamplingParams, field: Any) -> None:
    name = field.name
    if name == "logit_bias":
        for _ in range(rng.choice((1, 3, 1024, 1025))):
            params.logit_bias[rng.choice((*SIGNED, *range(VOCAB_SIZE)))] = rng.choice(FLOATS)
    elif name == "choice":
        params.choice.choices.extend(rng.choice(TEXTS) for _ in range(rng.choice((0, 1, 3, 1025))))
    elif name in CONSTRAINTS:
        setattr(params, name, rng.choice((*GRAMMARS[name], *OBJECTS, *TEXTS)))
    else:
        set_common_parameter(rng, params, field)


def methods() -> list[tuple[str, list[bytes], bool]]:
    """Return (path, valid messages, whether requests are a stream) of the service's methods."""
    params = vp.SamplingParams(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, frequency_penalty=0.1, presence_penalty=0.1,
        repetition_penalty=1.1, max_tokens=3, min_tokens=1, stop=["end", "é"], stop_token_ids=[9], ignore_eos=True,
        skip_special_tokens=True, n=2, logprobs=3, prompt_logprobs=2, seed=7, include_stop_str_in_output=True,
        logit_bias={5: 1.0, 6: -1.0}, truncate_prompt_tokens=9, regex="[a-z ]*",
    )  # fmt: skip
    tokens = vp.TokenizedInput(original_text="The river", input_ids=[5, 6, 7])
    few = vp.SamplingParams(temperature=0, max_tokens=2)
    generate = [
        vp.GenerateRequest(request_id="seed", tokenized=tokens, sampling_params=params, stream=True),
        vp.GenerateRequest(text="The river bends", sampling_params=few, data_parallel_rank=0),
    ]
    messages: dict[str, list[bytes]] = {
        "Generate": [one.SerializeToString() for one in generate],
        "Abort": [vp.AbortRequest(request_ids=["seed", "none"]).SerializeToString()],
        "GetLoads": [vp.GetLoadsRequest(dp_rank=0, include=["all"]).SerializeToString()],
        "SubscribeKvEvents": [common_pb2.SubscribeKvEventsRequest(start_sequence_number=1).SerializeToString()],
        "FlushCache": [common_pb2.FlushCacheRequest(timeout_s=-1).SerializeToString()],
    }
    others = ("Embed", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetTokenizer", "StartProfile", "StopProfile")
    messages |= {name: [b""] for name in others}
    names = ("Generate", "Generate", *messages)
    return [(f"{SERVICE}/{name}", messages[name], False) for name in names]
