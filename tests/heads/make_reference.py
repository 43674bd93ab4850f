"""Run the peers' code on the checkpoints of `head_checkpoints.py` and write the results to reference.npz.

The file in the repository was made with torch 2.13.0 (CPU, float32), transformers 5.23.0 and

- SafeAILab/EAGLE, commit cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b: eagle/model/cnets.py, cnets1.py
- speculators 0.9.0, whose EAGLE-3 model is that of vllm-project/speculators commit
  c05b95b303f7d4f21e8d7624e0ffa1c2d9b4d73b
- vllm-project/speculators, commit 1c2e04354239139fd14467168c3dfa4b53e9f9c6, the last with EagleSpeculator

by these commands, in a separate environment with the packages above:

    git clone https://github.com/SafeAILab/EAGLE /tmp/EAGLE
    git -C /tmp/EAGLE checkout cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b
    git clone https://github.com/vllm-project/speculators /tmp/speculators
    git -C /tmp/speculators checkout 1c2e04354239139fd14467168c3dfa4b53e9f9c6
    python tests/heads/make_reference.py eagle --source /tmp/EAGLE --out /tmp/eagle.npz
    python tests/heads/make_reference.py speculators --out /tmp/speculators.npz
    python tests/heads/make_reference.py speculators-eagle1 --source /tmp/speculators/src --out /tmp/eagle1.npz
    python tests/heads/make_reference.py merge --out tests/heads/reference.npz \
        --parts /tmp/eagle.npz /tmp/speculators.npz /tmp/eagle1.npz

The older `speculators` needs transformers below 5; its results came from transformers 4.57.1.

For each case `<case>.hidden` and `<case>.logits` are [1 + NUM_DRAFTS, NUM_ROWS, ...]. Step 0 is the pass over the
accepted rows. Step s is the s-th draft row of a chain that starts after each accepted row. EAGLE's code computes one
chain at a time, through its cache and with roll-backs; the training-time test of speculators computes all chains at
once. Its sliding windows do not move along a chain, so the file has only step 0 of cases with windows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from head_checkpoints import CASES, NUM_DRAFTS, NUM_ROWS, Case, head_tensors, inputs, target_tensors, write_case

Arrays = dict[str, np.ndarray]


def run_eagle(source: Path) -> Arrays:
    """Return the results of SafeAILab's cnets.py and cnets1.py."""
    sys.path.insert(0, str(source))
    arrays: Arrays = {}
    for name, case in CASES.items():
        if not case.layout.startswith("speculators"):
            module = importlib.import_module("eagle.model.cnets" if case.is_eagle3 else "eagle.model.cnets1")
            hidden, logits = _eagle_numbers(case, module)
            arrays |= {f"{name}.hidden": hidden, f"{name}.logits": logits}
    return arrays


def _eagle_numbers(case: Case, module: Any) -> tuple[np.ndarray, np.ndarray]:
    # The defaults of EConfig. cnets.py reads rope_scaling, which transformers 5 does not keep.
    defaults = {"rope_scaling": None, "pretraining_tp": 1}
    config = SimpleNamespace(**(defaults | case.layer | case.options))
    model = module.Model(config, bias=case.options.get("bias", True)).eval()
    tensors, target = head_tensors(case), target_tensors(case)
    tensors.setdefault("embed_tokens.weight", target["model.embed_tokens.weight"])
    if case.draft_vocab_size == case.layer["vocab_size"] and case.is_eagle3:
        del model.d2t, model.t2d
    model.load_state_dict(tensors, strict=True)
    model.reset()
    output = target.get("lm_head.weight", target["model.embed_tokens.weight"])

    def logits_of(hidden: torch.Tensor) -> torch.Tensor:
        return model.lm_head(model.norm(hidden)) if case.is_eagle3 else hidden @ output.T

    tokens, features = inputs(case)
    with torch.inference_mode():
        every = model(features[None], tokens[None, :NUM_ROWS], use_cache=True)[0][0]
        steps = torch.empty(1 + NUM_DRAFTS, *every.shape)
        past = None
        for row in range(NUM_ROWS):
            out, past = model(
                features[None, row : row + 1], tokens[None, row : row + 1], None, None, past, use_cache=True
            )
            torch.testing.assert_close(out[0, 0], every[row], rtol=1e-5, atol=1e-5)
            steps[0, row] = every[row]
            chain = past  # a tuple of tensors: the chain's rows are appended to copies
            for step in range(1, 1 + NUM_DRAFTS):
                token = tokens[None, row + step : row + step + 1]
                out, chain = model(out, token, None, None, chain, use_cache=True)
                steps[step, row] = out[0, 0]
        return steps.numpy(), logits_of(steps).numpy()


