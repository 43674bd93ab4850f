"""Draws prompts from held-out files: `python -m training.prompts`.

A prompt starts at a line of a file and has one fixed number of tokens; its text encodes to the same tokens again, so
that text and token ids are interchangeable. At most one prompt a file. The files are the corpus's held-out ones, or,
with --source, all Python files of packages that are not in packages.txt.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from training.data import clean, stable_fraction
from training.paths import MANIFEST, PROMPTS, TARGET
from training.tokenizer import corpus


def held_out_files() -> Iterator[dict]:
    """The corpus's files that are not trained on."""
    about = {entry["name"]: entry for entry in json.loads(MANIFEST.read_text())}
    for file in corpus():
        if file["split"] != "train":
            source = about[file["package"]]
            package = f"{file['package']} {source['version']}"
            yield {**file, "package": package, "licence": source["licence"]}


def unseen_files(folders: list[Path]) -> Iterator[dict]:
    """The Python files below the folders, cleaned as the corpus is."""
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            name = f"{folder.name}/{path.relative_to(folder)}"
            text = clean(name, path.read_bytes())
            if text is not None:
                yield {"package": folder.name, "path": name, "split": "unseen", "text": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--out", type=Path, default=PROMPTS)
    parser.add_argument("--source", type=Path, nargs="+", help="folders of packages that the training did not see")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    files = list(unseen_files(arguments.source)) if arguments.source else list(held_out_files())
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
        prompts.append({**file, "first_line": first + 1, "text": text})
    arguments.out.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    print(f"{len(prompts)} prompts, {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
