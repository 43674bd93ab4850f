"""A drafter with a correct handshake that may break every other rule of the contract."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import torch
from exact_pair import FEATURES, LAYERS, SHAPE, VOCAB
from exact_services import Loop

from draftwire.contract.addresses import CHANNEL_OPTIONS
from draftwire.contract.version import PROTOCOL_VERSION, VERSION
from draftwire.model.tensors import decode_tensor, encode_tensor
from draftwire.v1 import config_pb2, draft_pb2_grpc
from draftwire.v1 import draft_pb2 as pb
from draftwire_kernels import NOISE_VERSION


@dataclass(frozen=True)
class Wish:
    """A sequence of a step for which drafts are requested."""

    sequence_id: int
    proposal_key: int
    tokens: tuple[int, ...]  # x_1 .. x_n
    num_drafts: int

    @property
    def position(self) -> int:
        """Return the position of the first draft, n + 1."""
        return len(self.tokens) + 1


@dataclass(frozen=True)
class Proposal:
    """The answer to a wish."""

    sequence_id: int
    committed_length: int
    last_token: int
    tokens: tuple[int, ...]
    logits: torch.Tensor | None = None  # float32 [num_drafts, VOCAB]


Propose = Callable[[Wish], Proposal]
Deliver = Callable[[list[pb.Drafts]], AsyncIterator[pb.Drafts]]


def propose(wish: Wish, tokens: Sequence[int], **changes: Any) -> Proposal:
    """Return a well-formed answer with these drafts, except for `changes`."""
    answer = Proposal(wish.sequence_id, wish.position, wish.tokens[-1], tuple(tokens[: wish.num_drafts]))
    return replace(answer, **changes)


async def at_once(answers: list[pb.Drafts]) -> AsyncIterator[pb.Drafts]:
    """Deliver the newest answer once, without delay."""
    yield answers[-1]


@dataclass
class HostileDrafter(draft_pb2_grpc.DraftingServicer):
    """Answers every step with the proposals of `proposer` for the requested drafts, delivered by `deliver`."""

    proposer: Propose
    deliver: Deliver = at_once
    keys: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def _info(self) -> pb.GetDrafterInfoResponse:
        return pb.GetDrafterInfoResponse(
            version=VERSION,
            method="eagle3",
            head="hostile",
            head_fingerprint="0bad",
            target_vocab_size=VOCAB,
            target_hidden_size=SHAPE.hidden_size,
            target_num_layers=LAYERS,
            features=pb.FeatureSpec(layers=FEATURES, width=len(FEATURES) * SHAPE.hidden_size, dtype=pb.DTYPE_FLOAT32),
            draft_vocab_size=VOCAB,
            max_num_speculative_tokens=16,
            max_sequences=1024,
            max_model_len=SHAPE.max_position_embeddings,
            draft_logits_forms=[config_pb2.DRAFT_LOGITS_FORM_NONE, config_pb2.DRAFT_LOGITS_FORM_DENSE],
            device="cpu",
            dtype="float32",
            protocol_version=PROTOCOL_VERSION,
            noise_version=NOISE_VERSION,
        )

    async def GetDrafterInfo(  # noqa: N802
        self, request: pb.GetDrafterInfoRequest, context: Any  # noqa: ARG002
    ) -> pb.GetDrafterInfoResponse:
        return self._info()

    async def Draft(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: Any  # noqa: ARG002
    ) -> AsyncIterator[pb.DraftResponse]:
        await anext(request_iterator)
        self.keys, self.tokens = {}, {}  # of the stream's sequences, whose ids begin again
        hello = pb.DrafterHello(
            protocol_version=PROTOCOL_VERSION, noise_version=NOISE_VERSION, info=self._info(), carrier=pb.CARRIER_BYTES
        )
        yield pb.DraftResponse(hello=hello)
        answers: list[pb.Drafts] = []
        async for request in request_iterator:
            if request.HasField("keep_alive"):
                continue
            answers.append(self._answer(request.step))
            async for drafts in self.deliver(answers):
                yield pb.DraftResponse(drafts=drafts)

    def _answer(self, step: pb.DraftStep) -> pb.Drafts:
        self.keys |= zip(step.opened.ids, step.opened.proposal_keys, strict=True)
        rows: list[int] = []
        if step.num_rows:
            rows = decode_tensor(step.tokens, "tokens", torch.int32, (sum(step.num_rows),)).tolist()
        proposals = []
        ends = np.cumsum(step.num_rows).tolist()
        columns = (step.sequence_ids, step.num_rows, step.num_drafts, ends)
        for sequence_id, num_rows, num_drafts, end in zip(*columns, strict=True):
            own = self.tokens.setdefault(sequence_id, [])
            own += rows[end - num_rows : end]
            if num_drafts:
                wish = Wish(sequence_id, self.keys[sequence_id], tuple(own), num_drafts)
                proposals.append(self.proposer(wish))
        return _encode(step.step_id, proposals)


def _encode(step_id: int, proposals: list[Proposal]) -> pb.Drafts:
    tokens = [token for one in proposals for token in one.tokens]
    logits = [one.logits for one in proposals if one.logits is not None]
    return pb.Drafts(
        step_id=step_id,
        sequence_ids=[one.sequence_id for one in proposals],
        statuses=[pb.SEQUENCE_STATUS_OK] * len(proposals),
        committed_lengths=[one.committed_length for one in proposals],
        last_tokens=[one.last_token for one in proposals],
        num_drafts=[len(one.tokens) for one in proposals],
        tokens=encode_tensor(torch.tensor(tokens, dtype=torch.int32)),
        confidences=encode_tensor(torch.full((len(tokens),), 0.5)),
        logits=encode_tensor(torch.cat(logits)) if logits else None,
    )


@contextlib.contextmanager
def serve_hostile(drafter: HostileDrafter) -> Iterator[str]:
    """Serve the drafter and yield its address."""
    loop = Loop()

    async def start() -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        draft_pb2_grpc.add_DraftingServicer_to_server(drafter, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"

    server, address = loop.run(start())
    try:
        yield address
    finally:
        loop.run(server.stop(None))
        loop.close()
