from draftwire.v1 import config_pb2 as _config_pb2
from draftwire.v1 import draft_pb2 as _draft_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class FallbackCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FALLBACK_CAUSE_UNSPECIFIED: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_NOT_ASKED: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_LAST_TOKEN: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_NO_DRAFTER: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_EXPELLED: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_AT_CAPACITY: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_TOO_LONG: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_NOT_TAKEN: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_LATE: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_CATCHING_UP: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_NO_FEATURES: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_PACE: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_EMPTY_ANSWER: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_KV_CACHE: _ClassVar[FallbackCause]
    FALLBACK_CAUSE_STRUCTURED_OUTPUT: _ClassVar[FallbackCause]

class DrafterState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFTER_STATE_UNSPECIFIED: _ClassVar[DrafterState]
    DRAFTER_STATE_CONNECTING: _ClassVar[DrafterState]
    DRAFTER_STATE_READY: _ClassVar[DrafterState]
    DRAFTER_STATE_REFUSED: _ClassVar[DrafterState]
    DRAFTER_STATE_DRAINING: _ClassVar[DrafterState]
    DRAFTER_STATE_SLOW: _ClassVar[DrafterState]
    DRAFTER_STATE_PROBING: _ClassVar[DrafterState]
    DRAFTER_STATE_EXPELLED: _ClassVar[DrafterState]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FALLBACK_CAUSE_UNSPECIFIED: FallbackCause
FALLBACK_CAUSE_NOT_ASKED: FallbackCause
FALLBACK_CAUSE_LAST_TOKEN: FallbackCause
FALLBACK_CAUSE_NO_DRAFTER: FallbackCause
FALLBACK_CAUSE_EXPELLED: FallbackCause
FALLBACK_CAUSE_AT_CAPACITY: FallbackCause
FALLBACK_CAUSE_TOO_LONG: FallbackCause
FALLBACK_CAUSE_NOT_TAKEN: FallbackCause
FALLBACK_CAUSE_LATE: FallbackCause
FALLBACK_CAUSE_CATCHING_UP: FallbackCause
FALLBACK_CAUSE_NO_FEATURES: FallbackCause
FALLBACK_CAUSE_PACE: FallbackCause
FALLBACK_CAUSE_EMPTY_ANSWER: FallbackCause
FALLBACK_CAUSE_KV_CACHE: FallbackCause
FALLBACK_CAUSE_STRUCTURED_OUTPUT: FallbackCause
DRAFTER_STATE_UNSPECIFIED: DrafterState
DRAFTER_STATE_CONNECTING: DrafterState
DRAFTER_STATE_READY: DrafterState
DRAFTER_STATE_REFUSED: DrafterState
DRAFTER_STATE_DRAINING: DrafterState
DRAFTER_STATE_SLOW: DrafterState
DRAFTER_STATE_PROBING: DrafterState
DRAFTER_STATE_EXPELLED: DrafterState

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "chat", "sampling_params", "num_speculative_tokens", "request_id", "truncate_prompt_tokens", "priority", "cache_salt", "n")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling_params: _config_pb2.SamplingParams
    num_speculative_tokens: int
    request_id: str
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str
    n: int
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling_params: _Optional[_Union[_config_pb2.SamplingParams, _Mapping]] = ..., num_speculative_tokens: _Optional[int] = ..., request_id: _Optional[str] = ..., truncate_prompt_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., n: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "continue_final_message", "template_arguments", "tools")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    continue_final_message: bool
    template_arguments: str
    tools: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., continue_final_message: _Optional[bool] = ..., template_arguments: _Optional[str] = ..., tools: _Optional[_Iterable[str]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedScalarFieldContainer[str]
    tool_call_id: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[str]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "chat")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "max_model_len")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_model_len: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., max_model_len: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("token_ids", "text", "drafted", "logprobs", "finish_reason", "stop_text", "stop_token_id", "statistics", "request_id", "token_text_ends", "index", "prompt_logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXT_ENDS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    drafted: _containers.RepeatedScalarFieldContainer[bool]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: FinishReason
    stop_text: str
    stop_token_id: int
    statistics: RequestStatistics
    request_id: str
    token_text_ends: _containers.RepeatedScalarFieldContainer[int]
    index: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., drafted: _Optional[_Iterable[bool]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_text: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., statistics: _Optional[_Union[RequestStatistics, _Mapping]] = ..., request_id: _Optional[str] = ..., token_text_ends: _Optional[_Iterable[int]] = ..., index: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "rank", "top_ids", "top_logprobs", "text", "top_texts", "token_id")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOP_TEXTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    text: str
    top_texts: _containers.RepeatedScalarFieldContainer[str]
    token_id: int
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., text: _Optional[str] = ..., top_texts: _Optional[_Iterable[str]] = ..., token_id: _Optional[int] = ...) -> None: ...

