"""The verifier's handshake with a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from draftwire.contract import validation as cfg
from draftwire.contract.errors import MismatchError
from draftwire.contract.version import PROTOCOL_VERSION
from draftwire.model.fusion import FeatureFusion
from draftwire.model.tensors import DTYPES, WIRE_DTYPES, decode_tensor
from draftwire.transport import carrier_name
from draftwire.v1 import config_pb2, draft_pb2
from draftwire_kernels import NOISE_VERSION
from verifier_service.drafters.stream import HeadInfo
from verifier_service.target.target import Target

# Maximum number of hidden states in a feature row.
MAX_FEATURE_LAYERS = 16
# Maximum length of a head's fingerprint, characters; clients see the fingerprint.
MAX_FINGERPRINT = 64
FEATURE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Handshake:
    """The verifier's side of the handshake. If a drafter does not match, MismatchError has both values."""

    def __init__(
        self,
        target: Target,
        config: config_pb2.SpeculativeConfig,
        max_sequences: int,
        carriers: Sequence[draft_pb2.Carrier],
        *,
        confidences: bool = False,
    ) -> None:
        """`carriers`: those that the verifier can use, best first; `confidences`: whether answers have confidences."""
        self._target = target
        self._config = config
        self._max_sequences = max_sequences
        self._carriers = carriers
        self._confidences = confidences

    def check(self, info: draft_pb2.GetDrafterInfoResponse) -> None:
        """Reject a drafter that cannot serve this target."""
        config = self._config
        pairs = [
            ("protocol_version", PROTOCOL_VERSION, info.protocol_version),
            ("vocab_size", self._target.vocab_size, info.target_vocab_size),
            ("hidden_size", self._target.hidden_size, info.target_hidden_size),
        ]
        if config.draft_sample_method == cfg.GUMBEL:
            pairs.append(("noise_version", NOISE_VERSION, info.noise_version))
        if info.target_num_layers:
            pairs.append(("num_layers", self._target.num_layers, info.target_num_layers))
        for name, ours, theirs in pairs:
            if ours != theirs:
                raise MismatchError(f"{name} does not match: verifier {ours}, drafter {theirs}")
        if len(info.head_fingerprint) > MAX_FINGERPRINT:
            raise MismatchError(
                f"head_fingerprint does not fit: verifier at most {MAX_FINGERPRINT} characters, "
                f"drafter {len(info.head_fingerprint)}"
            )
        if config.HasField("method") and config.method != info.method:
            raise MismatchError(f"method does not match: verifier {config.method!r}, drafter {info.method!r}")
        self._check_features(info.features)
        if config.num_speculative_tokens > info.max_num_speculative_tokens:
            raise MismatchError(
                f"num_speculative_tokens does not fit: verifier {config.num_speculative_tokens}, "
                f"drafter at most {info.max_num_speculative_tokens}"
            )
        logits = config.draft_logits
        if info.draft_vocab_size > self._target.vocab_size:
            raise MismatchError(
                f"draft_vocab_size does not fit: verifier at most {self._target.vocab_size}, "
                f"drafter {info.draft_vocab_size}"
            )
        if logits.form not in info.draft_logits_forms or logits.n > info.draft_vocab_size:
            raise MismatchError(
                f"draft_logits do not fit: verifier {cfg.draft_logits_text(logits)}, "
                f"drafter forms {list(info.draft_logits_forms)} of {info.draft_vocab_size} logits"
            )

    def _check_features(self, features: draft_pb2.FeatureSpec) -> None:
        layers = list(features.layers)
        is_known = len(layers) <= MAX_FEATURE_LAYERS and layers == sorted(set(layers))
        if not layers or not is_known or layers[-1] > self._target.num_layers:
            raise MismatchError(
                f"features do not fit: drafter layers {layers[:MAX_FEATURE_LAYERS]}, "
                f"verifier different ones of 0 to {self._target.num_layers}, ascending"
            )
        width = len(layers) * self._target.hidden_size
        if features.width != width or DTYPES.get(features.dtype) not in FEATURE_DTYPES:
            raise MismatchError(
                f"features do not fit: drafter width {features.width} of dtype {features.dtype}, "
                f"verifier width {width} of dtypes {[WIRE_DTYPES[dtype] for dtype in FEATURE_DTYPES]}"
            )

    def hello(self, info: draft_pb2.GetDrafterInfoResponse, fusion: FeatureFusion | None) -> draft_pb2.VerifierHello:
        """Return the verifier's hello to a drafter with this description."""
        target = self._target
        features = draft_pb2.FeatureSpec(
            layers=info.features.layers,
            width=len(info.features.layers) * target.hidden_size,
            dtype=info.features.dtype,
        )
        if fusion is not None:
            features.width, features.fused_for = info.fusion.width, info.head_fingerprint
        return draft_pb2.VerifierHello(
            protocol_version=PROTOCOL_VERSION,
            noise_version=NOISE_VERSION,
            verifier=Path(target.name).name.encode()[:128].decode(errors="ignore"),
            target=draft_pb2.TargetSpec(
                name=target.name,
                fingerprint=target.fingerprint,
                vocab_size=target.vocab_size,
                hidden_size=target.hidden_size,
                num_layers=target.num_layers,
                max_model_len=target.max_model_len,
            ),
            features=features,
            speculative_config=self._config,
            max_sequences=min(self._max_sequences, info.max_sequences),
            carriers=self._carriers,
            confidences=self._confidences,
        )

    def accept(
        self,
        answer: draft_pb2.DraftResponse,
        info: draft_pb2.GetDrafterInfoResponse,
        fusion: FeatureFusion | None,
    ) -> HeadInfo:
        """Return the head of a drafter's hello, which is checked again, because it may have changed since the info."""
        hello = answer.hello
        if answer.WhichOneof("message") != "hello" or hello.carrier not in self._carriers:
            offered = ", ".join(carrier_name(carrier) for carrier in self._carriers)
            raise MismatchError(f"the drafter's first message must be a hello with one of the carriers {offered}")
        self.check(hello.info)
        if fusion is not None and (hello.info.head_fingerprint, hello.info.fusion) != (
            info.head_fingerprint,
            info.fusion,
        ):
            raise MismatchError(f"the head has changed: {info.head_fingerprint} to {hello.info.head_fingerprint}")
        return _head_info(hello, self._target.vocab_size, fusion, confidences=self._confidences)


