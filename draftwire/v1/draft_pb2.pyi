from draftwire.v1 import config_pb2 as _config_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]

class Carrier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CARRIER_UNSPECIFIED: _ClassVar[Carrier]
    CARRIER_BYTES: _ClassVar[Carrier]
    CARRIER_SHM: _ClassVar[Carrier]
    CARRIER_CUDA_IPC: _ClassVar[Carrier]

class SequenceStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_STATUS_UNSPECIFIED: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_OK: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_UNKNOWN: _ClassVar[SequenceStatus]
    SEQUENCE_STATUS_NO_CAPACITY: _ClassVar[SequenceStatus]
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT16: DType
DTYPE_INT32: DType
DTYPE_INT64: DType
CARRIER_UNSPECIFIED: Carrier
CARRIER_BYTES: Carrier
CARRIER_SHM: Carrier
CARRIER_CUDA_IPC: Carrier
SEQUENCE_STATUS_UNSPECIFIED: SequenceStatus
SEQUENCE_STATUS_OK: SequenceStatus
SEQUENCE_STATUS_UNKNOWN: SequenceStatus
SEQUENCE_STATUS_NO_CAPACITY: SequenceStatus

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data", "span")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    span: SharedSpan
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., span: _Optional[_Union[SharedSpan, _Mapping]] = ...) -> None: ...