class RequestStatistics(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "verify_steps", "verify_tokens", "drafted", "accepted", "time_to_first_token_s", "total_time_s", "queue_time_s", "synthetic_acceptance", "prefix_hit_tokens", "preemptions")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TIME_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_S_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    verify_steps: int
    verify_tokens: int
    drafted: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    time_to_first_token_s: float
    total_time_s: float
    queue_time_s: float
    synthetic_acceptance: bool
    prefix_hit_tokens: int
    preemptions: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., verify_steps: _Optional[int] = ..., verify_tokens: _Optional[int] = ..., drafted: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., time_to_first_token_s: _Optional[float] = ..., total_time_s: _Optional[float] = ..., queue_time_s: _Optional[float] = ..., synthetic_acceptance: _Optional[bool] = ..., prefix_hit_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ...) -> None: ...

class GetVerifierInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVerifierInfoResponse(_message.Message):
    __slots__ = ("version", "target", "target_fingerprint", "vocab_size", "max_model_len", "max_num_seqs", "max_queue", "speculative_config", "drafters", "requests_running", "requests_waiting", "device", "dtype", "has_tokenizer", "counters", "memory", "server_memory", "default_sampling_params", "kv_cache_tokens", "kv_cache_usage", "waiting_tokens")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_CONFIG_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SERVER_MEMORY_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    version: str
    target: str
    target_fingerprint: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_queue: int
    speculative_config: _config_pb2.SpeculativeConfig
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterStatus]
    requests_running: int
    requests_waiting: int
    device: str
    dtype: str
    has_tokenizer: bool
    counters: EngineCounters
    memory: _draft_pb2.MemoryUse
    server_memory: _draft_pb2.MemoryUse
    default_sampling_params: _config_pb2.SamplingParams
    kv_cache_tokens: int
    kv_cache_usage: float
    waiting_tokens: int
    def __init__(self, version: _Optional[str] = ..., target: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_queue: _Optional[int] = ..., speculative_config: _Optional[_Union[_config_pb2.SpeculativeConfig, _Mapping]] = ..., drafters: _Optional[_Iterable[_Union[DrafterStatus, _Mapping]]] = ..., requests_running: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., has_tokenizer: _Optional[bool] = ..., counters: _Optional[_Union[EngineCounters, _Mapping]] = ..., memory: _Optional[_Union[_draft_pb2.MemoryUse, _Mapping]] = ..., server_memory: _Optional[_Union[_draft_pb2.MemoryUse, _Mapping]] = ..., default_sampling_params: _Optional[_Union[_config_pb2.SamplingParams, _Mapping]] = ..., kv_cache_tokens: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., waiting_tokens: _Optional[int] = ...) -> None: ...

class EngineCounters(_message.Message):
    __slots__ = ("steps", "prompt_rows", "verify_steps", "verify_rows", "times", "traffic", "preemptions", "prefix_hit_rows", "fallbacks", "accepted_drafts", "prefix_cache_queries", "prefix_cache_hits")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROWS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_ROWS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_ROWS_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    steps: int
    prompt_rows: int
    verify_steps: int
    verify_rows: int
    times: PhaseTimes
    traffic: _containers.RepeatedCompositeFieldContainer[CarrierTraffic]
    preemptions: int
    prefix_hit_rows: int
    fallbacks: _containers.RepeatedCompositeFieldContainer[FallbackCount]
    accepted_drafts: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    def __init__(self, steps: _Optional[int] = ..., prompt_rows: _Optional[int] = ..., verify_steps: _Optional[int] = ..., verify_rows: _Optional[int] = ..., times: _Optional[_Union[PhaseTimes, _Mapping]] = ..., traffic: _Optional[_Iterable[_Union[CarrierTraffic, _Mapping]]] = ..., preemptions: _Optional[int] = ..., prefix_hit_rows: _Optional[int] = ..., fallbacks: _Optional[_Iterable[_Union[FallbackCount, _Mapping]]] = ..., accepted_drafts: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ...) -> None: ...

