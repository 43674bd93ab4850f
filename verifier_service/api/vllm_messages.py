"""Translate requests of `vllm.grpc.engine` to draftwire.v1, and responses back.

Zero means unset for the same fields as in vLLM's contract. Requests for unsupported features are refused by field.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from smg_grpc_proto.generated import vllm_engine_pb2 as vp

from draftwire.contract.errors import Described, InvalidArgumentError
from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb

# Fields that are refused when set, with the reason.
_NOT_SERVED = {
    "kv_transfer_params": "prefill and decode are not split over servers here",
    "kv_transfer_params_json": "prefill and decode are not split over servers here",
    "mm_inputs": "this server takes only text",
    "extra_mm_inputs": "this server takes only text",
    "media_refs": "this server takes only text",
}
_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_ABORTED = "abort"  # a further finish reason
# Without max_tokens the output ends with the context.
_NO_LIMIT = 2**31 - 1
_ALL = -1  # value of truncate_prompt_tokens
_NO_SEED = -1


def read_request(request: vp.GenerateRequest, max_model_len: int) -> pb.GenerateRequest:
    """Return the request in draftwire.v1; the contract's limits are checked later.

    Args:
        request: A `vllm.grpc.engine.GenerateRequest`.
        max_model_len: Positions of the context; `truncate_prompt_tokens` -1 keeps one fewer.

    Raises:
        InvalidArgumentError: If a field is not supported or invalid.
    """
    for name, allowed in _NOT_SERVED.items():
        field = getattr(request, name)
        if len(field) > 0 if name == "extra_mm_inputs" else request.HasField(name):
            raise InvalidArgumentError(name, Described("set"), allowed)
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        allowed = "allowed: 0, or unset; this server is one rank"
        raise InvalidArgumentError("data_parallel_rank", request.data_parallel_rank, allowed)
    read = pb.GenerateRequest(sampling_params=_read_params(request.sampling_params), n=request.sampling_params.n or 1)
    kind = request.WhichOneof("input")
    if kind == "tokenized":
        read.token_ids.ids.extend(request.tokenized.input_ids)
    elif kind == "text":
        if request.sampling_params.HasField("prompt_logprobs"):
            given = request.sampling_params.prompt_logprobs
            allowed = "allowed only with tokenized input"
            raise InvalidArgumentError("sampling_params.prompt_logprobs", given, allowed)
        read.text = request.text
    else:
        raise InvalidArgumentError("input", None, "exactly one of tokenized and text is required")
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        given = request.sampling_params.truncate_prompt_tokens
        if given < 1 and given != _ALL:
            allowed = "allowed: -1 for as many as fit into the context, or [1, 2147483648)"
            raise InvalidArgumentError("sampling_params.truncate_prompt_tokens", given, allowed)
        read.truncate_prompt_tokens = max_model_len - 1 if given == _ALL else given
    return read


def _read_params(given: vp.SamplingParams) -> config_pb2.SamplingParams:
    for token_id in given.logit_bias:
        if token_id < 0:
            raise InvalidArgumentError("sampling_params.logit_bias", token_id, "token ids must be at least 0")
    params = config_pb2.SamplingParams(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_p=given.top_p or 1.0,
        top_k=given.top_k,
        min_p=given.min_p,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty or 1.0,
        max_tokens=given.max_tokens if given.HasField("max_tokens") else _NO_LIMIT,
        min_tokens=given.min_tokens,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        skip_special_tokens=given.skip_special_tokens,
        include_stop_text=given.include_stop_str_in_output,
        logit_bias={int(token_id): float(bias) for token_id, bias in given.logit_bias.items()},
    )
    if given.HasField("seed") and given.seed != _NO_SEED:
        params.seed = given.seed
    for name in ("logprobs", "prompt_logprobs"):
        if given.HasField(name):
            value = getattr(given, name)
            if value < 0:
                raise InvalidArgumentError(f"sampling_params.{name}", value, "allowed range [0, 20]")
            setattr(params, name, value)
    constraint = given.WhichOneof("constraint")
    if constraint == "choice":
        params.structured_output.choice.values.extend(given.choice.choices)
    elif constraint is not None:
        setattr(params.structured_output, constraint, getattr(given, constraint))
    return params


@dataclass
class _Output:
    """The state of one output of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    has_chunk: bool = False
    has_ended: bool = False


