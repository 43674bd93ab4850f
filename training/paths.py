"""Where the stages leave their files."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent
WORK = Path(os.environ.get("DRAFTWIRE_TRAINING_WORK", ROOT / "work"))
DEMO = Path(os.environ.get("DRAFTWIRE_DEMO", ROOT.parent / "models" / "demo"))

PACKAGES = ROOT / "packages.txt"
WHEELS = WORK / "wheels"
CORPUS = WORK / "corpus.jsonl.xz"
MANIFEST = DEMO / "sources.json"
PROMPTS = WORK / "prompts.jsonl"
TARGET = DEMO / "target"
HEAD = DEMO / "head"