class SharedSpan(_message.Message):
    __slots__ = ("generation", "offset")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    generation: int
    offset: int
    def __init__(self, generation: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class Rendezvous(_message.Message):
    __slots__ = ("socket", "token")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    socket: str
    token: bytes
    def __init__(self, socket: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class SegmentOffer(_message.Message):
    __slots__ = ("carrier", "size", "nonce")
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    carrier: Carrier
    size: int
    nonce: bytes
    def __init__(self, carrier: _Optional[_Union[Carrier, str]] = ..., size: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class SegmentVerdict(_message.Message):
    __slots__ = ("shared", "detail")
    SHARED_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    shared: bool
    detail: str
    def __init__(self, shared: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class DraftRequest(_message.Message):
    __slots__ = ("hello", "step", "announce", "commit", "keep_alive")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_FIELD_NUMBER: _ClassVar[int]
    hello: VerifierHello
    step: DraftStep
    announce: Announce
    commit: Commit
    keep_alive: KeepAlive
    def __init__(self, hello: _Optional[_Union[VerifierHello, _Mapping]] = ..., step: _Optional[_Union[DraftStep, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., keep_alive: _Optional[_Union[KeepAlive, _Mapping]] = ...) -> None: ...

class KeepAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("hello", "drafts", "draining", "early")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    hello: DrafterHello
    drafts: Drafts
    draining: Draining
    early: EarlyDrafts
    def __init__(self, hello: _Optional[_Union[DrafterHello, _Mapping]] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., early: _Optional[_Union[EarlyDrafts, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class VerifierHello(_message.Message):
    __slots__ = ("protocol_version", "noise_version", "verifier", "target", "features", "speculative_config", "max_sequences", "carriers", "rendezvous", "confidences")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CARRIERS_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    noise_version: int
    verifier: str
    target: TargetSpec
    features: FeatureSpec
    speculative_config: _config_pb2.SpeculativeConfig
    max_sequences: int
    carriers: _containers.RepeatedScalarFieldContainer[Carrier]
    rendezvous: Rendezvous
    confidences: bool
    def __init__(self, protocol_version: _Optional[int] = ..., noise_version: _Optional[int] = ..., verifier: _Optional[str] = ..., target: _Optional[_Union[TargetSpec, _Mapping]] = ..., features: _Optional[_Union[FeatureSpec, _Mapping]] = ..., speculative_config: _Optional[_Union[_config_pb2.SpeculativeConfig, _Mapping]] = ..., max_sequences: _Optional[int] = ..., carriers: _Optional[_Iterable[_Union[Carrier, str]]] = ..., rendezvous: _Optional[_Union[Rendezvous, _Mapping]] = ..., confidences: _Optional[bool] = ...) -> None: ...

class TargetSpec(_message.Message):
    __slots__ = ("name", "fingerprint", "vocab_size", "hidden_size", "num_layers", "max_model_len")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_model_len: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class FeatureSpec(_message.Message):
    __slots__ = ("layers", "width", "dtype", "fused_for")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    FUSED_FOR_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    width: int
    dtype: DType
    fused_for: str
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., width: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., fused_for: _Optional[str] = ...) -> None: ...

class FeatureFusion(_message.Message):
    __slots__ = ("width", "num_norms", "norm_eps", "digest")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NUM_NORMS_FIELD_NUMBER: _ClassVar[int]
    NORM_EPS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    width: int
    num_norms: int
    norm_eps: float
    digest: str
    def __init__(self, width: _Optional[int] = ..., num_norms: _Optional[int] = ..., norm_eps: _Optional[float] = ..., digest: _Optional[str] = ...) -> None: ...

class GetFeatureFusionRequest(_message.Message):
    __slots__ = ("head_fingerprint",)
    HEAD_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    head_fingerprint: str
    def __init__(self, head_fingerprint: _Optional[str] = ...) -> None: ...

class FeatureFusionChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class DrafterHello(_message.Message):
    __slots__ = ("protocol_version", "noise_version", "info", "draft_token_ids", "carrier", "logits_carrier", "direct")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    LOGITS_CARRIER_FIELD_NUMBER: _ClassVar[int]
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    noise_version: int
    info: GetDrafterInfoResponse
    draft_token_ids: Tensor
    carrier: Carrier
    logits_carrier: Carrier
    direct: bool
    def __init__(self, protocol_version: _Optional[int] = ..., noise_version: _Optional[int] = ..., info: _Optional[_Union[GetDrafterInfoResponse, _Mapping]] = ..., draft_token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., carrier: _Optional[_Union[Carrier, str]] = ..., logits_carrier: _Optional[_Union[Carrier, str]] = ..., direct: _Optional[bool] = ...) -> None: ...

class DraftStep(_message.Message):
    __slots__ = ("step_id", "opened", "closed_ids", "sequence_ids", "first_rows", "num_rows", "num_drafts", "tokens", "features", "logits_read", "replaces")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LOGITS_READ_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    opened: OpenSequences
    closed_ids: _containers.RepeatedScalarFieldContainer[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    first_rows: _containers.RepeatedScalarFieldContainer[int]
    num_rows: _containers.RepeatedScalarFieldContainer[int]
    num_drafts: _containers.RepeatedScalarFieldContainer[int]
    tokens: Tensor
    features: Tensor
    logits_read: int
    replaces: int
    def __init__(self, step_id: _Optional[int] = ..., opened: _Optional[_Union[OpenSequences, _Mapping]] = ..., closed_ids: _Optional[_Iterable[int]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., first_rows: _Optional[_Iterable[int]] = ..., num_rows: _Optional[_Iterable[int]] = ..., num_drafts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Union[Tensor, _Mapping]] = ..., features: _Optional[_Union[Tensor, _Mapping]] = ..., logits_read: _Optional[int] = ..., replaces: _Optional[int] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("announced_id", "sequence_ids", "first_rows", "num_drafts", "columns", "num_rows", "features")
    ANNOUNCED_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    announced_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    first_rows: _containers.RepeatedScalarFieldContainer[int]
    num_drafts: int
    columns: int
    num_rows: int
    features: SharedSpan
    def __init__(self, announced_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., first_rows: _Optional[_Iterable[int]] = ..., num_drafts: _Optional[int] = ..., columns: _Optional[int] = ..., num_rows: _Optional[int] = ..., features: _Optional[_Union[SharedSpan, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("step_id", "announced_id", "closed_ids", "num_drafts", "logits_read")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_ID_FIELD_NUMBER: _ClassVar[int]
    CLOSED_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_READ_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    announced_id: int
    closed_ids: _containers.RepeatedScalarFieldContainer[int]
    num_drafts: _containers.RepeatedScalarFieldContainer[int]
    logits_read: int
    def __init__(self, step_id: _Optional[int] = ..., announced_id: _Optional[int] = ..., closed_ids: _Optional[_Iterable[int]] = ..., num_drafts: _Optional[_Iterable[int]] = ..., logits_read: _Optional[int] = ...) -> None: ...

class OpenSequences(_message.Message):
    __slots__ = ("ids", "temperatures", "proposal_keys", "first_rows", "request_ids", "traceparents")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROWS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENTS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    temperatures: _containers.RepeatedScalarFieldContainer[float]
    proposal_keys: _containers.RepeatedScalarFieldContainer[int]
    first_rows: _containers.RepeatedScalarFieldContainer[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    traceparents: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., temperatures: _Optional[_Iterable[float]] = ..., proposal_keys: _Optional[_Iterable[int]] = ..., first_rows: _Optional[_Iterable[int]] = ..., request_ids: _Optional[_Iterable[str]] = ..., traceparents: _Optional[_Iterable[str]] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("step_id", "sequence_ids", "statuses", "committed_lengths", "last_tokens", "num_drafts", "tokens", "logits", "logits_token_ids", "load", "compute_time_s", "features_read", "confidences")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    FEATURES_READ_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    statuses: _containers.RepeatedScalarFieldContainer[SequenceStatus]
    committed_lengths: _containers.RepeatedScalarFieldContainer[int]
    last_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_drafts: _containers.RepeatedScalarFieldContainer[int]
    tokens: Tensor
    logits: Tensor
    logits_token_ids: Tensor
    load: DrafterLoad
    compute_time_s: float
    features_read: int
    confidences: Tensor
    def __init__(self, step_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., statuses: _Optional[_Iterable[_Union[SequenceStatus, str]]] = ..., committed_lengths: _Optional[_Iterable[int]] = ..., last_tokens: _Optional[_Iterable[int]] = ..., num_drafts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Union[Tensor, _Mapping]] = ..., logits: _Optional[_Union[Tensor, _Mapping]] = ..., logits_token_ids: _Optional[_Union[Tensor, _Mapping]] = ..., load: _Optional[_Union[DrafterLoad, _Mapping]] = ..., compute_time_s: _Optional[float] = ..., features_read: _Optional[int] = ..., confidences: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class EarlyDrafts(_message.Message):
    __slots__ = ("announced_id",)
    ANNOUNCED_ID_FIELD_NUMBER: _ClassVar[int]
    announced_id: int
    def __init__(self, announced_id: _Optional[int] = ...) -> None: ...

class DrafterLoad(_message.Message):
    __slots__ = ("sessions", "sequences", "kv_cache_usage")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    sequences: int
    kv_cache_usage: float
    def __init__(self, sessions: _Optional[int] = ..., sequences: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ...) -> None: ...

class MemoryUse(_message.Message):
    __slots__ = ("kv_cache_token_bytes", "kv_cache_tokens", "draft_logits_bytes", "features_bytes", "peak_gpu_allocated_bytes", "peak_gpu_reserved_bytes", "peak_host_bytes")
    KV_CACHE_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LOGITS_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_GPU_ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_GPU_RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    kv_cache_token_bytes: int
    kv_cache_tokens: int
    draft_logits_bytes: int
    features_bytes: int
    peak_gpu_allocated_bytes: int
    peak_gpu_reserved_bytes: int
    peak_host_bytes: int
    def __init__(self, kv_cache_token_bytes: _Optional[int] = ..., kv_cache_tokens: _Optional[int] = ..., draft_logits_bytes: _Optional[int] = ..., features_bytes: _Optional[int] = ..., peak_gpu_allocated_bytes: _Optional[int] = ..., peak_gpu_reserved_bytes: _Optional[int] = ..., peak_host_bytes: _Optional[int] = ...) -> None: ...

class GetDrafterInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDrafterInfoResponse(_message.Message):
    __slots__ = ("version", "method", "head", "head_fingerprint", "target_vocab_size", "target_hidden_size", "target_num_layers", "features", "draft_vocab_size", "max_num_speculative_tokens", "max_sequences", "max_model_len", "draft_logits_forms", "device", "dtype", "load", "protocol_version", "noise_version", "fusion", "memory")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    HEAD_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TARGET_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LOGITS_FORMS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FUSION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    version: str
    method: str
    head: str
    head_fingerprint: str
    target_vocab_size: int
    target_hidden_size: int
    target_num_layers: int
    features: FeatureSpec
    draft_vocab_size: int
    max_num_speculative_tokens: int
    max_sequences: int
    max_model_len: int
    draft_logits_forms: _containers.RepeatedScalarFieldContainer[_config_pb2.DraftLogitsForm]
    device: str
    dtype: str
    load: DrafterLoad
    protocol_version: int
    noise_version: int
    fusion: FeatureFusion
    memory: MemoryUse
    def __init__(self, version: _Optional[str] = ..., method: _Optional[str] = ..., head: _Optional[str] = ..., head_fingerprint: _Optional[str] = ..., target_vocab_size: _Optional[int] = ..., target_hidden_size: _Optional[int] = ..., target_num_layers: _Optional[int] = ..., features: _Optional[_Union[FeatureSpec, _Mapping]] = ..., draft_vocab_size: _Optional[int] = ..., max_num_speculative_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_model_len: _Optional[int] = ..., draft_logits_forms: _Optional[_Iterable[_Union[_config_pb2.DraftLogitsForm, str]]] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., load: _Optional[_Union[DrafterLoad, _Mapping]] = ..., protocol_version: _Optional[int] = ..., noise_version: _Optional[int] = ..., fusion: _Optional[_Union[FeatureFusion, _Mapping]] = ..., memory: _Optional[_Union[MemoryUse, _Mapping]] = ...) -> None: ...
