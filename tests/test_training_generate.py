"""Batched generation with the target equals transformers' generate, turn by turn."""

import pytest
import torch
from chat_target import END, make_tokenizer, write_chat_target

from training.chat import Turns, answer_prompt, read_turns
from training.generate import draw, write
from training.target import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(write_chat_target(tmp_path_factory.mktemp("target")), "cpu", torch.float32)


def test_turns_are_those_of_the_chat_template() -> None:
    tokenizer = make_tokenizer()
    turns = read_turns(tokenizer)
    texts = [tokenizer.decode(ids) for ids in (turns.before_user, turns.before_answer, turns.before_next)]
    assert texts == [
        "<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>user\n",
    ]


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        read_turns(tokenizer)


def test_greedy_rows_are_those_of_transformers(target: Target) -> None:
    tokenizer = make_tokenizer()
    prompts = [answer_prompt(tokenizer, text) for text in ("Hi", "What is it?")]
    texts = write(target, prompts, [0.0, 0.0], 60, 1, end=END)
    for row, (prompt, own) in enumerate(zip(prompts, texts.own, strict=True)):
        given = torch.tensor([prompt])
        expected = target.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=60 - len(prompt),
            do_sample=False,
            eos_token_id=None,
        )
        assert torch.equal(texts.tokens[row], expected[0])
        answer = expected[0, len(prompt) :].tolist()
        length = answer.index(END) + 1 if END in answer else len(answer)
        assert own.nonzero().flatten().tolist() == list(range(len(prompt), len(prompt) + length))


def answers(tokens: list[int], turns: Turns) -> list[bool]:
    """Return for each token whether it is an answer; check that the tokens between turns are the template's."""
    own = [False] * len(tokens)
    place, starts = len(turns.before_user), {True: turns.before_answer, False: turns.before_next}
    is_user = True
    while place < len(tokens):
        between = starts[is_user]
        own[place] = not is_user
        place += 1
        if tokens[place - 1] == between[0]:
            given = tokens[place : place + len(between) - 1]
            assert given == between[1 : 1 + len(given)]
            place += len(given)
            is_user = not is_user
    return own


def test_conversations_keep_the_turns_of_the_template(target: Target) -> None:
    turns = read_turns(make_tokenizer())
    texts = write(target, [turns.before_user] * 8, [1.0] * 8, 400, 3, end=END, turns=turns)
    expected = [answers(row, turns) for row in texts.tokens.tolist()]
    assert texts.own.tolist() == expected
    assert any(True in row for row in expected)


def test_temperature_0_draws_the_most_likely_token() -> None:
    logits = torch.randn(6, 40)
    drawn = draw(logits, torch.zeros(6, 1), torch.Generator().manual_seed(0))
    assert torch.equal(drawn, logits.argmax(-1))


def test_draws_have_the_law_of_the_logits() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(20000, 3)
    drawn = draw(logits, torch.full((20000, 1), 2.0), torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn, minlength=3) / 20000
    torch.testing.assert_close(shares, (logits[0] / 2).softmax(-1), atol=0.015, rtol=0)
