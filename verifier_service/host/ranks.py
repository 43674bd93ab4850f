"""The processes of a split target: the verifier, which is rank 0, and its workers.

A worker has a part of every layer, and a cache of its heads' keys and values; block numbers are equal on all ranks. A
worker runs the steps of rank 0 in the same order. Only rank 0 has requests, sampling and drafters. When one rank ends,
all ranks end.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Self, cast

import numpy as np
import torch
import torch.distributed as dist

from draftwire.contract.errors import DraftwireError, InvalidArgumentError
from draftwire.contract.validation import parse_speculative_config
from draftwire.model.kv_cache import SequenceRows
from draftwire.server.stop_signals import STOP_SIGNALS
from verifier_service.core.batch import ForwardInput, ForwardOutput
from verifier_service.host.target_start import start_target
from verifier_service.options import VerifierOptions
from verifier_service.target.runner import start_runner
from verifier_service.target.tensor_parallel import Rank, exchange

logger = logging.getLogger(__name__)

# Seconds within which rank 0 must end after a worker has ended: a GPU that waits for the worker never returns.
LOSS_GRACE_S = 5.0
# Workers wait for the next step without limit; rank 0 detects the end of a worker by its process.
_NO_TIMEOUT = timedelta(days=3650)
_LOOPBACK = "127.0.0.1"
# Numbers in a step's first message, 16 KiB; a second message has the rest.
_MESSAGE_SIZE = 4096
_HEADER_SIZE = 4

RunStep = Callable[[ForwardInput], ForwardOutput]


def rank_device(first: torch.device, rank: Rank) -> torch.device:
    """Return the rank's device: one GPU per rank, from `first` on.

    Raises:
        InvalidArgumentError: If this machine has fewer GPUs.
    """
    if first.type != "cuda":
        return first
    count = torch.cuda.device_count() - first.index
    if rank.size > count:
        allowed = f"needs one GPU per rank from {first} on; this machine has {count}; allowed: 1 to {count}"
        raise InvalidArgumentError("tensor_parallel_size", rank.size, allowed)
    return torch.device("cuda", first.index + rank.index)


class Workers:
    """The workers, ranks 1 to size - 1. The context manager ends them.

    Workers end when this process ends, in any way. When a worker ends by itself, `on_loss` is called, and this process
    ends within `LOSS_GRACE_S`.
    """

    def __init__(self, options: VerifierOptions, device: torch.device) -> None:
        """Start the workers on the GPUs after `device`, and join their group. Both this process and the workers then
        call `start_target` and `start_runner` with the same `options`.

        Raises:
            InvalidArgumentError: If there are too few GPUs.
        """
        self.rank = Rank(0, options.tensor_parallel_size)
        rank_device(device, self.rank)
        self.on_loss: Callable[[], None] = lambda: None
        self._has_nccl = device.type == "cuda"
        self._is_closing = False
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._failures: list[Connection] = []
        listener = socket.create_server((_LOOPBACK, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            timeout=_NO_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        context = multiprocessing.get_context("spawn")
        for index in range(1, self.rank.size):
            failures, own_end = context.Pipe(duplex=False)
            rank = Rank(index, self.rank.size)
            process = context.Process(target=_follow, args=(options, device, rank, port, own_end), daemon=True)
            process.start()
            own_end.close()
            self._processes.append(process)
            self._failures.append(failures)
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()
        try:
            _join(store, self.rank, device)
        except BaseException:
            self._kill()  # otherwise the interpreter's exit would wait for the workers
            raise

    def lead(self, run: RunStep) -> RunStep:
        """Return a function that runs a step on all ranks; `run` runs it on rank 0.

        A step that fails on rank 0 ends the workers, which may wait in the step, and so the verifier.
        """

        def run_on_all(step: ForwardInput) -> ForwardOutput:
            try:
                _send(step)
                return run(step)
            except Exception:
                logger.critical("a step failed on rank 0; all ranks end, because they are out of step")
                self._kill()
                raise

        return run_on_all

    def close(self) -> None:
        """End the workers. With GPUs this process must then end by `os._exit`; see `process`."""
        self._is_closing = True
        self._kill()
        self._watcher.join()
        for process in self._processes:
            process.join()
        if not self._has_nccl:
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._watcher.join(1.0)  # the log should first have the reason of a worker's end
        self.close()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _watch(self) -> None:
        ended = wait([process.sentinel for process in self._processes])
        if self._is_closing:
            return
        last_resort = threading.Timer(LOSS_GRACE_S, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        for index, (process, failures) in enumerate(zip(self._processes, self._failures, strict=True), 1):
            if process.sentinel in ended:
                process.join()
                message = "rank %d of %d (process %s) ended with status %s, and the verifier with it. %s"
                logger.critical(message, index, self.rank.size, process.pid, process.exitcode, last_words(failures))
        self.on_loss()


def _join(store: dist.Store, rank: Rank, device: torch.device) -> None:
    """Create the group of all ranks: gloo for host tensors, NCCL for GPU tensors, only over loopback."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cpu":
        torch.set_num_threads(max(torch.get_num_threads() // rank.size, 1))  # ranks share the cores
    dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.size, timeout=_NO_TIMEOUT)


def _follow(options: VerifierOptions, first: torch.device, rank: Rank, port: int, failures: Connection) -> None:
    """Run a worker's process."""
    # Only rank 0 handles signals to the process group: its requests may still run.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    # Only rank 0 shows progress and logs.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        device = rank_device(first, rank)
        _join(dist.TCPStore(_LOOPBACK, port, is_master=False, timeout=_NO_TIMEOUT), rank, device)
        config = parse_speculative_config(options.speculative_config)
        target, num_blocks = start_target(options, config, device, rank)
        runner = start_runner(
            target, num_blocks, options.max_num_seqs, config.num_speculative_tokens, options.max_prefill_rows
        )
        while True:
            runner.run(_receive())
    except DraftwireError as error:
        failures.send(str(error))
    except Exception:
        failures.send(traceback.format_exc())
    os._exit(1)


def last_words(failures: Connection) -> str:
    """Return the error that ended a worker; empty if the worker was killed, also while it sent the error."""
    try:
        return str(failures.recv())
    except (EOFError, OSError):
        return ""


def end_with_parent() -> None:
    """End this process when its parent ends, in any way."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def _send(step: ForwardInput) -> None:
    numbers = _pack(step)
    size = len(numbers)
    first = np.zeros(_MESSAGE_SIZE, np.int32)
    first[:size] = numbers[:_MESSAGE_SIZE]
    _broadcast(first)
    if size > _MESSAGE_SIZE:
        _broadcast(numbers[_MESSAGE_SIZE:])


def _receive() -> ForwardInput:
    numbers = np.zeros(_MESSAGE_SIZE, np.int32)
    _broadcast(numbers)
    size = int(numbers[0])
    if size > _MESSAGE_SIZE:
        rest = np.zeros(size - _MESSAGE_SIZE, np.int32)
        _broadcast(rest)
        numbers = np.concatenate([numbers, rest])
    return _unpack(numbers[:size])


def _broadcast(numbers: np.ndarray) -> None:
    exchange(dist.broadcast, torch.from_numpy(numbers), 0)


def _pack(step: ForwardInput) -> np.ndarray:
    """Return a step as int32 [N]: N, the counts of rows, logit rows and sequences, these values, and all blocks."""
    sequences = [(sequence.start, sequence.count, len(sequence.blocks)) for sequence in step.sequences]
    parts = [
        np.array([0, len(step.token_ids), len(step.logit_rows), len(sequences)]),
        step.token_ids,
        step.positions,
        step.logit_rows,
        np.array(sequences, np.int32).reshape(-1),
        *(np.asarray(sequence.blocks, np.int32) for sequence in step.sequences),
    ]
    numbers = np.concatenate(parts).astype(np.int32)
    numbers[0] = len(numbers)
    return numbers


def _unpack(numbers: np.ndarray) -> ForwardInput:
    num_rows, num_logit_rows, num_sequences = numbers[1:_HEADER_SIZE]
    ends = np.cumsum([num_rows, num_rows, num_logit_rows, 3 * num_sequences])
    token_ids, positions, logit_rows, sequences, blocks = np.split(numbers[_HEADER_SIZE:], ends)
    starts, counts, lengths = sequences.reshape(-1, 3).T
    tables = np.split(blocks, np.cumsum(lengths))[:-1]
    return ForwardInput(
        token_ids.astype(np.int64),
        positions.astype(np.int64),
        [
            SequenceRows(cast(Sequence[int], table), int(start), int(count))
            for table, start, count in zip(tables, starts, counts, strict=True)
        ],
        logit_rows.astype(np.int64),
    )
