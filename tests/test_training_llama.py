"""The training-side Llama is transformers' Llama, and its exported directory loads there."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from training.export import bf16_exact, export_target
from training.generate import continuations
from training.llama import Llama, LlamaShape, load_llama

SHAPE = LlamaShape(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=64,
)


@pytest.fixture
def pair(tmp_path):
    torch.manual_seed(0)
    model = Llama(SHAPE).eval()
    for weight in model.parameters():
        weight.data *= 1 + torch.rand_like(weight)
    bf16_exact(model)
    export_target(model, tmp_path, end=0)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    return load_llama(tmp_path, "cpu"), reference


@torch.no_grad()
def test_states_and_logits_are_those_of_transformers(pair):
    model, reference = pair
    tokens = torch.randint(97, (2, 40))
    expected = reference(tokens, output_hidden_states=True)
    states = model.states(tokens)
    torch.testing.assert_close(model.logits_of(states[-1]), expected.logits, rtol=1e-4, atol=1e-5)
    for layer in range(3):
        torch.testing.assert_close(states[layer], expected.hidden_states[layer], rtol=1e-4, atol=1e-5)


def test_greedy_continuations_are_those_of_transformers(pair):
    model, reference = pair
    prompts = torch.randint(1, 97, (3, 10))
    expected = reference.generate(prompts, max_new_tokens=20, min_new_tokens=20, do_sample=False, eos_token_id=None)
    assert torch.equal(continuations(model, prompts, 20, 0.0), expected)
