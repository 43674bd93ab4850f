"""A verifier that announces steps to a draft engine, with tokens and features in shared memory."""

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
    """Announces, commits and drops the steps of one stream.

    Attributes
    ----------
    marks
        With `holds`, the test writes the marks that show written tokens to the drafter.
    announced
        The announced steps, oldest first.
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
        """Announce a step of these rows, each with as many drafts as the first.

        `numbers` replace the counts and tokens. The features have room for `num_rows` rows, by default up to 3 too
        many. Their announced offset is `offset` bytes too large.
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
        """Queue the commit of the last announced step, or of step `announced_id`."""
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
        """Overwrite the announced tokens in shared memory."""
        self._rings.memory[64:] = 0x7F

    def early(self) -> dict[int, list[list[int]]]:
        """Return the early drafts written since the last call, by announced step."""
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
        """Wait for the device, as a verifier does before a commit."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        assert step.is_written

    def committed(self, *args: Sequence[int] | None, **options: Sequence[int] | int | None) -> dict[int, Reply]:
        """Commit as `commit` does, run the engine and return the replies."""
        self.commit(*args, **options)  # type: ignore[arg-type]
        run(self._stream.engine)
        return replies(self._stream.answers[-1])

    def replace(self, rows: Sequence[Rows] = (), closed: Sequence[int] = ()) -> dict[int, Reply]:
        """Send a step that replaces the announced steps, run the engine and return the replies."""
        self.drop()
        return self._stream.step(rows, closed=closed)

    def drop(self) -> None:
        """Drop the announced steps: decode a step that replaces them."""
        self._num_decoded += 1
        step = pb.DraftStep(step_id=self._num_decoded, replaces=len(self.announced))
        self.decoder.decode(pb.DraftRequest(step=step))

    @property
    def features_read(self) -> int:
        """Return the number of announced steps whose features the drafter has read."""
        return self.receiver.generation_read