class ResponseWriter:
    """Translates the responses of one request.

    A stream gets a chunk for each response with tokens and a `complete` for each output. A request without a stream
    gets only the `complete`s, in the order of their indices, because smg numbers them by arrival. `complete` has all
    tokens of its output. In a stream the chunks have the log probabilities; those of the prompt are in the first chunk
    of each output.
    """

    def __init__(self, request: vp.GenerateRequest, prompt: Sequence[int]) -> None:
        """`prompt` has the prompt's tokens; empty if the prompt is text."""
        params = request.sampling_params
        self._is_stream = bool(request.stream)
        self._has_top, self._has_prompt_top = params.logprobs > 0, params.prompt_logprobs > 0
        self._num_prompt = len(prompt)
        self._input: vp.InputLogProbs | None = None  # log probabilities of the prompt; the first token has none
        if params.HasField("prompt_logprobs"):
            self._input = vp.InputLogProbs(token_ids=prompt[:1], token_logprobs=[vp.InputTokenLogProb()])
            if self._has_prompt_top:
                self._input.top_logprobs.add()
        self._num_outputs: int = params.n or 1  # not checked yet, so nothing is allocated for it
        self._outputs: defaultdict[int, _Output] = defaultdict(_Output)  # by index
        self._held: dict[int, vp.GenerateComplete] = {}  # ends of outputs, until all have ended

    def write(self, message: pb.GenerateResponse) -> Iterable[vp.GenerateResponse]:
        """Return the translation of a response of draftwire.v1: any number of responses, in order."""
        output = self._outputs[message.index]
        output.token_ids += message.token_ids
        if self._input is not None:
            self._add_prompt_logprobs(self._input, message.prompt_logprobs)
        output.has_ended = message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        if self._is_stream:
            chunks = [vp.GenerateResponse(chunk=self._chunk(message, output))] if message.token_ids else []
            ends = [vp.GenerateResponse(complete=self._complete(message, output))] if output.has_ended else []
            return chunks + ends
        output.logprobs += message.logprobs
        if output.has_ended:
            self._held[message.index] = self._complete(message, output)
            if len(self._held) == self._num_outputs:
                return self._ends()
        return []

    def _ends(self) -> Iterator[vp.GenerateResponse]:
        """Yield the ends of all outputs one by one: the log probabilities of a long prompt are large."""
        for _, complete in sorted(self._held.items()):
            response = vp.GenerateResponse(complete=complete)
            if self._input is not None and complete.finish_reason != _ABORTED:
                response.complete.input_logprobs.CopyFrom(self._input)
            yield response

    def aborted(self) -> Iterable[vp.GenerateResponse]:
        """Return the ends of the outputs that Abort has ended, with their tokens so far."""
        outputs = {index: self._outputs[index] for index in range(self._num_outputs)}
        aborted = {
            index: vp.GenerateComplete(
                output_ids=output.token_ids,
                finish_reason=_ABORTED,
                prompt_tokens=self._num_prompt,
                completion_tokens=len(output.token_ids),
                index=index,
            )
            for index, output in outputs.items()
            if not output.has_ended
        }
        self._held |= aborted
        return self._ends() if aborted else []

    def _chunk(self, message: pb.GenerateResponse, output: _Output) -> vp.GenerateStreamChunk:
        chunk = vp.GenerateStreamChunk(
            token_ids=message.token_ids,
            prompt_tokens=self._num_prompt,
            completion_tokens=len(message.token_ids),
            index=message.index,
        )
        if message.logprobs:
            chunk.output_logprobs.CopyFrom(output_logprobs(message.token_ids, message.logprobs, has_top=self._has_top))
        if self._input is not None and not output.has_chunk:
            chunk.input_logprobs.CopyFrom(self._input)
        output.has_chunk = True
        return chunk

    def _complete(self, message: pb.GenerateResponse, output: _Output) -> vp.GenerateComplete:
        counts = message.statistics
        complete = vp.GenerateComplete(
            output_ids=output.token_ids,
            finish_reason=_FINISH_REASONS[message.finish_reason],
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.output_tokens,
            cached_tokens=counts.prefix_hit_tokens,
            spec_accepted_tokens=sum(counts.accepted),
            spec_draft_tokens=sum(counts.drafted),
            index=message.index,
        )
        if output.logprobs:
            complete.output_logprobs.CopyFrom(output_logprobs(output.token_ids, output.logprobs, has_top=self._has_top))
        if message.HasField("stop_token_id"):
            complete.matched_token_id = message.stop_token_id
        elif message.HasField("stop_text"):
            complete.matched_stop_str = message.stop_text
        return complete

    def _add_prompt_logprobs(self, written: vp.InputLogProbs, logprobs: Iterable[pb.TokenLogprobs]) -> None:
        """Translate log probabilities when they arrive: those of a whole prompt would delay other requests."""
        for one in logprobs:
            written.token_ids.append(one.token_id)
            written.token_logprobs.add(value=one.logprob)
            if self._has_prompt_top:
                written.top_logprobs.add(values=one.top_logprobs, token_ids=one.top_ids)


def output_logprobs(
    token_ids: Iterable[int], logprobs: Iterable[pb.TokenLogprobs], *, has_top: bool
) -> vp.OutputLogProbs:
    """Return the log probabilities of output tokens; with `has_top` also of the most likely tokens."""
    written = vp.OutputLogProbs(token_ids=token_ids)
    for one in logprobs:
        written.token_logprobs.append(one.logprob)
        if has_top:
            written.top_logprobs.add(values=one.top_logprobs, token_ids=one.top_ids)
    return written
