"""The target, run by transformers: the teacher of a draft head."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftwire.contract.errors import CheckpointError


class Target:
    """A frozen causal language model.

    Attributes:
        embedding: Weight of the input embedding, [V, hidden].
        output: Weight of lm_head, [V, hidden].
    """

    def __init__(self, directory: Path, device: str, dtype: torch.dtype) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa")
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = torch.device(device)
        self.config = model.config.get_text_config()
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.output: Tensor = model.get_output_embeddings().weight
        self._check_output(directory)

    @torch.no_grad()
    def states(self, tokens: Tensor, layers: list[int]) -> tuple[Tensor, Tensor]:
        """Return the concatenated inputs of `layers` [B, T, n * hidden] and lm_head's input, for tokens [B, T].

        Layer num_hidden_layers stands for lm_head's input, the normed output of the last layer.
        """
        result = self.model(tokens, output_hidden_states=True, use_cache=False, logits_to_keep=1)
        hidden = result.hidden_states
        return torch.cat([hidden[layer] for layer in layers], dim=-1), hidden[-1]

    def _check_output(self, directory: Path) -> None:
        """Reject a model whose logits are not lm_head of its last state, such as scaled or capped logits.

        Raises:
            CheckpointError: If the logits differ.
        """
        tokens = torch.arange(1, 9, device=self.device)[None] % self.config.vocab_size
        with torch.no_grad():
            result = self.model(tokens, output_hidden_states=True, use_cache=False)
        own = F.linear(result.hidden_states[-1], self.output).float()
        difference = (own - result.logits.float()).abs().max().item()
        if not difference <= 0.02 * result.logits.float().abs().max().item():
            raise CheckpointError(
                f"{directory}: logits differ by {difference:.3g} from lm_head of the last state; targets that scale or "
                "cap their logits are not trained for"
            )
