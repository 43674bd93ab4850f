"""Create an engine from checked options: ranks, target, metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from rich.console import Console

from draftwire.contract.validation import speculative_config_to_mapping
from draftwire.model.checkpoints import resolve_directory
from draftwire.server.memory import keep_what_is_loaded
from draftwire.server.metrics import serving_metrics
from verifier_service.core.tokenizer import has_tokenizer
from verifier_service.engine.engine import EngineLimits
from verifier_service.grammar.vocabulary import Vocabulary, load_vocabulary
from verifier_service.host.host import EngineHost
from verifier_service.host.ranks import Workers
from verifier_service.host.target_start import start_target
from verifier_service.options import VerifierOptions
from verifier_service.settings import Settings
from verifier_service.target.target import check_split
from verifier_service.target.tensor_parallel import ALONE, Rank

logger = logging.getLogger(__name__)


@contextmanager
def hosting_engine(options: VerifierOptions, settings: Settings) -> Iterator[EngineHost]:
    """Load the target, create its engine, and serve the metrics while the context lasts; the caller starts the engine.

    Raises:
        DraftwireError: If an option, the checkpoint, the device or the metrics' address is wrong.
    """
    with _start_workers(options, settings.device) as workers:
        rank = ALONE if workers is None else workers.rank
        target, num_blocks = start_target(options, settings.config, settings.device, rank)
        limits = EngineLimits(
            max_num_seqs=options.max_num_seqs,
            max_queue=options.max_queue,
            max_prefill_rows=options.max_prefill_rows,
            num_blocks=num_blocks,
            draft_deadline_s=settings.draft_deadline_s,
            adaptive_k=options.adaptive_k,
            prefix_caching=options.prefix_caching,
            async_scheduling=settings.async_scheduling,
        )
        logger.info("%s on %s in %s; %s", options.target, target.device, target.dtype, limits)
        logger.info("speculation: %s", json.dumps(speculative_config_to_mapping(settings.config)))
        host = EngineHost(
            target,
            settings.config,
            limits,
            settings.drafters,
            settings.drafter_security,
            settings.carriers,
            options.rendezvous_dir,
            fuses_features=options.fuse_features,
            workers=workers,
            vocabulary=_load_vocabulary(resolve_directory(options.target), target.vocab_size),
            served_model_name=options.served_model_name,
            vllm_metrics=options.vllm_metrics,
        )
        keep_what_is_loaded()
        with serving_metrics(options.metrics_listen, [host.collector], settings.security):
            yield host


def _load_vocabulary(directory: Path, vocab_size: int) -> Vocabulary | str:
    """Return the vocabulary for structured output, or the reason why there is none."""
    if not has_tokenizer(directory):
        return "this server has no tokenizer"
    with Console(stderr=True).status("reading the vocabulary"):
        return load_vocabulary(directory, vocab_size)


def _start_workers(options: VerifierOptions, device: torch.device) -> AbstractContextManager[Workers | None]:
    if options.tensor_parallel_size == 1:
        return nullcontext()
    check_split(resolve_directory(options.target), options.target, Rank(0, options.tensor_parallel_size))
    with Console(stderr=True).status("starting the ranks of the target"):
        return Workers(options, device)
