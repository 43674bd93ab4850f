from google.protobuf import descriptor_pb2 as _descriptor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftSampleMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_SAMPLE_METHOD_UNSPECIFIED: _ClassVar[DraftSampleMethod]
    DRAFT_SAMPLE_METHOD_GREEDY: _ClassVar[DraftSampleMethod]
    DRAFT_SAMPLE_METHOD_GUMBEL: _ClassVar[DraftSampleMethod]

class DraftLogitsForm(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_LOGITS_FORM_UNSPECIFIED: _ClassVar[DraftLogitsForm]
    DRAFT_LOGITS_FORM_NONE: _ClassVar[DraftLogitsForm]
    DRAFT_LOGITS_FORM_DENSE: _ClassVar[DraftLogitsForm]
    DRAFT_LOGITS_FORM_TOP_N: _ClassVar[DraftLogitsForm]

class RejectionSampleMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECTION_SAMPLE_METHOD_UNSPECIFIED: _ClassVar[RejectionSampleMethod]
    REJECTION_SAMPLE_METHOD_STANDARD: _ClassVar[RejectionSampleMethod]
    REJECTION_SAMPLE_METHOD_SYNTHETIC: _ClassVar[RejectionSampleMethod]
    REJECTION_SAMPLE_METHOD_BLOCK: _ClassVar[RejectionSampleMethod]
    REJECTION_SAMPLE_METHOD_COUPLED: _ClassVar[RejectionSampleMethod]
DRAFT_SAMPLE_METHOD_UNSPECIFIED: DraftSampleMethod
DRAFT_SAMPLE_METHOD_GREEDY: DraftSampleMethod
DRAFT_SAMPLE_METHOD_GUMBEL: DraftSampleMethod
DRAFT_LOGITS_FORM_UNSPECIFIED: DraftLogitsForm
DRAFT_LOGITS_FORM_NONE: DraftLogitsForm
DRAFT_LOGITS_FORM_DENSE: DraftLogitsForm
DRAFT_LOGITS_FORM_TOP_N: DraftLogitsForm
REJECTION_SAMPLE_METHOD_UNSPECIFIED: RejectionSampleMethod
REJECTION_SAMPLE_METHOD_STANDARD: RejectionSampleMethod
REJECTION_SAMPLE_METHOD_SYNTHETIC: RejectionSampleMethod
REJECTION_SAMPLE_METHOD_BLOCK: RejectionSampleMethod
REJECTION_SAMPLE_METHOD_COUPLED: RejectionSampleMethod
LIMITS_FIELD_NUMBER: _ClassVar[int]
limits: _descriptor.FieldDescriptor

class Limits(_message.Message):
    __slots__ = ("default", "min", "max", "exclusive_min", "max_items", "max_bytes")
    DEFAULT_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    EXCLUSIVE_MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    default: float
    min: float
    max: float
    exclusive_min: bool
    max_items: int
    max_bytes: int
    def __init__(self, default: _Optional[float] = ..., min: _Optional[float] = ..., max: _Optional[float] = ..., exclusive_min: _Optional[bool] = ..., max_items: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar", "choice", "structural_tag")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choice: Choice
    structural_tag: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., structural_tag: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "allowed_token_ids", "bad_words", "bad_word_ids", "skip_special_tokens", "include_stop_text", "prompt_logprobs", "structured_output")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    bad_word_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    skip_special_tokens: bool
    include_stop_text: bool
    prompt_logprobs: int
    structured_output: StructuredOutput
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., bad_word_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., skip_special_tokens: _Optional[bool] = ..., include_stop_text: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftLogits(_message.Message):
    __slots__ = ("form", "n")
    FORM_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    form: DraftLogitsForm
    n: int
    def __init__(self, form: _Optional[_Union[DraftLogitsForm, str]] = ..., n: _Optional[int] = ...) -> None: ...

class SpeculativeConfig(_message.Message):
    __slots__ = ("num_speculative_tokens", "draft_sample_method", "draft_logits", "rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length", "use_fp64_gumbel", "method", "model", "synthetic_confidence_skill")
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SAMPLE_METHOD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LOGITS_FIELD_NUMBER: _ClassVar[int]
    REJECTION_SAMPLE_METHOD_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_ACCEPTANCE_RATES_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    USE_FP64_GUMBEL_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_CONFIDENCE_SKILL_FIELD_NUMBER: _ClassVar[int]
    num_speculative_tokens: int
    draft_sample_method: DraftSampleMethod
    draft_logits: DraftLogits
    rejection_sample_method: RejectionSampleMethod
    synthetic_acceptance_rates: _containers.RepeatedScalarFieldContainer[float]
    synthetic_acceptance_length: float
    use_fp64_gumbel: bool
    method: str
    model: str
    synthetic_confidence_skill: float
    def __init__(self, num_speculative_tokens: _Optional[int] = ..., draft_sample_method: _Optional[_Union[DraftSampleMethod, str]] = ..., draft_logits: _Optional[_Union[DraftLogits, _Mapping]] = ..., rejection_sample_method: _Optional[_Union[RejectionSampleMethod, str]] = ..., synthetic_acceptance_rates: _Optional[_Iterable[float]] = ..., synthetic_acceptance_length: _Optional[float] = ..., use_fp64_gumbel: _Optional[bool] = ..., method: _Optional[str] = ..., model: _Optional[str] = ..., synthetic_confidence_skill: _Optional[float] = ...) -> None: ...
