"""The turns of a target's chat template, and the prompts from which the target generates user turns."""

from dataclasses import dataclass
from typing import Any

# Openings of user turns, which the target continues: (weight, text).
OPENINGS: tuple[tuple[int, str], ...] = (
    (24, ""),
    (2, "What"),
    (2, "How"),
    (2, "Why"),
    (2, "Can you"),
    (2, "Explain"),
    (2, "Write"),
    (1, "Write a short story about"),
    (1, "Write an email to"),
    (1, "Give me a list of"),
    (1, "Summarize the following text:"),
    (1, "Translate"),
    (1, "I need help with"),
    (1, "What is the difference between"),
    (1, "Solve this problem step by step:"),
    (1, "Rewrite this sentence:"),
    (1, "Compare"),
    (1, "Describe"),
    (1, "Suggest"),
    (3, "Write a Python function"),
    (2, "Write a Python function that takes a list"),
    (2, "Write a Python function that takes a string"),
    (2, "Write a Python function that takes two integers"),
    (1, "Implement the following function in Python:"),
    (2, "Complete the following Python function:\n\n```python\ndef"),
    (2, "Complete this Python function.\n\n```python\nfrom typing import List\n\n\ndef"),
    (1, "Write a class in Python"),
    (1, "Fix this Python code:\n\n```python\n"),
    (1, "What does this code do?\n\n```python\n"),
)

_USER, _ANSWER = ("\u241f" + name for name in ("user", "answer"))  # no template contains this character


@dataclass(frozen=True)
class Turns:
    """Token ids between the turns of a conversation.

    Attributes:
        before_user: Tokens before the first user turn, including the default system prompt.
        before_answer: Tokens between a user turn and its answer; the first ends the user turn.
        before_next: Tokens between an answer and the next user turn; the first ends the answer.
    """

    before_user: list[int]
    before_answer: list[int]
    before_next: list[int]


def read_turns(tokenizer: Any) -> Turns:
    """Return the turns of a tokenizer's chat template.

    Raises:
        ValueError: If the tokenizer has no chat template, the template changes or drops turns, or a turn does not end
            with a special token.
    """
    if not tokenizer.chat_template:
        raise ValueError("the target's tokenizer has no chat template; conversations need one")
    messages = [
        {"role": role, "content": text} for _ in range(2) for role, text in (("user", _USER), ("assistant", _ANSWER))
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    first, _, rest = text.partition(_USER)
    middle, _, rest = rest.partition(_ANSWER)
    following, found, _ = rest.partition(_USER)
    if not found:
        raise ValueError("the chat template changes or drops turns of a conversation")
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in (first, middle, following)]
    if not all(part and part[0] in tokenizer.added_tokens_decoder for part in parts[1:]):
        raise ValueError("the chat template's turns must end with a special token")
    return Turns(*parts)


def answer_prompt(tokenizer: Any, user: str) -> list[int]:
    """Return the token ids of a conversation with one user turn, up to the answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def opening_prompts(tokenizer: Any, turns: Turns) -> list[list[int]]:
    """Return the token ids of each opening and what precedes it, repeated by its weight."""
    prompts = []
    for weight, text in OPENINGS:
        opened = [*turns.before_user, *tokenizer.encode(text, add_special_tokens=False)]
        prompts += [opened] * weight
    return prompts
