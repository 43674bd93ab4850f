"""Acceptance of a head on the target's answers to held-out prompts, counted in one process."""

from pathlib import Path
from typing import Any

import torch

from training.acceptance import Acceptance, Drafts, answer_drafts, repeated_share, walk
from training.chat import read_turns
from training.families import Family
from training.generate import Texts, write
from training.prompts import prompt_sets
from training.target import Target

LENGTHS = (4, 7)
BINS = 10
MOST_REPEATED = 0.3  # an answer with a larger share of tokens in repeated 8-grams is a loop


class Calibration:
    """Acceptance of drafts by the head's confidence, in BINS equal bins."""

    def __init__(self) -> None:
        self.counts = torch.zeros(BINS)
        self.sure = torch.zeros(BINS)
        self.accepted = torch.zeros(BINS)

    def add(self, sure: torch.Tensor, accepted: torch.Tensor) -> None:
        """Add drafts: the head's confidence and the acceptance probability, each [n]."""
        bins = (sure * BINS).long().clamp(0, BINS - 1)
        self.counts.index_add_(0, bins, torch.ones_like(sure))
        self.sure.index_add_(0, bins, sure)
        self.accepted.index_add_(0, bins, accepted)

    def report(self) -> dict[str, Any]:
        """Return each bin's count, mean confidence and acceptance, and the expected calibration error."""
        counts = self.counts.clamp_min(1)
        error = (self.sure - self.accepted).abs().sum() / self.counts.sum().clamp_min(1)
        return {
            "drafts": [int(count) for count in self.counts],
            "confidence": [round(value, 4) for value in (self.sure / counts).tolist()],
            "accepted": [round(value, 4) for value in (self.accepted / counts).tolist()],
            "expected_calibration_error": round(error.item(), 4),
        }


def draw_answers(
    target: Target, tokenizer: Any, folder: Path, new_tokens: int, most: int | None, samples: int = 2
) -> dict[tuple[str, float], Texts]:
    """Return the target's answers to the prompts, by prompt set and temperature; heads with one folder share them."""
    path = folder / f"answers-{new_tokens}-{most or 'all'}.pt"
    drawn: dict[tuple[str, float], Texts] = {}
    if path.exists():
        for key, (tokens, own) in torch.load(path, map_location=target.device).items():
            drawn[key] = Texts(tokens, own)
        return drawn
    end = read_turns(tokenizer).before_next[0]
    for name, prompts in prompt_sets(tokenizer, most).items():
        longest = max(map(len, prompts))
        for temperature in (0.0, 1.0):
            rows = prompts * (1 if temperature == 0 else samples)
            texts = write(target, rows, [temperature] * len(rows), longest + new_tokens, 7, end=end)
            drawn[name, temperature] = _shortened(texts, rows, new_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({key: tuple(texts) for key, texts in drawn.items()}, path.with_suffix(".unfinished"))
    path.with_suffix(".unfinished").rename(path)
    return drawn


def evaluate(
    target: Target, family: Family, answers: dict[tuple[str, float], Texts], new_tokens: int
) -> dict[str, Any]:
    """Return the acceptance of greedy and sampled drafts, by prompt set, temperature and k."""
    report: dict[str, Any] = {"new_tokens": new_tokens}
    for (name, temperature), texts in answers.items():
        drafts = list(answer_drafts(target, family.head, family.entered, texts, max(LENGTHS)))
        report[f"{name}, temperature {temperature:g}"] = _count(drafts, texts, temperature)
    return report


def _shortened(texts: Texts, prompts: list[list[int]], new_tokens: int) -> Texts:
    """Return the texts with at most new_tokens tokens marked in each answer."""
    starts = torch.tensor([len(prompt) for prompt in prompts], device=texts.own.device)[:, None]
    places = torch.arange(texts.own.shape[1], device=texts.own.device)
    return Texts(texts.tokens, texts.own & (places < starts + new_tokens))


def _count(drafts: list[Drafts], texts: Texts, temperature: float) -> dict[str, Any]:
    answers = [tokens[own].tolist() for tokens, own in zip(texts.tokens, texts.own, strict=True)]
    varied = [repeated_share(answer) <= MOST_REPEATED for answer in answers]
    report: dict[str, Any] = {"answers_without_loops": sum(varied)}
    generator = torch.Generator().manual_seed(0)
    coins = [torch.rand(each.sampled.shape, generator=generator) < each.sampled for each in drafts]
    tests = {"greedy one-hot": [each.greedy > 0 for each in drafts]}
    if temperature:
        tests["gumbel dense"] = coins
    for k in LENGTHS:
        for test, accepts in tests.items():
            everything, without_loops = Acceptance(k), Acceptance(k)
            closed = torch.zeros(k)
            reached = torch.zeros(k)
            for each, rows, is_varied in zip(drafts, accepts, varied, strict=True):
                visited = walk(rows.tolist(), everything)
                if is_varied:
                    walk(rows.tolist(), without_loops)
                survived = torch.cat([torch.ones(len(visited), 1), rows[visited, : k - 1].float()], 1).cumprod(1)
                closed += (each.overlap[visited, :k] * survived).sum(0)
                reached += survived.sum(0)
            counted = everything.report() | {"without loops": without_loops.report()}
            if test == "gumbel dense":
                counted["closed form"] = [round(rate, 4) for rate in (closed / reached.clamp_min(1)).tolist()]
            report[f"k = {k}, {test}"] = counted
    if temperature and drafts and drafts[0].sure.numel():
        report["calibration"] = _calibration(drafts, coins)
    return report


def _calibration(drafts: list[Drafts], coins: list[torch.Tensor]) -> dict[str, Any]:
    """Return the calibration over sampled drafts whose predecessors in the step were accepted."""
    calibration = Calibration()
    for each, rows in zip(drafts, coins, strict=True):
        reached = torch.cat([torch.ones(len(rows), 1), rows[:, :-1].float()], 1).cumprod(1) > 0
        calibration.add(each.sure[reached], each.overlap[reached])
    return calibration.report()
