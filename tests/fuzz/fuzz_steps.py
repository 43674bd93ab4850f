"""Messages of verifiers to a drafter: valid hellos and steps, and hostile ones with wrong values."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from fuzz_noise import EDGES
from fuzz_requests import FLOATS
from google.protobuf.descriptor import FieldDescriptor

from draftwire.contract.version import PROTOCOL_VERSION
from draftwire.v1 import config_pb2
from draftwire.v1 import draft_pb2 as pb
from draftwire_kernels import NOISE_VERSION
from models import CONTEXT, HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE

LAYERS = (2, 3, 4)
WIDTH = len(LAYERS) * HIDDEN_SIZE
K = 4
MAX_SEQUENCES = 8
GREEDY = config_pb2.SpeculativeConfig(num_speculative_tokens=K)
DENSE = config_pb2.SpeculativeConfig(
    num_speculative_tokens=K,
    draft_sample_method=config_pb2.DRAFT_SAMPLE_METHOD_GUMBEL,
    draft_logits=config_pb2.DraftLogits(form=config_pb2.DRAFT_LOGITS_FORM_DENSE),
)
TOP_N = config_pb2.SpeculativeConfig(
    num_speculative_tokens=K,
    draft_sample_method=config_pb2.DRAFT_SAMPLE_METHOD_GUMBEL,
    draft_logits=config_pb2.DraftLogits(form=config_pb2.DRAFT_LOGITS_FORM_TOP_N, n=8),
)
CONFIGS = (GREEDY, DENSE, TOP_N)


def hello(config: config_pb2.SpeculativeConfig = GREEDY) -> pb.VerifierHello:
    """Return a hello that the drafter accepts."""
    return pb.VerifierHello(
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        verifier="fuzz",
        target=pb.TargetSpec(
            name="t", vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS, max_model_len=CONTEXT
        ),
        features=pb.FeatureSpec(layers=LAYERS, width=WIDTH, dtype=pb.DTYPE_FLOAT32),
        speculative_config=config,
        max_sequences=MAX_SEQUENCES,
        carriers=[pb.CARRIER_BYTES],
    )


def tensor(values: np.ndarray, shape: tuple[int, ...] | None = None) -> pb.Tensor:
    """Return a float32 or int32 array as a tensor message."""
    dtype = pb.DTYPE_FLOAT32 if values.dtype == np.float32 else pb.DTYPE_INT32
    return pb.Tensor(dtype=dtype, shape=shape or values.shape, data=values.tobytes())


@dataclass
class Writer:
    """Valid steps of one stream, and the state that a verifier keeps of its sequences."""

    rng: Random
    step_id: int = 0
    last_id: int = 0
    rows: dict[int, int] = field(default_factory=dict)  # accepted rows of each open sequence
    scale: float = 1.0
    others: list[tuple[int, int]] = field(default_factory=list)  # (id, accepted rows) of sequences of other streams

    def step(self, *, new: int = 1, most: int = 6) -> pb.DraftStep:
        """Return a step that opens `new` sequences, sends rows of some open sequences and requests drafts."""
        self.step_id += 1
        step = pb.DraftStep(step_id=self.step_id)
        for _ in range(min(new, MAX_SEQUENCES - len(self.rows))):
            self.last_id += self.rng.choice((1, 1, 7))
            self.rows[self.last_id] = 0
            step.opened.ids.append(self.last_id)
            step.opened.temperatures.append(self.rng.choice((0.0, 0.5, 1.0)))
            step.opened.proposal_keys.append(self.rng.getrandbits(64) - 2**63)
            step.opened.first_rows.append(0)
        chosen = [i for i in self.rows if i in step.opened.ids or self.rng.random() < 0.7]
        for sequence_id in chosen:
            count = self.rng.randrange(1, most)
            step.sequence_ids.append(sequence_id)
            step.first_rows.append(self.rows[sequence_id])
            step.num_rows.append(count)
            step.num_drafts.append(self.rng.randrange(K + 1))
            self.rows[sequence_id] += count
        total = sum(step.num_rows)
        if total:
            generator = np.random.default_rng(self.rng.getrandbits(64))
            step.tokens.CopyFrom(tensor(generator.integers(0, VOCAB_SIZE, total, np.int32)))
            features = generator.standard_normal((total, WIDTH), np.float32) * np.float32(self.scale)
            step.features.CopyFrom(tensor(features))
        return step


def set_hostile(rng: Random, message: Any) -> str:
    """Change one random field of a message, at any depth, to a value that may be invalid; return the field's name."""
    fields = list(message.DESCRIPTOR.fields)
    one = rng.choice(fields)
    if one.message_type is not None:
        if not one.is_repeated and rng.random() < 0.85:
            return f"{one.name}.{set_hostile(rng, getattr(message, one.name))}"
        if not one.is_repeated:
            message.ClearField(one.name)
        return str(one.name)
    if one.is_repeated:
        values = getattr(message, one.name)
        change = rng.randrange(4)
        if change == 0:
            del values[rng.randrange(len(values) + 1) :]
        elif change == 1 and len(values):
            values[rng.randrange(len(values))] = _hostile_value(rng, one)
        elif change == 2:
            values.extend(_hostile_value(rng, one) for _ in range(rng.choice((1, 2, 300))))
        else:
            values.extend(list(values))
        return str(one.name)
    setattr(message, one.name, _hostile_value(rng, one))
    return str(one.name)


