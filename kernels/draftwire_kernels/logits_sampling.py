"""The per-request parameters of `process_logits`, as tensors."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Penalties:
    """Penalties of all requests, and the token history of those that use them.

    Attributes
    ----------
    repetition, presence, frequency : Tensor
        [B] float32; 1, 0 and 0 are off.
    slot : Tensor
        [B] int64, the request's row of the two tables, -1 for a request without penalties. May be permuted or sparse,
        so the tables can be kept from step to step.
    prompt_mask : Tensor
        [S, V] bool, tokens that occur in the prompt.
    output_counts : Tensor
        [S, V] int32, occurrences of each token in the output so far. Drafts of this step are not in it: the rows'
        draft prefixes are added here.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    slot: Tensor
    prompt_mask: Tensor
    output_counts: Tensor


@dataclass(frozen=True)
class LogitBias:
    """Sparse bias: `value` [M] float32 is added to the logit of `token` [M] int64 in each row of `request` [M] int64.

    Entries for the same request and token add up.
    """

    request: Tensor
    token: Tensor
    value: Tensor


@dataclass(frozen=True)
class Suppression:
    """Tokens set to -inf: `token` [S] int64 in the single row `row` [S] int64 (end tokens before min_tokens)."""

    row: Tensor
    token: Tensor


@dataclass(frozen=True)
class LogitsSampling:
    """What `process_logits` does to each request's rows. A field that is None is used by nobody.

    Tensors lie on the device of the logits or, all but the tables of `penalties`, on the CPU; when `cu_rows` and the
    fields in use are on the CPU, finding the rows that need work does not wait for the device.

    Attributes
    ----------
    cu_rows : Tensor
        [B + 1] int32, prefix sums of the requests' rows (k_b + 1 each), as in `rejection_sample`.
    temperature : Tensor
        [B] float32; the filters look at softmax(logits / temperature) and skip requests at 0.
    draft_tokens : Tensor or None
        [R - B] int64 as in `rejection_sample`; row j of a request counts its drafts 0 .. j - 1 as output. Required
        with `penalties` when there are drafts, unused otherwise.
    top_k : Tensor or None
        [B] int32, 0 (or at least V) is off.
    top_p : Tensor or None
        [B] float32 in (0, 1], 1 is off.
    min_p : Tensor or None
        [B] float32 in [0, 1], 0 is off.
    penalties : Penalties or None
    bias : LogitBias or None
    suppression : Suppression or None
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
