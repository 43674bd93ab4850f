"""The Drafting service refuses verifiers that do not fit, and malformed messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from harness import OK, Rows, Text, draft_alone
from served import (
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    LIMITS,
    RESOURCE_EXHAUSTED,
    ServedDrafter,
    hello,
    serve_drafter,
    set_field,
    step_message,
)
from tiny_head import DRAFT_VOCAB, WIDTH, TinyHead
from waiting import wait_for

from draftwire.contract.validation import DENSE, GUMBEL, TOP_N
from draftwire.contract.version import PROTOCOL_VERSION
from draftwire.model.tensors import decode_tensor, encode_tensor
from draftwire.v1 import config_pb2
from draftwire.v1 import draft_pb2 as pb
from draftwire_kernels import NOISE_VERSION


def tokens_of(drafts: pb.Drafts) -> list[int]:
    return decode_tensor(drafts.tokens, "tokens", torch.int32, (None,)).tolist()


class TestHandshake:
    def test_the_answer_carries_the_draft_vocabulary(self, drafter: ServedDrafter, head: TinyHead) -> None:
        answer = drafter.stream().ask(hello()).hello
        ids = decode_tensor(answer.draft_token_ids, "draft_token_ids", torch.int32, (DRAFT_VOCAB,))
        assert ids.tolist() == head.draft_token_ids.tolist()
        assert (answer.carrier, answer.info.load.sessions) == (pb.CARRIER_BYTES, 1)

    def test_equal_vocabularies_need_no_ids(self) -> None:
        with serve_drafter(TinyHead(reduced_vocabulary=False)) as drafter:
            assert not drafter.stream().ask(hello()).hello.HasField("draft_token_ids")

    @pytest.mark.parametrize(
        ("changes", "field", "verifier", "drafter_has"),
        [
            ({"protocol_version": 99}, "protocol_version", "99", str(PROTOCOL_VERSION)),
            ({"target__vocab_size": 41}, "target.vocab_size", "41", "40"),
            ({"target__hidden_size": 16}, "target.hidden_size", "16", "8"),
            ({"target__num_layers": 12}, "target.num_layers", "12", "9"),
            ({"features__layers": [2, 5, 6]}, "features.layers", "[2, 5, 6]", "[2, 4, 6]"),
            ({"features__width": 48}, "features.width", "48", "24"),
            ({"features__dtype": pb.DTYPE_BFLOAT16}, "features.dtype", "bfloat16", "float32"),
            ({"max_sequences": 9}, "max_sequences", "9", "1 to 8"),
            ({"max_sequences": 0}, "max_sequences", "0", "1 to 8"),
            ({"carriers": []}, "carriers", "none", "bytes"),
            ({"config": {"num_speculative_tokens": 7}}, "num_speculative_tokens", "7", "6"),
            ({"config": {"method": "eagle"}}, "speculative_config.method", "eagle", "eagle3"),
            ({"config": {"model": "tiny/other"}}, "speculative_config.model", "tiny/other", "tiny/head"),
            (
                {"config": {"draft_sample_method": GUMBEL}, "noise_version": 77},
                "noise_version",
                "77",
                str(NOISE_VERSION),
            ),
            (
                {"config": {"draft_sample_method": GUMBEL, "draft_logits": {"form": TOP_N, "n": 25}}},
                "draft_logits",
                "top_n=25",
                "24",
            ),
        ],
    )
    def test_a_mismatched_verifier_is_refused_with_both_values(
        self, drafter: ServedDrafter, changes: dict[str, Any], field: str, verifier: str, drafter_has: str
    ) -> None:
        code, text = drafter.refusal(hello(**changes))
        assert code == FAILED_PRECONDITION
        name, _, values = text.partition(": the verifier has ")
        assert name.endswith(field)
        assert values.startswith(f"{verifier}, the drafter ")
        assert values.endswith(drafter_has) or f" {drafter_has} " in values

    def test_logits_that_no_message_could_carry_are_refused(
        self, drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("drafter_service.server.handshake.MAX_MESSAGE_BYTES", 3000)
        for logits, size in (({"form": DENSE}, 8 * 4 * DRAFT_VOCAB * 4), ({"form": TOP_N, "n": 20}, 8 * 4 * 20 * 8)):
            config = {"draft_sample_method": GUMBEL, "draft_logits": config_pb2.DraftLogits(**logits)}
            code, text = drafter.refusal(hello(config))
            assert code == FAILED_PRECONDITION
            assert f"up to {size} bytes a step, the drafter sends at most 3000" in text

    def test_equal_noise_matters_only_for_sampled_drafts(self, drafter: ServedDrafter) -> None:
        assert drafter.stream().ask(hello(noise_version=77)).HasField("hello")

    @pytest.mark.parametrize("model", ["tiny/head", "head", "/srv/models/head", "/srv/models/head/"])
    def test_the_head_is_recognised_by_its_name_or_its_last_part(self, drafter: ServedDrafter, model: str) -> None:
        assert drafter.stream().ask(hello({"model": model})).HasField("hello")

    @pytest.mark.parametrize(
        ("config", "field"),
        [
            ({"num_speculative_tokens": 17}, "speculative_config.num_speculative_tokens"),
            ({"draft_logits": {"form": DENSE}}, "speculative_config.draft_logits"),
        ],
    )
    def test_a_config_that_breaks_the_contract_is_invalid_argument(
        self, drafter: ServedDrafter, config: dict[str, Any], field: str
    ) -> None:
        code, text = drafter.refusal(hello(config))
        assert code == INVALID_ARGUMENT
        assert field in text

    @pytest.mark.parametrize("first", [[pb.DraftRequest(step=step_message(1))], [pb.DraftRequest()], []])
    def test_the_first_message_must_be_the_hello(self, drafter: ServedDrafter, first: list[pb.DraftRequest]) -> None:
        stream = drafter.stream()
        for request in first:
            stream.send_request(request)
        stream.end()
        code, text = stream.error()
        assert (code, "hello" in text) == (INVALID_ARGUMENT, True)

    def test_more_sessions_than_allowed(self, drafter: ServedDrafter) -> None:
        streams = [drafter.connect() for _ in range(LIMITS.max_sessions)]
        code, text = drafter.refusal(hello())
        assert code == RESOURCE_EXHAUSTED
        assert text == "max_sessions = 3: as many verifiers are already connected"
        streams[0].end()
        assert streams[0].error()[0] == grpc.StatusCode.OK
        drafter.connect()


class TestSteps:
    def test_drafts_are_those_of_the_engine(self, drafter: ServedDrafter, head: TinyHead) -> None:
        text = Text(1)
        drafts = drafter.connect().ask(step_message(1, [Rows(5, text, 0, 11, 4)], [5])).drafts
        expected = draft_alone(head, text, 11, 4)
        assert tokens_of(drafts) == expected.tokens
        assert (drafts.step_id, list(drafts.sequence_ids), list(drafts.statuses)) == (1, [5], [OK])
        assert (list(drafts.committed_lengths), list(drafts.last_tokens)) == ([12], [expected.last_token])
        assert (list(drafts.num_drafts), drafts.load.sequences) == ([4], 1)
        assert not drafts.HasField("logits")
        assert not drafts.HasField("logits_token_ids")

    def test_every_step_has_one_answer_in_order(self, drafter: ServedDrafter) -> None:
        stream = drafter.connect()
        for step_id in range(1, 9):
            rows = [Rows(1, Text(1), step_id - 1, 1, drafts=step_id % 2)]
            stream.send(step_message(step_id, rows, [1] if step_id == 1 else []))
        stream.end()
        answers = [stream.read().drafts for _ in range(8)]
        assert [answer.step_id for answer in answers] == list(range(1, 9))
        assert [len(answer.sequence_ids) for answer in answers] == [1, 0] * 4
        assert stream.error()[0] == grpc.StatusCode.OK

    def test_logits_travel_as_the_config_says(self, drafter: ServedDrafter) -> None:
        rows = [Rows(1, Text(1), 0, 5, 3), Rows(2, Text(2), 0, 5, 2)]
        for logits, width in ((config_pb2.DraftLogits(form=DENSE), DRAFT_VOCAB), ({"form": TOP_N, "n": 5}, 5)):
            stream = drafter.connect({"draft_sample_method": GUMBEL, "draft_logits": logits})
            drafts = stream.ask(step_message(1, rows, [1, 2])).drafts
            assert decode_tensor(drafts.logits, "logits", torch.float32, (5, width)).isfinite().all()
            assert drafts.HasField("logits_token_ids") == (width == 5)
            stream.end()


def _with(change: Callable[[pb.DraftStep], None]) -> pb.DraftStep:
    step = step_message(1, [Rows(1, Text(1), 0, 3, 2), Rows(2, Text(2), 0, 2, 2)], [1, 2])
    change(step)
    return step


def _tokens(values: list[int], dtype: torch.dtype = torch.int32) -> Callable[[pb.DraftStep], None]:
    return lambda step: step.tokens.CopyFrom(encode_tensor(torch.tensor(values, dtype=dtype)))


def _features(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[pb.DraftStep], None]:
    return lambda step: step.features.CopyFrom(encode_tensor(torch.zeros(shape, dtype=dtype)))


def _set(path: str, value: Any) -> Callable[[pb.DraftStep], None]:
    return lambda step: set_field(step, path.split("."), value)


class TestMalformedMessages:
    @pytest.mark.parametrize(
        ("change", "field"),
        [
            (_set("step_id", 2), "step_id"),
            (_set("first_rows", [0]), "first_rows"),
            (_set("num_rows", [3, 2, 1]), "num_rows"),
            (_set("num_rows", [5, 0]), "num_rows"),
            (_set("num_rows", [3, 3]), "tokens.shape"),
            (_set("num_rows", [2**32 - 1, 2**32 - 1]), "tokens.shape"),
            (_set("num_drafts", []), "num_drafts"),
            (_set("num_drafts", [2, 5]), "num_drafts"),
            (_set("sequence_ids", [1, 1]), "sequence_ids"),
            (_set("opened.temperatures", [1.0]), "opened.temperatures"),
            (_set("opened.temperatures", [1.0, -0.5]), "opened.temperatures"),
            (_set("opened.temperatures", [1.0, float("nan")]), "opened.temperatures"),
            (_set("opened.proposal_keys", []), "opened.proposal_keys"),
            (_set("opened.first_rows", [0, 0, 0]), "opened.first_rows"),
            (_set("opened.ids", [2, 2]), "opened.ids"),
            (_set("opened.ids", [2, 1]), "opened.ids"),
            (_tokens([1, 2, 3, 4]), "tokens.shape"),
            (_tokens([1, 2, 3, 4, 40]), "tokens"),
            (_tokens([1, 2, 3, 4, -1]), "tokens"),
            (_tokens([1, 2, 3, 4, 5], torch.int64), "tokens.dtype"),
            (_set("tokens.data", b"123"), "tokens.data"),
            (lambda step: step.ClearField("tokens"), "tokens.dtype"),
            (lambda step: step.ClearField("features"), "features.dtype"),
            (_features(5, WIDTH - 1), "features.shape"),
            (_features(4, WIDTH), "features.shape"),
            (_features(5, WIDTH, dtype=torch.bfloat16), "features.dtype"),
            (_set("features.data", b"\0" * (5 * WIDTH * 4 + 1)), "features.data"),
        ],
    )
    def test_end_their_stream_naming_the_field_and_no_other(
        self, drafter: ServedDrafter, head: TinyHead, change: Callable[[pb.DraftStep], None], field: str
    ) -> None:
        other, stream = drafter.connect(), drafter.connect()
        stream.send(_with(change))
        code, text = stream.error()
        assert code == INVALID_ARGUMENT
        assert text.startswith(f"{field} = ")
        drafts = other.ask(step_message(1, [Rows(1, Text(1), 0, 9, 4)], [1])).drafts
        assert tokens_of(drafts) == draft_alone(head, Text(1), 9, 4).tokens
        wait_for(lambda: drafter.engine.load.sessions == 1)

    def test_a_second_hello_ends_the_stream(self, drafter: ServedDrafter) -> None:
        stream = drafter.connect()
        stream.send(hello())
        assert stream.error() == (INVALID_ARGUMENT, "message = 'hello': must be a step after the hello")

    def test_ids_are_never_opened_twice(self, drafter: ServedDrafter) -> None:
        stream = drafter.connect()
        stream.ask(step_message(1, new=[1, 4]))
        stream.send(pb.DraftStep(step_id=2, closed_ids=[4]))
        stream.send(step_message(3, new=[4]))
        assert stream.error() == (
            INVALID_ARGUMENT,
            "opened.ids = 4: ids rise within a stream: must be above 4",
        )

    def test_bytes_that_are_no_message_end_their_stream_alone(self, drafter: ServedDrafter) -> None:
        raw: Any = drafter.channel.stream_stream("/draftwire.v1.Drafting/Draft")
        with pytest.raises(grpc.RpcError):
            next(raw(iter([b"\xff\xff\xff"]), timeout=30))
        assert drafter.connect().ask(step_message(1)).drafts.step_id == 1