def _hostile_value(rng: Random, one: Any) -> Any:
    kind = one.type
    if kind in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.TYPE_STRING:
        return rng.choice(("", "x", "\0\n\r\x1b[31m", "0" * 128, "0" * 129, "x" * 5000, "eagle3", "é" * 64))
    if kind == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 4, 31, 32, 33, 768, 4096)))
    if kind == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.TYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 4, 5, 6, 99, -1, 2**31 - 1))
    bits = 32 if kind in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT32) else 64
    value = rng.choice((*EDGES, rng.randrange(20), rng.getrandbits(64))) & (2**bits - 1)
    is_signed = kind in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SFIXED64)
    return value - 2**bits if is_signed and value >= 2 ** (bits - 1) else value


def hostile_features(rng: Random, step: pb.DraftStep) -> None:
    """Replace elements by NaN, infinities and extreme values."""
    values = np.frombuffer(step.features.data, np.float32).copy()
    bad = np.array([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, 1e20], np.float32)
    if len(values):
        share = rng.choice((0.001, 0.1, 1.0))
        generator = np.random.default_rng(rng.getrandbits(64))
        chosen = generator.random(len(values)) < share
        values[chosen] = generator.choice(bad, int(chosen.sum()))
    step.features.data = values.tobytes()


def hostile_step(rng: Random, writer: Writer) -> tuple[pb.DraftStep, str]:
    """Return a step with one field that may be invalid, and the field's name."""
    step = writer.step(new=rng.choice((0, 1, 2)), most=rng.choice((2, 6, 20)))
    kind = rng.randrange(10)
    if kind == 0:
        hostile_features(rng, step)
        return step, "features"
    if kind == 1 and step.num_rows:
        which = rng.randrange(len(step.first_rows))
        first = step.first_rows[which]
        step.first_rows[which] = rng.choice((0, first + 1, max(0, first - 1), CONTEXT, 2**32 - 1))
        return step, "first_rows"
    if kind == 2:
        ids = [rng.choice((0, 1, 2, 1000, 2**32, 2**64 - 1, _foreign(rng, writer)[0])) for _ in range(3)]
        step.closed_ids.extend(ids)
        return step, "closed_ids"
    if kind == 3 and step.sequence_ids:
        which, (foreign, rows) = rng.randrange(len(step.sequence_ids)), _foreign(rng, writer)
        step.sequence_ids[which] = rng.choice((0, 1, 2, 3, 999, 2**63, 2**64 - 1, *[foreign] * 7))
        if step.sequence_ids[which] == foreign:
            step.first_rows[which] = rows
        return step, "sequence_ids"
    if kind == 4:
        step.step_id = rng.choice((0, max(0, writer.step_id - 1), writer.step_id + 1, 2**64 - 1))
        return step, "step_id"
    if kind == 5 and step.num_drafts:
        step.num_drafts[rng.randrange(len(step.num_drafts))] = rng.choice((K, K + 1, 16, 17, 2**31, 2**32 - 1))
        return step, "num_drafts"
    if kind == 6 and step.HasField("tokens"):
        tokens = np.frombuffer(step.tokens.data, np.int32).copy()
        tokens[rng.randrange(len(tokens))] = rng.choice((-1, 0, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1, -(2**31)))
        step.tokens.data = tokens.tobytes()
        return step, "tokens"
    if kind == 7 and step.opened.ids:
        which = rng.randrange(len(step.opened.ids))
        step.opened.first_rows[which] = rng.choice((0, 1, CONTEXT - 1, CONTEXT, 2**31, 2**32 - 1))
        step.opened.temperatures[which] = rng.choice(FLOATS)
        return step, "opened"
    if kind == 8 and step.HasField("features"):
        target = rng.choice((step.features, step.tokens))
        change = rng.randrange(5)
        if change == 0:
            target.dtype = rng.choice((0, 1, 2, 3, 4, 5, 77))
        elif change == 1:
            rows = sum(step.num_rows)
            target.shape[:] = rng.choice(([], [0], [2**32 - 1], [2**32 - 1] * 8, [1, 1, 1], [rows, WIDTH + 1]))
        elif change == 2:
            target.data = target.data[: rng.randrange(len(target.data) + 1)]
        elif change == 3:
            target.data = target.data + rng.randbytes(rng.choice((1, 4, WIDTH * 4)))
        else:
            target.span.generation, target.span.offset = rng.choice(EDGES), rng.choice(EDGES)
        return step, "tensors"
    return step, set_hostile(rng, step)


def _foreign(rng: Random, writer: Writer) -> tuple[int, int]:
    """Return (id, number of rows) of a sequence of another stream; always draw one number from `rng`."""
    spot = rng.random()
    return writer.others[int(spot * len(writer.others))] if writer.others else (1000, 0)


def seeds() -> list[bytes]:
    """Return valid messages of a stream as seeds of mutations."""
    writer = Writer(Random(1))
    requests = [pb.DraftRequest(hello=hello(config)) for config in CONFIGS]
    requests += [pb.DraftRequest(step=writer.step(most=3)) for _ in range(2)]
    return [request.SerializeToString() for request in requests]
