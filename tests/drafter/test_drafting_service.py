"""The Drafting service over gRPC: its information, fusion weights, steps, and ends of streams."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections import Counter
from typing import Any

import grpc
import pytest
import torch
from harness import Rows, Text
from served import (
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    LIMITS,
    RESOURCE_EXHAUSTED,
    TIMEOUT_S,
    ServedDrafter,
    hello,
    serve_drafter,
    step_message,
)
from tiny_head import DRAFT_VOCAB, HIDDEN, WIDTH, TinyHead
from waiting import wait_for

from drafter_service.draft_loop.sampling_mode import SamplingMode
from drafter_service.draft_loop.session_terms import SessionTerms
from drafter_service.server import stream as stream_module
from drafter_service.server.service import feature_segment_bytes
from draftwire.contract.validation import COUPLED, DENSE, GUMBEL
from draftwire.contract.version import PROTOCOL_VERSION
from draftwire.model.fusion import load_fusion
from draftwire.model.tensors import decode_tensor, encode_tensor
from draftwire.server import message_reading
from draftwire.v1 import config_pb2
from draftwire.v1 import draft_pb2 as pb
from draftwire_kernels import NOISE_VERSION
from verifier_service.options import VerifierOptions


def test_info_tells_head_and_limits(drafter: ServedDrafter, head: TinyHead) -> None:
    info = drafter.stub.GetDrafterInfo(pb.GetDrafterInfoRequest())
    assert (info.method, info.head, info.head_fingerprint) == ("eagle3", "tiny/head", head.fingerprint)
    assert info.features == pb.FeatureSpec(layers=[2, 4, 6], width=WIDTH, dtype=pb.DTYPE_FLOAT32)
    assert (info.target_vocab_size, info.target_hidden_size, info.target_num_layers) == (40, 8, 9)
    assert (info.draft_vocab_size, info.max_num_speculative_tokens, info.max_sequences) == (DRAFT_VOCAB, 6, 8)
    assert (info.protocol_version, info.noise_version) == (PROTOCOL_VERSION, NOISE_VERSION)
    assert (info.device, info.dtype) == ("cpu", "float32")
    assert (info.load.sessions, info.load.sequences) == (0, 0)


def test_info_has_memory_and_draft_logits_only_while_asked_for(drafter: ServedDrafter, head: TinyHead) -> None:
    def memory() -> pb.MemoryUse:
        return drafter.stub.GetDrafterInfo(pb.GetDrafterInfoRequest()).memory

    use = memory()
    assert use.kv_cache_token_bytes == 4 * sum(heads * (key + value) for heads, key, value in head.spec.layer_shapes)
    assert use.kv_cache_tokens == 2048
    assert use.peak_host_bytes > 50 << 20  # torch alone needs more
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
    """With few sequences, the largest step has rows of prompts."""
    largest_step = max(VerifierOptions(target="").max_prefill_rows, max_sequences * (k + 1))
    features = pb.FeatureSpec(width=4096, dtype=pb.DTYPE_BFLOAT16)
    size = feature_segment_bytes(features, SessionTerms("verifier", SamplingMode(), k, max_sequences))
    assert size >= 3 * largest_step * 4096 * 2


def test_a_message_is_encoded_once(head: TinyHead, encodings: Counter[str]) -> None:
    with serve_drafter(head) as drafter:
        drafter.connect().ask(step_message(1, [Rows(1, Text(1), 0, 4)], [1]))
    assert encodings == {"DraftRequest": 2, "DraftResponse": 2}  # the hellos, then the step and its drafts


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
        wait_for(lambda: not refusal())

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
        code, detail = drafter.refusal(hello(**changes))
        assert code == FAILED_PRECONDITION
        assert f"features.{text}" in detail


class TestEnds:
    def test_a_stream_that_is_cancelled_frees_its_sequences(self, drafter: ServedDrafter) -> None:
        stream = drafter.connect()
        stream.ask(step_message(1, [Rows(1, Text(1), 0, 20, 4)], [1]))
        assert drafter.engine.load.kv_cache_usage > 0
        stream.call.cancel()
        wait_for(lambda: drafter.engine.load.sessions == 0)
        assert (drafter.engine.load.sequences, drafter.engine.load.kv_cache_usage) == (0, 0)

    def test_a_verifier_faster_than_its_answers_is_cut_off(
        self, drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drafter.engine, "submit", lambda *_: None)  # an engine that never gets the steps
        stream = drafter.connect()
        for step_id in range(1, stream_module.MAX_UNANSWERED_STEPS + 2):
            stream.send(step_message(step_id))
        code, text = stream.error()
        assert (code, "64 steps are unanswered" in text) == (RESOURCE_EXHAUSTED, True)

    def test_messages_of_one_step_id_do_not_pile_up(self, drafter: ServedDrafter) -> None:
        """The stream refuses the second message, because the busy engine does not check it yet."""
        stream = drafter.connect()
        computed = threading.Event()
        drafter.engine.post(lambda: computed.wait(TIMEOUT_S))
        for _ in range(2):
            stream.send(step_message(1))
        try:
            code, text = stream.error()
        finally:
            computed.set()
        assert (code, "step_id = 1: has no answer yet" in text) == (INVALID_ARGUMENT, True)

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
        for step_id in (1, 2):  # about 200 bytes, and 6 * 24 * 4 in the answer
            stream.send(step_message(step_id, [Rows(1, Text(1), step_id - 1, 1, 6)], [1][: 2 - step_id]))
        code, text = stream.error()
        assert (code, "steps of 1000 bytes are unanswered" in text) == (RESOURCE_EXHAUSTED, True)

    def test_answered_bytes_do_not_count(self, drafter: ServedDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream_module, "MAX_UNANSWERED_BYTES", 8000)
        stream = drafter.connect()
        for step_id in range(1, 7):
            rows = [Rows(1, Text(1), 16 * (step_id - 1), 16)]  # at least 1600 bytes
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
        detail = "no hello: the message did not arrive within 0.2 s"
        assert drafter.stream().error() == (grpc.StatusCode.DEADLINE_EXCEEDED, detail)


@pytest.mark.parametrize("is_refused", [False, True], ids=["lost", "refused"])
def test_what_a_stream_held_is_freed_without_the_cycle_collector(drafter: ServedDrafter, is_refused: bool) -> None:
    """A stream holds shared memory, and Python collects cycles rarely."""
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
            wait_for(lambda: len(made) == 1)
        if is_refused:
            stream.send(step_message(2))
            assert stream.error()[0] == INVALID_ARGUMENT
        else:
            stream.call.cancel()
        wait_for(lambda: not made)
    finally:
        gc.enable()