class FallbackCount(_message.Message):
    __slots__ = ("cause", "tokens")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    cause: FallbackCause
    tokens: int
    def __init__(self, cause: _Optional[_Union[FallbackCause, str]] = ..., tokens: _Optional[int] = ...) -> None: ...

class PhaseTimes(_message.Message):
    __slots__ = ("draft_s", "wire_s", "verify_s", "sample_s", "host_s", "idle_s")
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_S_FIELD_NUMBER: _ClassVar[int]
    HOST_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    draft_s: float
    wire_s: float
    verify_s: float
    sample_s: float
    host_s: float
    idle_s: float
    def __init__(self, draft_s: _Optional[float] = ..., wire_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., sample_s: _Optional[float] = ..., host_s: _Optional[float] = ..., idle_s: _Optional[float] = ...) -> None: ...

class CarrierTraffic(_message.Message):
    __slots__ = ("carrier", "steps", "feature_rows", "feature_bytes", "logits_bytes")
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_ROWS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGITS_BYTES_FIELD_NUMBER: _ClassVar[int]
    carrier: _draft_pb2.Carrier
    steps: int
    feature_rows: int
    feature_bytes: int
    logits_bytes: int
    def __init__(self, carrier: _Optional[_Union[_draft_pb2.Carrier, str]] = ..., steps: _Optional[int] = ..., feature_rows: _Optional[int] = ..., feature_bytes: _Optional[int] = ..., logits_bytes: _Optional[int] = ...) -> None: ...

class DrafterStatus(_message.Message):
    __slots__ = ("address", "state", "detail", "head_fingerprint", "sequences", "feature_row_bytes", "features_carrier", "logits_carrier", "sent_message_bytes", "received_message_bytes", "features_are_fused", "is_direct", "drafted", "accepted", "other_sequences", "kv_cache_usage", "memory", "plan", "offered", "expected")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    HEAD_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FEATURE_ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_CARRIER_FIELD_NUMBER: _ClassVar[int]
    LOGITS_CARRIER_FIELD_NUMBER: _ClassVar[int]
    SENT_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_ARE_FUSED_FIELD_NUMBER: _ClassVar[int]
    IS_DIRECT_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    OTHER_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: DrafterState
    detail: str
    head_fingerprint: str
    sequences: int
    feature_row_bytes: int
    features_carrier: _draft_pb2.Carrier
    logits_carrier: _draft_pb2.Carrier
    sent_message_bytes: int
    received_message_bytes: int
    features_are_fused: bool
    is_direct: bool
    drafted: int
    accepted: int
    other_sequences: int
    kv_cache_usage: float
    memory: _draft_pb2.MemoryUse
    plan: DraftPlan
    offered: int
    expected: float
    def __init__(self, address: _Optional[str] = ..., state: _Optional[_Union[DrafterState, str]] = ..., detail: _Optional[str] = ..., head_fingerprint: _Optional[str] = ..., sequences: _Optional[int] = ..., feature_row_bytes: _Optional[int] = ..., features_carrier: _Optional[_Union[_draft_pb2.Carrier, str]] = ..., logits_carrier: _Optional[_Union[_draft_pb2.Carrier, str]] = ..., sent_message_bytes: _Optional[int] = ..., received_message_bytes: _Optional[int] = ..., features_are_fused: _Optional[bool] = ..., is_direct: _Optional[bool] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., other_sequences: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., memory: _Optional[_Union[_draft_pb2.MemoryUse, _Mapping]] = ..., plan: _Optional[_Union[DraftPlan, _Mapping]] = ..., offered: _Optional[int] = ..., expected: _Optional[float] = ...) -> None: ...

class DraftPlan(_message.Message):
    __slots__ = ("num_drafts", "expected_gain", "best_num_drafts", "step_s", "answer_s", "tokens_per_s")
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GAIN_FIELD_NUMBER: _ClassVar[int]
    BEST_NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    ANSWER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    num_drafts: int
    expected_gain: float
    best_num_drafts: int
    step_s: float
    answer_s: float
    tokens_per_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, num_drafts: _Optional[int] = ..., expected_gain: _Optional[float] = ..., best_num_drafts: _Optional[int] = ..., step_s: _Optional[float] = ..., answer_s: _Optional[float] = ..., tokens_per_s: _Optional[_Iterable[float]] = ...) -> None: ...
