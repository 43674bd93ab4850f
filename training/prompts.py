"""Draws prompts from held-out files: `python -m training.prompts`.

A prompt starts at a line of a file and has one fixed number of tokens; its text encodes to the same tokens again, so
that text and token ids are interchangeable. At most one prompt a file.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer

from training.data import stable_fraction
from training.paths import MANIFEST, PROMPTS, TARGET
from training.tokenizer import corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--out", type=Path, default=PROMPTS)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    about = {entry["name"]: entry for entry in json.loads(MANIFEST.read_text())}
    files = [file for file in corpus() if file["split"] != "train"]
    files.sort(key=lambda file: stable_fraction("prompt " + file["path"]))
    prompts: list[dict] = []
    for file in files:
        if len(prompts) == arguments.count:
            break
        lines = file["text"].splitlines(keepends=True)
        first = int(stable_fraction("line " + file["path"]) * 0.8 * len(lines))
        ids = tokenizer.encode("".join(lines[first : first + 100])).ids[: arguments.tokens]
        text = tokenizer.decode(ids)
        if len(ids) < arguments.tokens or "\ufffd" in text or tokenizer.encode(text).ids != ids:
            continue
        source = about[file["package"]]
        prompts.append(
            {
                "package": f"{file['package']} {source['version']}",
                "licence": source["licence"],
                "path": file["path"],
                "first_line": first + 1,
                "split": file["split"],
                "text": text,
            }
        )
    arguments.out.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    print(f"{len(prompts)} prompts, {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
