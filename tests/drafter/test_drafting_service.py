"""The Drafting service over gRPC: handshake, steps, malformed messages, ends of streams."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from harness import OK, Rows, Text, draft_alone
from served import LIMITS, ServedDrafter, hello, serve_drafter, step_message
from tiny_head import DRAFT_VOCAB, HIDDEN, WIDTH, TinyHead

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.server import stream as stream_module
from drafter_service.server.service import feature_segment_bytes
from draftwire.contract.tensors import decode_tensor, encode_tensor
from draftwire.contract.validation import COUPLED, DENSE, GUMBEL, TOP_N
from draftwire.contract.version import PROTOCOL_VERSION
from draftwire.model.fusion import load_fusion
from draftwire.server import message_reading
from draftwire.v1 import config_pb2
from draftwire.v1 import draft_pb2 as pb
from draftwire_kernels import NOISE_VERSION
from verifier_service.options import VerifierOptions

INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT
FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def tokens_of(drafts: pb.Drafts) -> list[int]:
    return decode_tensor(drafts.tokens, "tokens", torch.int32, (None,)).tolist()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_info_tells_head_and_limits(drafter: ServedDrafter, head: TinyHead) -> None:
    info = drafter.stub.GetDrafterInfo(pb.GetDrafterInfoRequest())
    assert (info.method, info.head, info.head_fingerprint) == ("eagle3", "tiny/head", head.fingerprint)
    assert info.features == pb.FeatureSpec(layers=[2, 4, 6], width=WIDTH, dtype=pb.DTYPE_FLOAT32)
    assert (info.target_vocab_size, info.target_hidden_size, info.target_num_layers) == (40, 8, 9)
    assert (info.draft_vocab_size, info.max_num_speculative_tokens, info.max_sequences) == (DRAFT_VOCAB, 6, 8)
    assert (info.protocol_version, info.noise_version) == (PROTOCOL_VERSION, NOISE_VERSION)
    assert (info.device, info.dtype) == ("cpu", "float32")
    assert (info.load.sessions, info.load.sequences) == (0, 0)


def test_info_has_memory_and_draft_logits_only_while_asked_for(
    drafter: ServedDrafter, head: TinyHead
) -> None:
    def memory() -> pb.MemoryUse:
        return drafter.stub.GetDrafterInfo(pb.GetDrafterInfoRequest()).memory

    use = memory()
    assert use.kv_cache_token_bytes == 4 * sum(heads * (key + value) for heads, key, value in head.spec.layer_shapes)
    assert use.kv_cache_tokens == 2048
    assert use.peak_host_bytes > 50 << 20  # torch alone
    assert (use.peak_gpu_allocated_bytes, use.peak_gpu_reserved_bytes, use.features_bytes) == (0, 0, 0)
    dense = config_pb2.DraftLogits(form=DENSE)
    configs: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({"draft_sample_method": GUMBEL}, 0),
        ({"draft_sample_method": GUMBEL, "rejection_sample_method": COUPLED}, 0),
        ({"draft_sample_method": GUMBEL, "draft_logits": dense}, LIMITS.max_num_seqs * 4 * DRAFT_VOCAB * 4),
    ]
    for config, num_bytes in configs:
        stream = drafter.connect(config)
        assert memory().draft_logits_bytes == num_bytes
        stream.end()


@pytest.mark.parametrize(("max_sequences", "k"), [(1, 1), (64, 4), (256, 4)])
def test_features_of_the_largest_step_have_room_in_shared_memory(max_sequences: int, k: int) -> None:
    """That of a few sequences is one with prompts."""
    largest_step = max(VerifierOptions(target="").max_prefill_rows, max_sequences * (k + 1))
    features = pb.FeatureSpec(width=4096, dtype=pb.DTYPE_BFLOAT16)
    size = feature_segment_bytes(features, SessionTerms("verifier", SamplingMode(), k, max_sequences))
    assert size >= 3 * largest_step * 4096 * 2


def test_a_message_is_encoded_once(head: TinyHead, encodings: Counter[str]) -> None:
    with serve_drafter(head) as drafter:
        drafter.connect().ask(step_message(1, [Rows(1, Text(1), 0, 4)], [1]))
    assert encodings == {"DraftRequest": 2, "DraftResponse": 2}  # hellos, and what follows


class TestFusion:
    def test_the_weights_come_in_pieces(
        self, drafter: ServedDrafter, head: TinyHead, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("draftwire.model.fusion.CHUNK_BYTES", 500)
        info = drafter.stub.GetDrafterInfo(pb.GetDrafterInfoRequest())
        pieces = drafter.stub.GetFeatureFusion(pb.GetFeatureFusionRequest(head_fingerprint=head.fingerprint))
        data = [piece.data for piece in pieces]
        assert len(data) == 4
        fusion = load_fusion(info.fusion, info.features, bytearray(b"".join(data)), torch.device("cpu"))
        assert torch.equal(fusion.weight, head.fusion.weight)

    def test_only_as_many_verifiers_as_sessions_are_sent_weights(
        self, drafter: ServedDrafter, head: TinyHead, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(head.fusion, "chunks", lambda: itertools.repeat(b"x" * 100_000), raising=False)
        request = pb.GetFeatureFusionRequest(head_fingerprint=head.fingerprint)
        slow = [drafter.stub.GetFeatureFusion(request) for _ in range(LIMITS.max_sessions)]
        for call in slow:
            next(call)

        def refusal() -> str:
            call = drafter.stub.GetFeatureFusion(request)
            try:
                next(call)
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"
            call.cancel()
            return ""

        assert refusal() == "RESOURCE_EXHAUSTED: 3 verifiers are being sent the fusion; try again later"
        for call in slow:
            call.cancel()
        wait_until(lambda: not refusal())

    @pytest.mark.parametrize(("fuses", "text"), [(True, "the head is"), (False, "takes features as they are")])
    def test_weights_of_another_head_are_refused(self, fuses: bool, text: str) -> None:
        head = TinyHead()
        if not fuses:
            del head.fusion
        with serve_drafter(head) as drafter:
            request = pb.GetFeatureFusionRequest(head_fingerprint="beef" if fuses else head.fingerprint)
            with pytest.raises(grpc.RpcError) as raised:
                list(drafter.stub.GetFeatureFusion(request))
        assert raised.value.code() == FAILED_PRECONDITION
        assert text in raised.value.details()

    def test_fused_features_draft_what_raw_ones_do(self, drafter: ServedDrafter, head: TinyHead) -> None:
        answers = []
        for fuses in (False, True):
            step = step_message(1, [Rows(1, Text(3), 0, 5, drafts=4)], new=[1])
            message = hello({"draft_sample_method": GUMBEL, "draft_logits": {"form": DENSE}})
            if fuses:
                message.features.width, message.features.fused_for = HIDDEN, head.fingerprint
                features = decode_tensor(step.features, "features", torch.float32, (5, WIDTH))
                del step.features.shape[:]
                encode_tensor(head.fuse(features), step.features)
            stream = drafter.stream()
            stream.ask(message)
            answers.append(stream.ask(step).drafts)
        raw, fused = answers
        assert raw.tokens == fused.tokens
        logits = [decode_tensor(answer.logits, "logits", torch.float32, (4, DRAFT_VOCAB)) for answer in answers]
        torch.testing.assert_close(*logits)

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"features__fused_for": "beef", "features__width": HIDDEN}, "fused_for: the verifier has beef"),
            ({"features__fused_for": "0123456789abcdef"}, f"width: the verifier has {WIDTH}, the drafter has {HIDDEN}"),
            ({"features__width": HIDDEN}, f"width: the verifier has {HIDDEN}, the drafter has {WIDTH}"),
        ],
        ids=["other head", "raw width", "fused width"],
    )
    def test_features_fused_for_another_head_are_refused(
        self, drafter: ServedDrafter, changes: dict[str, Any], text: str
    ) -> None:
        code, told = drafter.refusal(hello(**changes))
        assert code == FAILED_PRECONDITION
        assert f"features.{text}" in told


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

    def test_the_first_message_must_be_the_hello(self, drafter: ServedDrafter) -> None:
        code, text = drafter.refusal(step_message(1))
        assert (code, "hello" in text) == (INVALID_ARGUMENT, True)

    def test_more_sessions_than_allowed(self, drafter: ServedDrafter) -> None:
        streams = [drafter.connect() for _ in range(LIMITS.max_sessions)]
        code, text = drafter.refusal(hello())
        assert code == RESOURCE_EXHAUSTED
        assert text == "max_sessions = 3: that many verifiers are connected already"
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
    def change(step: pb.DraftStep) -> None:
        *parents, name = path.split(".")
        owner: Any = step
        for parent in parents:
            owner = getattr(owner, parent)
        if isinstance(value, list):
            del getattr(owner, name)[:]
            getattr(owner, name).extend(value)
        else:
            setattr(owner, name, value)

    return change


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
        wait_until(lambda: drafter.engine.load.sessions == 1)

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


class TestEnds:
    def test_a_stream_that_is_cancelled_frees_its_sequences(self, drafter: ServedDrafter) -> None:
        stream = drafter.connect()
        stream.ask(step_message(1, [Rows(1, Text(1), 0, 20, 4)], [1]))
        assert drafter.engine.load.kv_cache_usage > 0
        stream.call.cancel()
        wait_until(lambda: drafter.engine.load.sessions == 0)
        assert (drafter.engine.load.sequences, drafter.engine.load.kv_cache_usage) == (0, 0)

    def test_a_verifier_faster_than_its_answers_is_cut_off(
        self, drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drafter.engine, "submit", lambda *_: None)  # an engine that does not come round to it
        stream = drafter.connect()
        for step_id in range(1, stream_module.MAX_UNANSWERED_STEPS + 2):
            stream.send(step_message(step_id))
        code, text = stream.error()
        assert (code, "64 steps are unanswered" in text) == (RESOURCE_EXHAUSTED, True)

    def test_unanswered_bytes_are_bounded(self, drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(drafter.engine, "submit", lambda *_: None)
        monkeypatch.setattr(stream_module, "MAX_UNANSWERED_BYTES", 4000)
        stream = drafter.connect()
        stream.send(step_message(1, [Rows(1, Text(1), 0, 30)], [1]))
        stream.send(step_message(2, [Rows(1, Text(1), 30, 30)]))
        assert stream.error()[0] == RESOURCE_EXHAUSTED

    def test_answers_that_nobody_reads_are_bounded(
        self, drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drafter.engine, "submit", lambda *_: None)
        monkeypatch.setattr(stream_module, "MAX_UNANSWERED_BYTES", 1000)
        config = {"draft_sample_method": GUMBEL, "num_speculative_tokens": 6}
        stream = drafter.connect({**config, "draft_logits": config_pb2.DraftLogits(form=DENSE)})
        for step_id in (1, 2):  # some 200 bytes, and 6 * 24 * 4 in the answer
            stream.send(step_message(step_id, [Rows(1, Text(1), step_id - 1, 1, 6)], [1][: 2 - step_id]))
        code, text = stream.error()
        assert (code, "steps of 1000 bytes are unanswered" in text) == (RESOURCE_EXHAUSTED, True)

    def test_answered_bytes_do_not_count(self, drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream_module, "MAX_UNANSWERED_BYTES", 8000)
        stream = drafter.connect()
        for step_id in range(1, 7):
            rows = [Rows(1, Text(1), 16 * (step_id - 1), 16)]  # 1600 bytes and more
            assert stream.ask(step_message(step_id, rows, [1] if step_id == 1 else [])).drafts.step_id == step_id

    def test_an_engine_failure_ends_every_stream_with_its_reason(
        self, drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("the device is gone")

        streams = [drafter.connect(), drafter.connect()]
        monkeypatch.setattr(drafter.engine.engine, "iterate", fail)
        streams[0].send(step_message(1))
        late = drafter.stream()
        late.send(hello())
        for stream in [*streams, late]:
            code, text = stream.error()
            assert (code, "the device is gone" in text) == (grpc.StatusCode.INTERNAL, True)

    def test_a_hello_that_never_comes(self, drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(message_reading, "MESSAGE_S", 0.2)
        told = "no hello: the message has not come within 0.2 s"
        assert drafter.stream().error() == (grpc.StatusCode.DEADLINE_EXCEEDED, told)


@pytest.mark.parametrize("is_refused", [False, True], ids=["lost", "refused"])
def test_what_a_stream_held_is_freed_without_the_cycle_collector(drafter: ServedDrafter, is_refused: bool) -> None:
    """It holds shared memory, and Python looks for cycles seldom."""
    made: weakref.WeakSet[stream_module.DraftStream] = weakref.WeakSet()

    def remember(self: stream_module.DraftStream, session: Any, run: Any = stream_module.DraftStream.run) -> Any:
        made.add(self)
        return run(self, session)

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream_module.DraftStream, "run", remember)
            stream = drafter.connect()
            wait_until(lambda: len(made) == 1)
        if is_refused:
            stream.send(step_message(2))
            assert stream.error()[0] == INVALID_ARGUMENT
        else:
            stream.call.cancel()
        wait_until(lambda: not made)
    finally:
        gc.enable()
