"""A training run measured in seconds, over as many invocations as it takes."""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.muon import Muon

MUON_LR, ADAM_LR = 0.02, 3e-3


class Optimizers:
    """Muon for the layers' matrices, AdamW for embeddings, gains and other outer weights."""

    def __init__(self, model: torch.nn.Module, outer: tuple[str, ...]) -> None:
        named = list(model.named_parameters())
        self.inner = [weight for name, weight in named if weight.ndim == 2 and not name.startswith(outer)]
        rest = [weight for name, weight in named if weight.ndim != 2 or name.startswith(outer)]
        self.muon = Muon(self.inner)
        self.adam = torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)

    def step(self, share: float) -> None:
        """One update of everything at `share` of the peak learning rates."""
        self.muon.step(MUON_LR * share)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_LR * share
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for weight in self.inner:
            weight.grad = None

    def state_dict(self) -> dict:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


class TimedRun:
    """Clock, log and checkpoint of a run whose length is `total_minutes` of training.

    Compilation, data loading and checkpoints do not count: `restart_clock` leaves out what came before it.
    """

    def __init__(
        self, path: Path, model: torch.nn.Module, optimizers: Optimizers, minutes: float, total_minutes: float
    ) -> None:
        self.path, self.model, self.optimizers = path, model, optimizers
        self.deadline = time.monotonic() + 60 * minutes
        self.total = 60 * total_minutes
        self.seconds, self.step, self.tokens = 0.0, 0, 0
        device = next(model.parameters()).device
        if path.exists():
            saved: dict[str, Any] = torch.load(path, map_location=device)
            model.load_state_dict(saved["model"])
            optimizers.load_state_dict(saved["optimizers"])
            self.seconds, self.step, self.tokens = saved["seconds"], saved["step"], saved["tokens"]
        self.saved_at = time.monotonic()
        self.restart_clock()

    @property
    def progress(self) -> float:
        return self.seconds / self.total

    def unfinished(self) -> bool:
        return self.seconds < self.total and time.monotonic() < self.deadline

    def restart_clock(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.clock = self.logged = time.monotonic()
        self.tokens_logged = self.tokens

    def advance(self, tokens: int, loss: Tensor) -> None:
        """Books one step; looks at the loss, which waits for the device, every 20 steps."""
        self.step += 1
        self.tokens += tokens
        if self.step % 20:
            return
        value = loss.item()
        now = time.monotonic()
        self.seconds += now - self.clock
        self.clock = now
        if not value < 20:
            raise SystemExit(f"diverged at step {self.step}: loss {value}")
        if now - self.logged > 15:
            speed = (self.tokens - self.tokens_logged) / (now - self.logged)
            print(
                f"step {self.step} progress {self.progress:.3f} tokens {self.tokens / 1e6:.0f} M loss {value:.4f} "
                f"{speed / 1e6:.2f} M tokens/s",
                flush=True,
            )
            self.logged, self.tokens_logged = now, self.tokens
        if now - self.saved_at > 120:
            self.save()
            self.restart_clock()

    def save(self) -> None:
        state: dict[str, Any] = {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict()}
        state |= {"seconds": self.seconds, "step": self.step, "tokens": self.tokens}
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)
        self.saved_at = time.monotonic()
