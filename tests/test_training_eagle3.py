"""The head's chain, computed for all rows at once, equals drafting row by row with a key cache."""

import torch
import torch.nn.functional as F

from training.eagle3 import Eagle3Head, feature_layers
from training.layers import HeadShape, rotary_tables, rotate

SHAPE = HeadShape(
    vocab_size=50,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)


def one_row(head, embedded, g, position, keys, values):
    """Append one row to the key cache; return its logits and its output."""
    layer = head.midlayer
    x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(g)])
    cos, sin = (table[position] for table in rotary_tables(SHAPE, 64, "cpu"))
    q = rotate(layer.self_attn.q_proj(x).view(4, 16), cos, sin)
    keys.append(rotate(layer.self_attn.k_proj(x).view(2, 16), cos, sin))
    values.append(layer.self_attn.v_proj(x).view(2, 16))
    k, v = torch.stack(keys, 1).repeat_interleave(2, 0), torch.stack(values, 1).repeat_interleave(2, 0)
    weights = ((q[:, None] * k).sum(-1) / 4).softmax(-1)
    x = g + layer.self_attn.o_proj((weights[..., None] * v).sum(1).flatten())
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    return head.lm_head(head.norm(x)), x


@torch.no_grad()
def test_chain_equals_drafting_row_by_row():
    torch.manual_seed(0)
    head = Eagle3Head(SHAPE, 64, 30)
    for weight in head.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    ids = torch.randperm(50)[:30].sort().values
    head.set_draft_vocabulary(ids)
    assert torch.equal(head.draft_ids, ids)
    assert head.t2d.sum() == 30
    embedding, states, tokens = torch.randn(50, 64), torch.randn(1, 9, 192), torch.randint(50, (1, 9))

    def drafted(step, normed):
        return tokens if step == 0 else ids[head.lm_head(normed).argmax(-1)]

    chain = [head.lm_head(normed) for normed in head.chain(states, embedding, drafted, steps=4)]
    fused = head.fc(states[0])
    keys, values = [], []
    for row in range(9):
        logits, g = one_row(head, embedding[tokens[0, row]], fused[row], row, keys, values)
        torch.testing.assert_close(logits, chain[0][0, row], rtol=1e-4, atol=1e-4)
        draft_keys, draft_values = list(keys), list(values)
        for step in range(1, 4):
            embedded = F.embedding(ids[logits.argmax()], embedding)
            logits, g = one_row(head, embedded, g, row + step, draft_keys, draft_values)
            torch.testing.assert_close(logits, chain[step][0, row], rtol=1e-4, atol=1e-4)


def test_default_feature_layers_of_the_demo_target_differ():
    assert feature_layers(8) == [2, 4, 5]