def run_speculators() -> Arrays:
    """Return the results of the installed `speculators`' EAGLE-3 model: its training-time test runs all chains."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    arrays: Arrays = {}
    for name, case in CASES.items():
        if case.layout != "speculators_eagle3":
            continue
        with tempfile.TemporaryDirectory() as folder:
            head_dir, _ = write_case(case, Path(folder))
            config = Eagle3SpeculatorConfig(**json.loads((head_dir / "config.json").read_text(encoding="utf-8")))
        config.transformer_layer_config._attn_implementation = "sdpa"
        model = Eagle3DraftModel(config).eval()
        tensors = head_tensors(case)
        tensors.setdefault("embed_tokens.weight", target_tensors(case)["model.embed_tokens.weight"])
        missing, unexpected = model.load_state_dict(tensors, strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"verifier_norm.weight", "verifier_lm_head.weight"}, missing
        states: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        watched = model.norm if config.norm_output else model.layers[-1]
        watched.register_forward_hook(lambda _m, _i, out, to=states: to.append(out[0]))
        model.lm_head.register_forward_hook(lambda _m, _i, out, to=logits: to.append(out[0]))
        tokens, features = inputs(case)
        # the training-time test shifts its tokens; rows past NUM_ROWS only provide the tokens of the last chains
        features = torch.cat((features, torch.zeros(NUM_DRAFTS, features.shape[1])))
        with torch.inference_mode():
            model(
                features[None],
                tokens[None],
                document_ids=torch.zeros(1, len(tokens), dtype=torch.long),
                position_ids=torch.arange(len(tokens))[None],
                ttt_steps=1 + NUM_DRAFTS,
            )
        kept = 1 if model.sliding_window_indices else 1 + NUM_DRAFTS
        arrays[f"{name}.hidden"] = torch.stack(states)[:kept, :NUM_ROWS].numpy()
        arrays[f"{name}.logits"] = torch.stack(logits)[:kept, :NUM_ROWS].numpy()
    return arrays


def run_speculators_eagle1(source: Path) -> Arrays:
    """Return the results of an older EagleSpeculator: each pass computes all rows of a chain, without a cache."""
    sys.path.insert(0, str(source))
    from speculators.models.eagle import EagleSpeculator, EagleSpeculatorConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    name, case = "speculators_eagle1", CASES["speculators_eagle1"]
    with tempfile.TemporaryDirectory() as folder:
        head_dir, _ = write_case(case, Path(folder))
        config = EagleSpeculatorConfig(**json.loads((head_dir / "config.json").read_text(encoding="utf-8")))
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = EagleSpeculator(config, verifier=None, verifier_attachment_mode="detached").eval()
    missing, unexpected = model.load_state_dict(head_tensors(case), strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    target = target_tensors(case)
    model.embed_tokens = torch.nn.Embedding.from_pretrained(target["model.embed_tokens.weight"])
    model.lm_head = lambda hidden: hidden @ target["lm_head.weight"].T
    model.rotary_emb = LlamaRotaryEmbedding(config.transformer_layer_config)
    states: list[torch.Tensor] = []
    model.transformer.register_forward_hook(
        lambda _m, _i, out: states.append((out[0] if isinstance(out, tuple) else out).reshape(-1, 32))
    )
    # EagleSpeculator takes layer_outputs[0]; in transformers 5 the outputs are a tensor, so that is its first sequence
    tokens, features = inputs(case)
    steps = torch.empty(1 + NUM_DRAFTS, NUM_ROWS, 32)
    with torch.inference_mode():
        for row in range(NUM_ROWS):
            rows = features[: row + 1]
            for step in range(1 + NUM_DRAFTS):
                mask = torch.ones(1, len(rows), dtype=torch.long)
                model(tokens[None, : len(rows)], rows[None], attention_mask=mask, return_dict=False)
                steps[step, row] = states[-1][-1]
                rows = torch.cat((rows, states[-1][-1:]))
        logits = steps @ target["lm_head.weight"].T
    return {f"{name}.hidden": steps.numpy(), f"{name}.logits": logits.numpy()}


def main() -> None:
    """Run the code of one peer, or merge the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=("eagle", "speculators", "speculators-eagle1", "merge"))
    parser.add_argument("--source", type=Path, help="checkout of the peer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", type=Path, default=())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peer == "eagle":
        arrays = run_eagle(arguments.source)
    elif arguments.peer == "speculators":
        arrays = run_speculators()
    elif arguments.peer == "speculators-eagle1":
        arrays = run_speculators_eagle1(arguments.source)
    else:
        arrays = {name: array for part in arguments.parts for name, array in np.load(part).items()}
    np.savez_compressed(arguments.out, **arrays)


if __name__ == "__main__":
    main()
