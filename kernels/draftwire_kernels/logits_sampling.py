"""The per-request parameters of `process_logits`, as tensors."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Penalties:
    """Penalties of all requests, and the token history of requests with penalties.

    Attributes
    ----------
    repetition, presence, frequency : Tensor
        [B] float32; 1, 0 and 0 are off.
    slot : Tensor
        [B] int64, the request's row of the two tables, -1 for a request without penalties. May be permuted or sparse,
        so that the tables can be kept between steps.
    prompt_mask : Tensor
        [S, V] bool, tokens that occur in the prompt.
    output_counts : Tensor
        [S, V] int32, occurrences of each token in the output so far, without drafts of this step: `process_logits` adds
        the rows' draft prefixes.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    slot: Tensor
    prompt_mask: Tensor
    output_counts: Tensor


@dataclass(frozen=True)
class LogitBias:
    """Sparse bias of all requests, added to each of a request's rows.

    Entries for the same request and token add up.

    Attributes
    ----------
    slot : Tensor
        [B] int64, the request's row of the two tables, -1 for a request without bias. The tables can be kept between
        steps, as in `Penalties`.
    token : Tensor
        [S, M] int64, valid ids; unused entries have the value 0.
    value : Tensor
        [S, M] float32, added to the logit of `token`.
    """

    slot: Tensor
    token: Tensor
    value: Tensor


@dataclass(frozen=True)
class Suppression:
    """Tokens set to -inf in single rows (end tokens before min_tokens).

    Attributes
    ----------
    row : Tensor
        [N] int64, rows of the logits.
    slot : Tensor
        [N] int64, the row of `token` with the tokens to suppress.
    token : Tensor
        [S, M] int64, valid ids; a short list repeats one of its tokens.
    """

    row: Tensor
    slot: Tensor
    token: Tensor


@dataclass(frozen=True)
class AllowedTokens:
    """The tokens that a request may sample; all others are set to -inf in each of its rows.

    Attributes
    ----------
    slot : Tensor
        [B] int64, the request's row of the table, -1 for a request that may sample every token.
    mask : Tensor
        [S, V] bool, True for allowed tokens.
    """

    slot: Tensor
    mask: Tensor


@dataclass(frozen=True)
class ForbiddenSequences:
    """Sequences of tokens that the output must not contain (bad words).

    The last token of a sequence is set to -inf in a row whose output, including the row's draft prefix, ends with the
    tokens before the last one. The prompt is not considered. Semantics of vLLM's ``bad_words`` (vLLM PRs 9717, 13376).

    Attributes
    ----------
    slot : Tensor
        [B] int64, the request's row of the three tables, -1 for a request without sequences.
    last : Tensor
        [S, M] int64, the last token of each sequence, a valid id; a short list repeats one of its sequences.
    before : Tensor
        [S, M, L] int64, the tokens before the last one, right-aligned and padded with -2.
    tail : Tensor
        [S, L] int64, the last tokens of the output, right-aligned and padded with -1, without drafts of this step:
        `process_logits` adds the rows' draft prefixes.
    """

    slot: Tensor
    last: Tensor
    before: Tensor
    tail: Tensor


@dataclass(frozen=True)
class LogitsSampling:
    """The parameters of `process_logits` for each request; a field that no request uses is None.

    Tensors are on the device of the logits or, except the tables of `allowed`, `forbidden`, `penalties`, `bias` and
    `suppression`, on the CPU. If `cu_rows` and the fields in use are on the CPU, the device is not synchronised.

    Attributes
    ----------
    cu_rows : Tensor
        [B + 1] int32, prefix sums of the requests' rows (k_b + 1 each), as in `rejection_sample`.
    temperature : Tensor
        [B] float32; the filters use softmax(logits / temperature) and skip requests at 0.
    draft_tokens : Tensor or None
        [R - B] int64 as in `rejection_sample`; row j of a request counts its drafts 0 .. j - 1 as output. Required
        with `penalties` or `forbidden` when there are drafts, unused otherwise.
    top_k : Tensor or None
        [B] int32, 0 (or at least V) is off.
    top_p : Tensor or None
        [B] float32 in (0, 1], 1 is off.
    min_p : Tensor or None
        [B] float32 in [0, 1], 0 is off.
    penalties : Penalties or None
    bias : LogitBias or None
    suppression : Suppression or None
    allowed : AllowedTokens or None
    forbidden : ForbiddenSequences or None
    """

    cu_rows: Tensor
    temperature: Tensor
    draft_tokens: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    suppression: Suppression | None = None
    allowed: AllowedTokens | None = None
    forbidden: ForbiddenSequences | None = None