def _head_info(
    hello: draft_pb2.DrafterHello, vocab_size: int, fusion: FeatureFusion | None, *, confidences: bool
) -> HeadInfo:
    info = hello.info
    width = info.features.width if fusion is None else info.fusion.width
    token_ids = None
    if hello.HasField("draft_token_ids"):
        shape = (info.draft_vocab_size,)
        token_ids = decode_tensor(hello.draft_token_ids, "draft_token_ids", torch.int32, shape).to(torch.int64)
        is_known = len(token_ids) and int(token_ids.min()) >= 0 and int(token_ids.max()) < vocab_size
        # With two columns for one token, q would differ from the distribution that drafts are sampled from.
        if not is_known or len(token_ids.unique()) < len(token_ids):
            raise MismatchError(f"draft_token_ids must be in [0, {vocab_size}), at least one and all different")
    elif info.draft_vocab_size != vocab_size:
        raise MismatchError(
            f"draft_token_ids are missing: drafter vocabulary {info.draft_vocab_size}, {vocab_size} here"
        )
    return HeadInfo(
        fingerprint=info.head_fingerprint,
        layers=tuple(info.features.layers),
        dtype=DTYPES[info.features.dtype],
        draft_vocab_size=info.draft_vocab_size,
        draft_token_ids=token_ids,
        row_bytes=width * DTYPES[info.features.dtype].itemsize,
        max_drafts=info.max_num_speculative_tokens,
        max_sequences=info.max_sequences,
        max_model_len=info.max_model_len,
        fusion=fusion,
        fusion_digest=info.fusion.digest,
        confidences=confidences,
    )
