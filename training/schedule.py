"""A training run of a given duration, which may be interrupted and resumed.

The learning rate depends on the share of the duration, so a resumed run has the same schedule.
"""

import time
from collections.abc import Callable
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
        """Update all weights at `share` of the peak learning rates, and clear the gradients."""
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


def learning_rate(progress: float, warmup: float = 0.02, decay_from: float = 0.3) -> float:
    """Return the learning rate as a share of its peak, for progress from 0 to 1.

    The schedule is warmup-stable-decay (MiniCPM, 2404.06395), with a linear decay to zero.
    """
    if progress < warmup:
        return max(progress, 1e-4) / warmup
    return min(1.0, max(0.0, (1 - progress) / (1 - decay_from)))


class TimedRun:
    """Clock, log and checkpoint of a training run.

    `restart_clock` excludes compilation, data loading and checkpoints from the run's duration.

    Args:
        path: The checkpoint. If it exists, the run is resumed from it, with its duration.
        model: The trained module.
        optimizers: Its optimizers.
        deadline: Value of time.monotonic() at which this process stops training.
        total_seconds: Duration of the run over all processes.
        export: Called at every checkpoint, so that an interrupted run leaves a head.
    """

    def __init__(
        self,
        path: Path,
        model: torch.nn.Module,
        optimizers: Optimizers,
        deadline: float,
        total_seconds: float,
        export: Callable[[], None],
    ) -> None:
        self.path, self.model, self.optimizers, self.export = path, model, optimizers, export
        self.deadline, self.total = deadline, total_seconds
        self.seconds, self.step, self.tokens = 0.0, 0, 0
        self.device = next(model.parameters()).device
        if path.exists():
            saved: dict[str, Any] = torch.load(path, map_location=self.device)
            model.load_state_dict(saved["model"])
            optimizers.load_state_dict(saved["optimizers"])
            self.seconds, self.step, self.tokens = saved["seconds"], saved["step"], saved["tokens"]
            self.total = saved["total"]
        self.saved_at = time.monotonic()
        self.restart_clock()

    @property
    def progress(self) -> float:
        """Completed share of the run."""
        return self.seconds / self.total

    def unfinished(self) -> bool:
        """Return whether this process should train on."""
        return self.seconds < self.total and time.monotonic() < self.deadline

    def restart_clock(self) -> None:
        """Exclude the time since the last measured step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.clock = self.logged = time.monotonic()
        self.tokens_logged = self.tokens

    def advance(self, tokens: int, loss: Tensor) -> bool:
        """Count one step; check the loss, which synchronizes the device, every 10 steps. Return whether to log."""
        self.step += 1
        self.tokens += tokens
        if self.step % 10:
            return False
        value = loss.item()
        now = time.monotonic()
        self.seconds += now - self.clock
        self.clock = now
        if not value < 50:
            raise SystemExit(f"diverged at step {self.step}: loss {value}")
        if now - self.saved_at > 60:
            self.save()
            self.restart_clock()
        if now - self.logged < 10:
            return False
        speed = (self.tokens - self.tokens_logged) / (now - self.logged)
        done = f"step {self.step} progress {self.progress:.3f} tokens {self.tokens / 1e6:.1f} M"
        print(f"{done} loss {value:.4f} {speed / 1e3:.0f} k tokens/s", flush=True)
        self.logged, self.tokens_logged = now, self.tokens
        return True

    def save(self) -> None:
        """Write the checkpoint and export the head."""
        state: dict[str, Any] = {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict()}
        state |= {"seconds": self.seconds, "step": self.step, "tokens": self.tokens, "total": self.total}
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)
        self.export()
        self.saved_at = time.monotonic()
