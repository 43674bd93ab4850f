"""Conversion of requests and responses between vllm.grpc.engine and draftwire.v1."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vp

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.validation import resolve_sampling_params
from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb
from verifier_service.api.vllm_messages import ResponseWriter, read_request

CONTEXT = 64
PROMPT = [3, 1, 4]
STATISTICS = pb.RequestStatistics(
    prompt_tokens=3, output_tokens=5, prefix_hit_tokens=2, drafted=[4, 3, 2], accepted=[3, 1, 0]
)


def request(ids: list[int] | None = None, *, stream: bool = False, **params: Any) -> vp.GenerateRequest:
    tokenized = vp.TokenizedInput(input_ids=[3, 1, 4] if ids is None else ids)
    return vp.GenerateRequest(tokenized=tokenized, sampling_params=vp.SamplingParams(**params), stream=stream)


def read_params(**params: Any) -> config_pb2.SamplingParams:
    return read_request(request(**params), CONTEXT).sampling_params


def test_a_seed_of_minus_one_is_none():
    assert not read_params(seed=-1).HasField("seed")


def test_unset_parameters_are_vllms_defaults():
    params = resolve_sampling_params(read_params())
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1, 0, 0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1, 0, 0)
    assert params.max_tokens == 2**31 - 1  # limited by the context
    assert not any(params.HasField(name) for name in ("seed", "logprobs", "structured_output"))
    assert not read_request(request(), CONTEXT).HasField("truncate_prompt_tokens")
    assert read_params(temperature=0.0).HasField("temperature")


def test_every_sampling_parameter_is_read():
    given = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 7,
        "min_p": 0.25,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "logprobs": 3,
        "seed": -4,
        "logit_bias": {6: 1.5},
        "skip_special_tokens": True,
    }
    params = read_params(**given, include_stop_str_in_output=True)
    assert params.include_stop_text
    for name, value in given.items():
        read = getattr(params, name)
        assert (dict(read) if name == "logit_bias" else list(read) if name.startswith("stop") else read) == value, name


@pytest.mark.parametrize(("given", "kept"), [(2, 2), (900, 900), (-1, CONTEXT - 1)])
def test_truncation_to_the_context_leaves_room_for_a_token(given: int, kept: int):
    assert read_request(request(truncate_prompt_tokens=given), CONTEXT).truncate_prompt_tokens == kept


def test_prompts_and_the_number_of_outputs_are_read():
    assert read_request(vp.GenerateRequest(text="ab", data_parallel_rank=0), CONTEXT).text == "ab"
    assert [read_request(request(n=given), CONTEXT).n for given in (0, 1, 3)] == [1, 1, 3]


def test_an_empty_list_of_tokens_is_left_to_the_contract():
    read = read_request(request([]), CONTEXT)
    assert read.WhichOneof("prompt") is None or not read.token_ids.ids


def text_with_prompt_logprobs() -> vp.GenerateRequest:
    return vp.GenerateRequest(text="a", sampling_params=vp.SamplingParams(prompt_logprobs=1))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (vp.GenerateRequest(), "input"),
        (vp.GenerateRequest(data_parallel_rank=1, text="a"), "data_parallel_rank"),
        (vp.GenerateRequest(data_parallel_rank=-1, text="a"), "data_parallel_rank"),
        (vp.GenerateRequest(mm_inputs=vp.MultimodalInputs(), text="a"), "mm_inputs"),
        (vp.GenerateRequest(extra_mm_inputs=[vp.MultimodalInputs()], text="a"), "extra_mm_inputs"),
        (vp.GenerateRequest(media_refs=vp.MediaRefs(), text="a"), "media_refs"),
        (vp.GenerateRequest(kv_transfer_params=vp.KvTransferParams(), text="a"), "kv_transfer_params"),
        (vp.GenerateRequest(kv_transfer_params_json="{}", text="a"), "kv_transfer_params_json"),
        (request(logprobs=-1), "sampling_params.logprobs"),
        (request(prompt_logprobs=-1), "sampling_params.prompt_logprobs"),
        (text_with_prompt_logprobs(), "sampling_params.prompt_logprobs"),
        (request(logit_bias={-1: 1.0}), "sampling_params.logit_bias"),
        (request(truncate_prompt_tokens=0), "sampling_params.truncate_prompt_tokens"),
        (request(truncate_prompt_tokens=-2), "sampling_params.truncate_prompt_tokens"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given: vp.GenerateRequest, field: str):
    with pytest.raises(InvalidArgumentError) as refused:
        read_request(given, CONTEXT)
    assert refused.value.field == field


def outputs(*, logprobs: bool = False) -> list[pb.GenerateResponse]:
    def piece(ids: list[int]) -> pb.GenerateResponse:
        given = [pb.TokenLogprobs(logprob=-one, rank=1, top_ids=[one, 9], top_logprobs=[-one, -7]) for one in ids]
        return pb.GenerateResponse(token_ids=ids, logprobs=given if logprobs else [])

    last = piece([5])
    last.MergeFrom(pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, statistics=STATISTICS, stop_token_id=5))
    return [piece([1, 2]), pb.GenerateResponse(text="held back"), piece([3, 4]), last]


def written(given: vp.GenerateRequest, **kinds: bool) -> list[vp.GenerateResponse]:
    writer = ResponseWriter(given, PROMPT)
    return [response for message in outputs(**kinds) for response in writer.write(message)]


def test_a_stream_gets_chunks_and_then_its_end():
    *chunks, last = written(request(stream=True))
    assert [list(one.chunk.token_ids) for one in chunks] == [[1, 2], [3, 4], [5]]
    assert [one.chunk.completion_tokens for one in chunks] == [2, 2, 1]
    assert {one.chunk.prompt_tokens for one in chunks} == {3}
    assert list(last.complete.output_ids) == [1, 2, 3, 4, 5]


def test_without_a_stream_there_is_one_response():
    (only,) = written(request())
    complete = only.complete
    assert list(complete.output_ids) == [1, 2, 3, 4, 5]
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", 5)
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 5, 2)
    assert (complete.spec_accepted_tokens, complete.spec_draft_tokens) == (4, 9)


def test_the_stop_text_and_the_length_are_described():
    stop = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, stop_text="ab", statistics=STATISTICS)
    (message,) = ResponseWriter(request(), PROMPT).write(stop)
    assert (message.complete.finish_reason, message.complete.matched_stop_str) == ("stop", "ab")
    length = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_LENGTH, statistics=STATISTICS)
    (message,) = ResponseWriter(request(), PROMPT).write(length)
    assert message.complete.finish_reason == "length"
    assert message.complete.WhichOneof("matched_stop") is None


def test_logprobs_of_a_stream_are_in_its_chunks():
    *chunks, last = written(request(stream=True, logprobs=2), logprobs=True)
    assert [list(one.chunk.output_logprobs.token_ids) for one in chunks] == [[1, 2], [3, 4], [5]]
    assert list(chunks[0].chunk.output_logprobs.token_logprobs) == [-1, -2]
    assert list(chunks[0].chunk.output_logprobs.top_logprobs[1].token_ids) == [2, 9]
    assert list(chunks[0].chunk.output_logprobs.top_logprobs[1].values) == [-2, -7]
    assert not last.complete.HasField("output_logprobs")


@pytest.mark.parametrize(("top", "num_top_lists"), [(2, 5), (0, 0)])
def test_logprobs_without_a_stream_are_all_in_its_end(top: int, num_top_lists: int):
    (only,) = written(request(logprobs=top), logprobs=True)
    assert list(only.complete.output_logprobs.token_ids) == [1, 2, 3, 4, 5]
    assert list(only.complete.output_logprobs.token_logprobs) == [-1, -2, -3, -4, -5]
    assert len(only.complete.output_logprobs.top_logprobs) == num_top_lists


def test_an_aborted_request_ends_with_its_tokens():
    writer = ResponseWriter(request(), PROMPT)
    writer.write(outputs()[0])
    (only,) = writer.aborted()
    complete = only.complete
    assert (complete.finish_reason, list(complete.output_ids), complete.completion_tokens) == ("abort", [1, 2], 2)


def test_each_output_has_its_own_chunks_and_end():
    writer = ResponseWriter(request(stream=True, n=2), PROMPT)
    responses = [
        response for index in (0, 1) for response in writer.write(pb.GenerateResponse(token_ids=[5], index=index))
    ]
    last = pb.GenerateResponse(
        index=1, token_ids=[6], finish_reason=pb.FINISH_REASON_LENGTH, statistics=pb.RequestStatistics(output_tokens=2)
    )
    responses += writer.write(last)
    assert [one.chunk.index for one in responses[:3]] == [0, 1, 1]
    assert (responses[3].complete.index, list(responses[3].complete.output_ids)) == (1, [5, 6])
    (ended,) = writer.aborted()  # the other output continues
    assert (ended.complete.index, list(ended.complete.output_ids)) == (0, [5])


def test_an_unchecked_number_of_outputs_takes_no_memory():
    given = request(n=1_000_000)
    tracemalloc.start()
    ResponseWriter(given, PROMPT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_ends_without_a_stream_are_in_the_order_of_indices():
    writer = ResponseWriter(request(n=3), PROMPT)
    for index in (2, 0):
        ended = pb.GenerateResponse(index=index, token_ids=[index], finish_reason=pb.FINISH_REASON_LENGTH)
        assert writer.write(ended) == []
    assert writer.write(pb.GenerateResponse(index=1, token_ids=[1])) == []
    assert [one.complete.index for one in writer.write(pb.GenerateResponse(index=1, finish_reason=1))] == [0, 1, 2]
    assert writer.aborted() == []


def prompt_logprobs() -> list[pb.GenerateResponse]:
    """Return log probabilities of the second and third token, in two messages."""
    pieces = [
        pb.TokenLogprobs(logprob=-token, token_id=token, top_ids=[token, 9], top_logprobs=[-token, -9])
        for token in (1, 4)
    ]
    return [pb.GenerateResponse(prompt_logprobs=[piece]) for piece in pieces]


@pytest.mark.parametrize("top", [0, 2])
def test_log_probabilities_of_the_prompt_are_in_the_first_chunk(top: int):
    writer = ResponseWriter(request(stream=True, prompt_logprobs=top), PROMPT)
    assert [writer.write(message) for message in prompt_logprobs()] == [[], []]
    *chunks, last = [response for message in outputs() for response in writer.write(message)]
    given = chunks[0].chunk.input_logprobs
    assert list(given.token_ids) == PROMPT
    assert [one.value for one in given.token_logprobs] == [0, -1, -4]
    assert [one.HasField("value") for one in given.token_logprobs] == [False, True, True]
    assert [list(one.token_ids) for one in given.top_logprobs] == ([[], [1, 9], [4, 9]] if top else [])
    assert not any(one.chunk.HasField("input_logprobs") for one in chunks[1:])
    assert not last.complete.HasField("input_logprobs")


def test_the_only_token_of_a_prompt_has_no_log_probability():
    writer = ResponseWriter(request(prompt_logprobs=1), PROMPT[:1])
    (only,) = [response for message in outputs() for response in writer.write(message)]
    assert list(only.complete.input_logprobs.token_ids) == PROMPT[:1]
    assert [one.HasField("value") for one in only.complete.input_logprobs.token_logprobs] == [False]


def test_log_probabilities_of_the_prompt_without_a_stream():
    writer = ResponseWriter(request(prompt_logprobs=0), PROMPT)
    (only,) = [response for message in [*prompt_logprobs(), *outputs()] for response in writer.write(message)]
    assert list(only.complete.input_logprobs.token_ids) == PROMPT
    assert len(only.complete.input_logprobs.token_logprobs) == 3


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("json_schema", "{}"),
        ("regex", "a+"),
        ("grammar", "root ::= 'a'"),
        ("structural_tag", '{"structures": [], "triggers": []}'),
        ("json_object", True),
    ],
)
def test_structured_output_is_read(name: str, given: Any):
    read = read_params(**{name: given}).structured_output
    assert (read.WhichOneof("kind"), getattr(read, name)) == (name, given)


def test_a_choice_is_read():
    read = read_params(choice=vp.ChoiceConstraint(choices=["yes", "no"])).structured_output
    assert list(read.choice.values) == ["yes", "no"]
