"""Recomputes the distributions of finished continuations with both models in one process.

The target is transformers' model with transformers' attention; the head is the drafter's. In contrast to the services,
there is no batching, wire, rolled-back cache or rejection kernel. Like the command line, this module may import both
services.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from drafter_service.heads import load_head
from draftwire.contract import validation as cfg
from draftwire.v1 import config_pb2
from draftwire_bench.acceptance.head_walk import HeadWalk
from draftwire_kernels import derive_stream_keys

MAX_BATCH = 1024
# Maximum number of logits of the target in memory.
MAX_LOGITS = 1 << 28


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """A verify step with all k drafts."""

    last: int  # index of the last token committed before the step
    accepted: int  # drafts accepted


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and its served output."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]  # for each token, whether it is an accepted draft
    seed: int

    @property
    def sequence(self) -> list[int]:
        """Return prompt and output."""
        return [*self.prompt, *self.tokens]

    def whole_steps(self, k: int) -> list[VerifyStep]:
        """Return the verify steps except the last ones, which had fewer than k drafts because of the output's end.

        The omitted steps do not depend on their drafts, so the selection is unbiased.
        """
        steps = []
        start = 1  # output tokens when a step begins; the prompt's step emits the first
        while start + k < len(self.tokens):
            accepted = 0
            while self.drafted[start + accepted]:
                accepted += 1
            steps.append(VerifyStep(len(self.prompt) + start - 1, accepted))
            start += accepted + 1
        return steps


@dataclass(frozen=True)
class StepRows:
    """S recomputed verify steps."""

    target_logits: Tensor  # [S, k, V]: row j follows j accepted drafts
    draft_logits: Tensor  # [S, k, V_draft]: row j follows the step's first j drafts; -inf for tokens never drafted
    drafts: Tensor  # [S, k] int64, target ids
    emitted: Tensor  # [S, k] int64: the k served tokens from the step's start on
    accepted: Tensor  # [S] int64
    own_path_logits: Tensor | None  # [S, k, V], for block verification: row j follows the step's first j drafts


class Models:
    """A target and its head."""

    def __init__(
        self,
        target_dir: Path,
        head_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        quantization: str | None = None,
    ) -> None:
        """`quantization` is that of the head; see `load_head`."""
        model: Any = AutoModelForCausalLM.from_pretrained(target_dir, dtype=dtype, attn_implementation="eager")
        self._model = model.to(device).eval()
        self._head = load_head(head_dir, target_dir, dtype, device, quantization=quantization)
        self._device, self._dtype = device, dtype
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]

    @property
    def draft_token_ids(self) -> Tensor | None:
        """Return the target ids of the draft vocabulary, [V_draft] int64; None if both are the same."""
        return self._head.draft_token_ids

    @torch.inference_mode()
    def recompute(
        self,
        continuations: Sequence[Continuation],
        config: config_pb2.SpeculativeConfig,
        temperature: float,
    ) -> Iterator[StepRows]:
        """Yield the whole steps of all continuations in batches.

        Args:
            continuations: The served outputs.
            config: The speculative config that was served; drafts are sampled accordingly, with the same noise. For
                block verification the target also computes rejected drafts, with one sequence per step.
            temperature: The requests' temperature.
        """
        longest = max(len(continuation.tokens) for continuation in continuations) + 1
        size = min(MAX_BATCH, max(1, MAX_LOGITS // (longest * self.vocab_size)))
        for start in range(0, len(continuations), size):
            group = continuations[start : start + size]
            yield from self._recompute_group(group, config, temperature, longest)

    def _recompute_group(
        self,
        group: Sequence[Continuation],
        config: config_pb2.SpeculativeConfig,
        temperature: float,
        num_rows: int,
    ) -> Iterator[StepRows]:
        k = config.num_speculative_tokens
        is_block = config.rejection_sample_method == cfg.BLOCK
        sequences = [continuation.sequence for continuation in group]
        logits, features = self._run_target(sequences, num_rows)
        walk = HeadWalk(self._head, sequences, features, config, self._dtype, self._device)
        keys = derive_stream_keys([continuation.seed for continuation in group]).to(self._device)
        noise = keys.resample if config.rejection_sample_method == cfg.COUPLED else keys.proposal
        steps = [continuation.whole_steps(k) for continuation in group]
        # From the last step to the first: a step's rows overwrite accepted rows that earlier steps do not attend to.
        for place in range(1, 1 + max(map(len, steps), default=0)):
            members = [b for b, own in enumerate(steps) if len(own) >= place]
            chosen = [steps[b][-place] for b in members]
            index = torch.tensor(members, device=self._device)
            last = torch.tensor([step.last for step in chosen], device=self._device)
            ends = torch.tensor([len(sequences[b]) for b in members], device=self._device)
            draft_logits, drafts = walk.draft(members, last, temperature, noise[index])
            rows = last - ends + num_rows  # index of the step's first row in the logits
            columns = rows[:, None] + torch.arange(k, device=self._device)
            emitted = [sequences[b][step.last + 1 : step.last + 1 + k] for b, step in zip(members, chosen, strict=True)]
            yield StepRows(
                target_logits=logits[index[:, None], columns],
                draft_logits=draft_logits,
                drafts=drafts,
                emitted=torch.tensor(emitted, device=self._device),
                accepted=torch.tensor([step.accepted for step in chosen], device=self._device),
                own_path_logits=self._follow(sequences, members, chosen, drafts) if is_block else None,
            )

    def _run_target(self, sequences: Sequence[Sequence[int]], num_rows: int) -> tuple[Tensor, list[Tensor]]:
        """Return the last rows' logits [B, num_rows, V], and the head's features [T_b, width] of each sequence."""
        longest = max(map(len, sequences))
        ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            # Left padding aligns the last rows of all sequences.
            ids[row, longest - len(sequence) :] = torch.tensor(sequence)
            mask[row, longest - len(sequence) :] = 1
        output = self._model(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            position_ids=(mask.cumsum(1) - 1).clamp_min(0).to(self._device),
            use_cache=False,
            output_hidden_states=True,
            logits_to_keep=num_rows,
        )
        states = torch.cat([output.hidden_states[layer] for layer in self._head.spec.feature_layers], dim=-1)
        features = [states[row, longest - len(sequence) :] for row, sequence in enumerate(sequences)]
        return output.logits, features

    def _follow(
        self,
        sequences: Sequence[Sequence[int]],
        members: Sequence[int],
        steps: Sequence[VerifyStep],
        drafts: Tensor,
    ) -> Tensor:
        """Return the target's logits [S, k, V] along each step's drafts."""
        k = drafts.shape[1]
        paths = [
            [*sequences[b][: step.last + 1], *own[: k - 1]]
            for b, step, own in zip(members, steps, drafts.tolist(), strict=True)
        ]
        size = max(1, MAX_BATCH // 4)
        return torch.cat([self._run_target(paths[i : i + size], k)[0] for i in range(0, len(paths), size)])
