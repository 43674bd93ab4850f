"""A Generation service without a model, whose counters are correct or, on request, wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from draftwire.v1 import config_pb2, draft_pb2
from draftwire.v1 import generate_pb2 as pb
from draftwire.v1.generate_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

K = 2
ROW_BYTES = 24
VOCAB_SIZE = 50


@dataclass
class FakeVerifier(GenerationServicer):
    """Emits one token after the prompt; each step then accepts all drafts but the last.

    The counters omit `forgotten_rows` verified rows of each request.
    """

    synthetic: bool = True
    forgotten_rows: int = 0
    running: int = 0
    drafters: int = 1
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    counters: pb.EngineCounters = field(default_factory=pb.EngineCounters)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: ARG002, N802
        k = request.num_speculative_tokens if request.HasField("num_speculative_tokens") else K
        prompt = len(request.token_ids.ids)
        max_tokens = request.sampling_params.max_tokens
        statistics = pb.RequestStatistics(prompt_tokens=prompt, drafted=[0] * k, accepted=[0] * k)
        emitted = 1
        rows = 0
        yield pb.GenerateResponse(token_ids=[7], drafted=[False])
        while emitted < max_tokens:
            drafts = min(k, max_tokens - emitted - 1)
            accepted = max(0, drafts - 1)
            for position in range(drafts):
                statistics.drafted[position] += 1
            for position in range(accepted):
                statistics.accepted[position] += 1
            statistics.verify_steps += 1
            statistics.verify_tokens += accepted + 1
            rows += drafts + 1
            emitted += accepted + 1
            yield pb.GenerateResponse(token_ids=[7] * (accepted + 1), drafted=[True] * accepted + [False])
        with self._lock:
            self.requests.append(request)
            self._count(statistics, rows, prompt + emitted - 1 if k else 0)
        statistics.output_tokens = emitted
        yield pb.GenerateResponse(finish_reason=pb.FINISH_REASON_LENGTH, statistics=statistics)

    def _count(self, statistics: pb.RequestStatistics, rows: int, feature_rows: int) -> None:
        counters = self.counters
        counters.steps += statistics.verify_steps + 1
        counters.prompt_rows += statistics.prompt_tokens
        counters.verify_steps += statistics.verify_steps
        counters.verify_rows += rows - self.forgotten_rows
        if feature_rows:
            traffic = counters.traffic[0] if counters.traffic else counters.traffic.add(carrier=draft_pb2.CARRIER_BYTES)
            traffic.steps += statistics.verify_steps
            traffic.feature_rows += feature_rows
            traffic.feature_bytes += feature_rows * ROW_BYTES

    def GetVerifierInfo(self, request: Any, context: Any) -> pb.GetVerifierInfoResponse:  # noqa: ARG002, N802
        config = config_pb2.SpeculativeConfig(
            num_speculative_tokens=K,
            draft_sample_method=config_pb2.DRAFT_SAMPLE_METHOD_GREEDY,
            rejection_sample_method=config_pb2.REJECTION_SAMPLE_METHOD_STANDARD,
        )
        if self.synthetic:
            config.rejection_sample_method = config_pb2.REJECTION_SAMPLE_METHOD_SYNTHETIC
            config.synthetic_acceptance_length = 2.0
        drafter = pb.DrafterStatus(state=pb.DRAFTER_STATE_READY, feature_row_bytes=ROW_BYTES)
        with self._lock:
            return pb.GetVerifierInfoResponse(
                version="0",
                target="fake",
                vocab_size=VOCAB_SIZE,
                max_model_len=1000,
                max_num_seqs=8,
                device="cpu",
                dtype="float32",
                speculative_config=config,
                drafters=[drafter] * self.drafters,
                requests_running=self.running,
                counters=self.counters,
            )


@contextmanager
def served(verifier: FakeVerifier) -> Iterator[str]:
    """Serve in this process; yield the address."""
    server = grpc.server(futures.ThreadPoolExecutor(16))
    add_GenerationServicer_to_server(verifier, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)
