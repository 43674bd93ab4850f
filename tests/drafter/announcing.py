"""A verifier that announces steps: tokens and features in memory that both sides have, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from harness import Reply, Rows, Stream, replies, run
from rings import HeldMarks, ends_of
from tiny_head import TARGET_VOCAB, WIDTH

from drafter_service.engine.step import AnnouncedStep
from drafter_service.server.step_decoder import StepDecoder
from draftwire.transport import TensorReceiver, TensorSender, ring_bytes
from draftwire.transport.host_segment import HostSegment
from draftwire.v1 import draft_pb2 as pb

CPU = torch.device("cpu")


class Announcer:
    """Announces steps of one stream, commits and drops them.

    Attributes
    ----------
    marks
        Says that tokens have been written, where it `holds` that back.
    announced
        The steps, oldest first.
    """

    def __init__(
        self,
        stream: Stream,
        k: int = 4,
        device: torch.device = CPU,
        *,
        holds: bool = False,
        feature_bytes: int = 1 << 20,
    ) -> None:
        self.announced: list[AnnouncedStep] = []
        self._stream = stream
        self._columns = k + 2
        self._device = device
        self._num_decoded = 0
        self._rings = rings = HostSegment.unshared(ring_bytes(32, k), device)
        features = HostSegment.unshared(feature_bytes, device)
        self.marks = HeldMarks(rings)
        self.channel, self.drafters = ends_of(rings, device, self.marks if holds else None)
        self.sender, self.receiver = TensorSender(device, features), TensorReceiver(device, features)
        self.decoder = StepDecoder(TARGET_VOCAB, WIDTH, torch.float32, k, self.receiver)

    def announce(
        self,
        rows: Sequence[Rows],
        numbers: Sequence[Sequence[int]] | None = None,
        num_rows: int | None = None,
        offset: int = 0,
    ) -> AnnouncedStep:
        """Announces a step of these rows, all with the drafts of the first.

        `numbers` are written instead of its counts and tokens; it has room for `num_rows`, or 3 more; features are
        `offset` bytes behind where they are.
        """
        if numbers is None:
            tokens = [part.text.rows(part.first, part.count)[0].tolist() for part in rows]
            numbers = [[len(own), *own, *[-1] * (self._columns - 1 - len(own))] for own in tokens]
        states = torch.cat([part.text.rows(part.first, part.count)[1] for part in rows])
        most = len(rows) * (self._columns - 1)
        features = self.sender.begin(torch.float32, (num_rows or min(len(states) + 3, most), WIDTH))
        features.tensor[: len(states)].copy_(states.to(self._device), non_blocking=True)
        drawn = torch.tensor(numbers, dtype=torch.int32).to(self._device)
        message = pb.Announce(
            announced_id=len(self.announced) + 1,
            sequence_ids=[part.sequence_id for part in rows],
            first_rows=[part.first for part in rows],
            num_drafts=rows[0].drafts,
            columns=self._columns,
            num_rows=len(features.tensor),
        )
        features.announce(message.features)
        message.features.offset += offset
        assert self.channel.send(message.SerializeToString(), drawn)
        features.seal()
        (record,) = self.drafters.receive()
        step = self.decoder.decode_announce(pb.Announce.FromString(record.message), record.body)
        step.show = partial(self._show, step.announced_id)
        self.announced.append(step)
        self._stream.engine.announce(self._stream.session, step)
        return step

    def commit(
        self,
        num_drafts: Sequence[int] | None = None,
        closed: Sequence[int] = (),
        announced_id: int | None = None,
    ) -> None:
        """Queues the commit of the step announced last, or of another."""
        step = self.announced[-1 if announced_id is None else announced_id - 1]
        self._wait(step)
        if num_drafts is None:
            num_drafts = [step.num_drafts for one in step.sequence_ids if one not in closed]
        message = pb.Commit(announced_id=step.announced_id, closed_ids=closed, num_drafts=num_drafts)
        self._num_decoded += 1
        message.step_id = self._num_decoded
        decoded = self.decoder.decode(pb.DraftRequest(commit=message))
        self._stream.num_steps += 1
        self._stream.engine.submit(self._stream.session, decoded._replace(step_id=self._stream.num_steps))

    def _show(self, announced_id: int, drafts: torch.Tensor) -> None:
        assert self.drafters.send(b"%d" % announced_id, drafts)

    def scribble(self) -> None:
        """Writes over all that the drafter can read."""
        self._rings.memory[64:] = 0x7F

    def early(self) -> dict[int, list[list[int]]]:
        """Early drafts that the drafter has written since the last call, by announced step."""
        found = {}
        for record in self.channel.receive():
            announced_id = int(record.message)
            assert record.body is not None
            assert record.body.is_written
            count = len(self.announced[announced_id - 1].sequence_ids)
            found[announced_id] = record.body.read((count, record.body.num_numbers // count)).tolist()
            record.body.release()
        return found

    def _wait(self, step: AnnouncedStep) -> None:
        """The verifier has waited for its device before it commits."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        assert step.is_written

    def committed(self, *args: Sequence[int] | None, **options: Sequence[int] | int | None) -> dict[int, Reply]:
        """Commits as `commit` does, and runs the engine until the answer is there."""
        self.commit(*args, **options)  # type: ignore[arg-type]
        run(self._stream.engine)
        return replies(self._stream.answers[-1])

    def replace(self, rows: Sequence[Rows] = (), closed: Sequence[int] = ()) -> dict[int, Reply]:
        """Sends a step that replaces what has been announced, and runs the engine until it is answered."""
        self.drop()
        return self._stream.step(rows, closed=closed)

    def drop(self) -> None:
        """Drops what has been announced; the next step says so."""
        self._num_decoded += 1
        step = pb.DraftStep(step_id=self._num_decoded, replaces=len(self.announced))
        self.decoder.decode(pb.DraftRequest(step=step))

    @property
    def features_read(self) -> int:
        """Announced steps whose features the drafter has read."""
        return self.receiver.generation_read
