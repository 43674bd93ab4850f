"""Convert the engine's tokens to text."""

from __future__ import annotations

from collections.abc import Sequence

from draftwire.v1 import config_pb2
from draftwire.v1 import generate_pb2 as pb
from verifier_service.core.tokenizer import Detokenizer, StopFinder, TextCodec


class ResponseText:
    """Adds the text to one output's messages and ends the output at the first stop text.

    It runs in the client process, so that text costs no engine time. After a stop text the engine computes a few more
    tokens; the caller drops messages after the one that ends the output.

    Attributes:
        request_id: Id of the request.
        num_tokens: Output tokens of all messages, without those after a stop text.
    """

    def __init__(
        self, request_id: str, params: config_pb2.SamplingParams, codec: TextCodec | None, prompt: Sequence[int]
    ) -> None:
        self.request_id = request_id
        self.num_tokens = 0
        self._codec = codec
        # A long prompt takes megabytes, so it is kept only if it is needed.
        self._prompt = prompt if params.HasField("prompt_logprobs") else ()
        self._num_prompt_logprobs = 1  # tokens of the prompt whose log probabilities arrived; the first has none
        self._detokenizer = (
            Detokenizer(codec, prompt, skip_special_tokens=params.skip_special_tokens) if codec is not None else None
        )
        self._stops = StopFinder(params.stop)
        self._includes_stop = params.include_stop_text
        self._min_tokens = params.min_tokens
        self._text = ""  # of the current message

    def add_to(self, message: pb.GenerateResponse) -> bool:
        """Add the text to the engine's next message; return whether a stop text ends the output in this message.

        In that case the tokens after the stop text are cut off, and finish reason and number of output tokens are set.
        The message must have statistics, which are removed if the output continues.
        """
        self._add_token_texts(message)
        self._text = ""
        stop: str | None = None
        ends: list[int] = []
        token_ids = list(message.token_ids)
        for place, token_id in enumerate(token_ids, 1):
            reason = message.finish_reason if place == len(token_ids) else pb.FINISH_REASON_UNSPECIFIED
            stop = self._write(token_id, reason)
            ends.append(len(self._text))
            if stop is not None:
                break
        message.text = self._text
        message.token_text_ends.extend(ends)
        if stop is not None:
            _end(message, len(ends), stop)
        elif message.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
            message.ClearField("statistics")
        return stop is not None

    def _add_token_texts(self, message: pb.GenerateResponse) -> None:
        """Add token ids to the log probabilities of the prompt, and texts to all log probabilities."""
        first = self._num_prompt_logprobs
        self._num_prompt_logprobs = end = first + len(message.prompt_logprobs)
        for entry, token_id in zip(message.prompt_logprobs, self._prompt[first:end], strict=True):
            entry.token_id = token_id
        if self._codec is None:
            return
        pairs = [(entry, entry.token_id) for entry in message.prompt_logprobs]
        for entry, token_id in [*pairs, *zip(message.logprobs, message.token_ids, strict=False)]:
            entry.text = self._codec.token_text(token_id)
            entry.top_texts.extend(map(self._codec.token_text, entry.top_ids))

    def _write(self, token_id: int, reason: pb.FinishReason) -> str | None:
        """Write a token's text, and after the last token the text held back; return the completed stop text.

        An end token has no text, unless the request includes stop texts.
        """
        self.num_tokens += 1
        has_text = self._includes_stop or reason != pb.FINISH_REASON_STOP
        stop = self._add(self._detokenizer.push(token_id) if has_text and self._detokenizer is not None else "")
        if reason == pb.FINISH_REASON_UNSPECIFIED or stop is not None:
            return stop
        if self._detokenizer is not None:
            stop = self._add(self._detokenizer.flush())
        if stop is None:
            self._text += self._stops.flush()
        return stop

    def _add(self, text: str) -> str | None:
        """Add text to the message, except a possible beginning of a stop text; return the completed stop text.

        A completed stop text is added if the request includes stop texts. As in vLLM, the first `min_tokens` tokens may
        begin a stop text but not complete it.
        """
        free, stop = self._stops.push(text, may_end=self.num_tokens > self._min_tokens)
        self._text += free
        if stop is not None and self._includes_stop:
            self._text += stop
        return stop


def _end(message: pb.GenerateResponse, count: int, stop: str) -> None:
    """End a message, and the output, after `count` of the message's tokens."""
    num_cut = len(message.token_ids) - count
    for values in (message.token_ids, message.drafted, message.logprobs):
        del values[count:]
    message.finish_reason = pb.FINISH_REASON_STOP
    message.stop_text = stop
    message.ClearField("stop_token_id")
    message.statistics.output_tokens -= num_cut
