"""Conversion of tokens to text: characters split over tokens, stop texts, and finish reasons."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from draftwire.contract.validation import build_sampling_params, resolve_sampling_params
from draftwire.v1 import generate_pb2 as pb
from models import EOS, VOCAB_SIZE, make_tokenizer
from verifier_service.api.response_text import ResponseText
from verifier_service.core.stop_conditions import StopConditions
from verifier_service.core.tokenizer import Detokenizer, StopFinder, TextCodec

TOKENIZER = make_tokenizer()
ROOM = 1000


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, eos_token="<eos>").save_pretrained(directory)
    return TextCodec(directory)


@pytest.fixture(scope="module")
def byte_codecs(tmp_path_factory):
    """Tokenizers whose ids 0 to 255 are single bytes, 256 is special and 257 is a word."""
    by_byte = [chr(code) for code in bytes_to_unicode_values()]
    codecs = []
    for names, decoder in (
        (by_byte, decoders.ByteLevel()),
        ([f"<0x{byte:02X}>" for byte in range(256)], decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])),
    ):
        vocab = {name: i for i, name in enumerate([*names, "<s>", "word"])}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="word"))
        tokenizer.decoder = decoder
        directory = tmp_path_factory.mktemp("bytes")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(directory)
        codecs.append(TextCodec(directory))
    return codecs


def bytes_to_unicode_values() -> list[int]:
    """Return the code point of each byte in a byte-level vocabulary: the byte itself if it is printable."""
    seen = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [byte if byte in seen else next(others) for byte in range(256)]


def growing(codec: TextCodec, ids: list[int]) -> str:
    """Return the text of tokens that arrive one by one, with all pending tokens decoded again for each."""
    context: list[int] = []
    pending: list[int] = []
    out = text = ""
    for token in ids:
        pending.append(token)
        text = codec.decode(context + pending)[len(codec.decode(context)) :]
        if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            out, context, pending, text = out + text, pending, [], ""
    return out + text


class CountingCodec:
    """A codec that counts the tokens that it decodes."""

    def __init__(self, codec: TextCodec) -> None:
        self.silent_ids = codec.silent_ids
        self.num_decoded = 0
        self._codec = codec

    def decode(self, ids: list[int]) -> str:
        self.num_decoded += len(ids)
        return self._codec.decode(ids)

    def decode_all(self, ids: list[int]) -> str:
        self.num_decoded += len(ids)
        return self._codec.decode_all(ids)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


class Pushed(NamedTuple):
    """The output of one step as the client gets it."""

    token_ids: list[int]
    text: str
    text_ends: list[int]
    finish_reason: pb.FinishReason
    stop_token_id: int | None
    stop_text: str | None
    output_tokens: int | None  # None without statistics


class Output:
    """The engine's stop conditions and the service's text conversion for one request."""

    def __init__(self, codec: TextCodec | None, **options: Any) -> None:
        params = resolve_sampling_params(build_sampling_params(**{"max_tokens": 100, **options}))
        self._stops = StopConditions(params, frozenset([EOS]))
        self._text = ResponseText("r", params, codec, [])
        self._count = 0

    def push(self, token_ids: list[int], room: int = ROOM) -> Pushed:
        piece = self._stops.cut(token_ids, room)
        self._count += len(piece.token_ids)
        message = pb.GenerateResponse(
            token_ids=piece.token_ids,
            drafted=[True] * len(piece.token_ids),
            logprobs=[pb.TokenLogprobs(rank=token_id) for token_id in piece.token_ids],
            finish_reason=piece.finish_reason,
            stop_token_id=piece.stop_token_id,
            statistics=pb.RequestStatistics(output_tokens=self._count),
        )
        has_stopped = self._text.add_to(message)
        tokens = list(message.token_ids)
        assert len(message.drafted) == len(tokens)
        assert [one.rank for one in message.logprobs] == tokens
        assert has_stopped == message.HasField("stop_text")
        return Pushed(
            tokens,
            message.text,
            list(message.token_text_ends),
            message.finish_reason,
            *(getattr(message, name) if message.HasField(name) else None for name in ("stop_token_id", "stop_text")),
            message.statistics.output_tokens if message.HasField("statistics") else None,
        )


def plainly(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """Return the text that `StopFinder` must return for each piece, and the stop text, by trying every overlap."""
    given, held = [], ""
    for piece in pieces:
        held += piece
        found = [(at, stop) for stop in stops if (at := held.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            return [*given, held[:at]], stop
        ends = [n for stop in stops for n in range(len(stop)) if held.endswith(stop[:n])]
        keep = len(held) - max(ends)
        given.append(held[:keep])
        held = held[keep:]
    return given, None


class TestStopFinder:
    @pytest.mark.parametrize("seed", range(300))
    def test_gives_out_what_trying_every_overlap_does(self, seed):
        rng = Random(seed)

        def text(longest: int) -> str:
            return "".join(rng.choice("ab") for _ in range(rng.randrange(1, longest)))

        stops = [text(8) for _ in range(rng.randrange(1, 5))]
        pieces = [text(4) for _ in range(12)]
        expected, stop = plainly(stops, pieces)
        finder = StopFinder(stops)
        answers = [finder.push(piece) for piece in pieces[: len(expected)]]
        assert [free for free, _ in answers] == expected
        assert answers[-1][1] == stop

    def test_text_without_stops_goes_out_at_once(self):
        assert StopFinder([]).push("anything") == ("anything", None)

    def test_stop_in_pieces_is_found_and_not_given_out(self):
        finder = StopFinder(["END"])
        assert [finder.push(piece) for piece in ("a E", "N", "D b")] == [("a ", None), ("", None), ("", "END")]
        assert finder.flush() == ""

    def test_what_is_held_at_the_end_is_text(self):
        finder = StopFinder(["END"])
        assert finder.push("the EN") == ("the ", None)
        assert finder.flush() == "EN"
        assert finder.flush() == ""


class TestDetokenizer:
    def test_character_of_several_tokens_comes_when_it_is_whole(self, codec):
        ids = ids_of("€")
        assert len(ids) == 3
        detokenizer = Detokenizer(codec, [])
        assert [detokenizer.push(token) for token in ids] == ["", "", "€"]
        assert detokenizer.flush() == ""

    def test_unfinished_character_comes_as_a_replacement_at_the_end(self, codec):
        detokenizer = Detokenizer(codec, [])
        assert [detokenizer.push(token) for token in ids_of("é")[:1]] == [""]
        assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"

    def test_special_tokens_have_no_text(self, codec):
        detokenizer = Detokenizer(codec, [])
        assert [detokenizer.push(token) for token in (*ids_of("a"), EOS, *ids_of("b"))] == ["a", "", "b"]

    @pytest.mark.parametrize("seed", range(20))
    def test_pieces_are_the_tokenizer_s_text_of_any_tokens(self, codec, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCAB_SIZE, (60,), generator=generator).tolist()
        detokenizer = Detokenizer(codec, [])
        text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
        assert text == TOKENIZER.decode(ids, skip_special_tokens=True)

    @pytest.mark.parametrize("fallback", [False, True], ids=["byte-level", "byte-fallback"])
    @pytest.mark.parametrize("seed", range(60))
    def test_text_of_any_bytes_is_that_of_all_pending_tokens(self, byte_codecs, fallback, seed):
        """Runs of invalid UTF-8, mixed with whole characters and special tokens."""
        rng = Random(seed)
        codec = byte_codecs[fallback]
        ids: list[int] = []
        while len(ids) < 300:
            ids += rng.choices(
                [
                    [rng.randrange(256)],
                    [rng.randrange(128, 192)] * rng.randrange(30),
                    list("a€😀".encode()),
                    [256],
                    [257],
                ],
                weights=rng.choices((1, 4, 9), k=5),
            )[0]
        detokenizer = Detokenizer(codec, [])
        text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
        assert text == growing(codec, ids)
        if not fallback:  # that decoder changes earlier characters if their run of bytes continues
            assert text == codec.decode(ids)

    @pytest.mark.parametrize("fallback", [False, True], ids=["byte-level", "byte-fallback"])
    @pytest.mark.parametrize("ids", [[256], [0x80], [0xE2, 0x82], [999]], ids=["special", "lone", "cut", "unknown"])
    def test_a_token_costs_the_same_however_many_bring_no_text(self, byte_codecs, fallback, ids):
        """Tokens without text are not all decoded again for each new token."""
        codec = CountingCodec(byte_codecs[fallback])
        detokenizer = Detokenizer(codec, [ord("a")])
        text = "".join(detokenizer.push(token) for token in ids * 2000) + detokenizer.flush()
        assert codec.num_decoded <= 60 * len(ids) * 2000
        assert text == growing(byte_codecs[fallback], ids * 40)[:1] * len(text)
        assert len(text) == {256: 0, 0x80: 2000, 0xE2: 4000 if fallback else 2000, 999: 0}[ids[0]]

    def test_first_token_is_written_as_it_is_behind_the_prompt(self, tmp_path):
        tokenizer = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "<unk>": 2}, unk_token="<unk>"))
        tokenizer.decoder = decoders.Metaspace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
        codec = TextCodec(tmp_path)
        assert Detokenizer(codec, []).push(1) == "two"
        assert Detokenizer(codec, [0]).push(1) == " two"


class TestOutput:
    def test_tokens_and_their_text_go_through(self, codec):
        piece = Output(codec).push(ids_of("a€b"))
        assert (piece.text, piece.text_ends) == ("a€b", [1, 1, 1, 2, 3])
        assert piece.finish_reason == pb.FINISH_REASON_UNSPECIFIED

    def test_end_token_in_the_middle_of_a_step_cuts_the_rest_off(self, codec):
        piece = Output(codec).push([*ids_of("ab"), EOS, *ids_of("cd")])
        assert piece.token_ids == [*ids_of("ab"), EOS]
        assert (piece.text, piece.finish_reason, piece.stop_token_id) == ("ab", pb.FINISH_REASON_STOP, None)

    def test_ignored_end_token_is_one_like_others(self, codec):
        piece = Output(codec, ignore_eos=True).push([*ids_of("a"), EOS, *ids_of("b")])
        assert (piece.text, piece.finish_reason) == ("ab", pb.FINISH_REASON_UNSPECIFIED)

    def test_stop_token_is_kept_and_named_and_has_no_text(self, codec):
        a, b, c = ids_of("a"), ids_of("b"), ids_of("c")
        piece = Output(codec, stop_token_ids=b).push([*a, *b, *c])
        assert piece.token_ids == [*a, *b]
        assert (piece.text, piece.stop_token_id, piece.finish_reason) == ("a", b[0], pb.FINISH_REASON_STOP)

    def test_stop_text_over_two_steps_ends_before_it(self, codec):
        output = Output(codec, stop=["XYZ"])
        first = output.push(ids_of("aX"))
        assert (first.text, first.text_ends) == ("a", [1, 1])
        assert first.output_tokens is None
        second = output.push(ids_of("Y") + ids_of("Z") + ids_of("b"))
        assert (second.token_ids, second.output_tokens) == (ids_of("Y") + ids_of("Z"), 4)
        assert (second.text, second.stop_text, second.finish_reason) == ("", "XYZ", pb.FINISH_REASON_STOP)

    def test_text_held_back_for_a_stop_comes_at_the_end(self, codec):
        output = Output(codec, stop=["XYZ"], max_tokens=2)
        piece = output.push(ids_of("aX"))
        assert (piece.text, piece.text_ends, piece.finish_reason) == ("aX", [1, 2], pb.FINISH_REASON_LENGTH)

    @pytest.mark.parametrize(("max_tokens", "room"), [(3, ROOM), (100, 3)])
    def test_length_ends_in_the_middle_of_a_step(self, codec, max_tokens, room):
        piece = Output(codec, max_tokens=max_tokens).push(ids_of("a") * 5, room)
        assert (piece.text, piece.finish_reason) == ("aaa", pb.FINISH_REASON_LENGTH)

    def test_end_token_at_the_length_limit_is_a_stop(self, codec):
        assert Output(codec, max_tokens=1).push([EOS]).finish_reason == pb.FINISH_REASON_STOP

    def test_nothing_ends_before_min_tokens(self, codec):
        a, b = ids_of("a"), ids_of("b")
        output = Output(codec, stop=["a"], stop_token_ids=b, min_tokens=3)
        piece = output.push([*a, *b, EOS])
        assert (piece.text, piece.finish_reason) == ("ab", pb.FINISH_REASON_UNSPECIFIED)
        assert output.push(a).stop_text == "a"

    @pytest.mark.parametrize(
        ("min_tokens", "text", "stop"), [(0, "b", "aa"), (2, "b", "aa"), (3, "ba", "aa"), (4, "baaa", None)]
    )
    def test_a_stop_text_may_begin_before_min_tokens(self, codec, min_tokens, text, stop):
        output = Output(codec, stop=["aa"], min_tokens=min_tokens, max_tokens=4)
        pieces = []
        for token_id in ids_of("baaa"):
            pieces.append(output.push([token_id]))
            if pieces[-1].stop_text:
                break
        assert ("".join(piece.text for piece in pieces), pieces[-1].stop_text) == (text, stop)

    def test_stop_text_completed_by_the_last_token_is_found(self, codec):
        piece = Output(codec, stop=["ab"], max_tokens=2).push([*ids_of("a"), *ids_of("b")])
        assert (piece.text, piece.stop_text, piece.finish_reason) == ("", "ab", pb.FINISH_REASON_STOP)

    def test_the_stop_text_may_be_part_of_the_text(self, codec):
        output = Output(codec, stop=["XYZ"], include_stop_text=True)
        assert output.push(ids_of("aX")).text == "a"
        second = output.push(ids_of("Y") + ids_of("Z") + ids_of("b"))
        assert (second.text, second.stop_text, second.token_ids) == ("XYZ", "XYZ", ids_of("YZ"))

    def test_the_stop_token_may_have_its_text(self, codec):
        a, b = ids_of("a"), ids_of("b")
        assert Output(codec, stop_token_ids=b, include_stop_text=True).push([*a, *b, *a]).text == "ab"
        assert Output(codec, include_stop_text=True).push([*a, EOS]).text == "a"
        with_special = Output(codec, include_stop_text=True, skip_special_tokens=False)
        assert with_special.push([*a, EOS]).text == "a<eos>"

    def test_special_tokens_may_have_their_text(self, codec):
        a = ids_of("a")
        kept = {"skip_special_tokens": False, "ignore_eos": True}
        assert Output(codec, **kept).push([*a, EOS, *a]).text == "a<eos>a"
        assert Output(codec, stop=["eos>"], **kept).push([*a, EOS, *a]).text == "a<"
        assert Output(codec, skip_special_tokens=False).push([*a, EOS]).text == "a"

    def test_without_a_tokenizer_there_are_only_tokens(self):
        piece = Output(None).push([1, 2, EOS])
        assert piece.token_ids == [1, 2, EOS]
        assert (piece.text, piece.text_ends, piece.finish_reason) == ("", [0, 0, 0], pb.FINISH_REASON_STOP)

    @pytest.mark.parametrize("seed", range(10))
    def test_output_does_not_depend_on_how_the_tokens_came_in_steps(self, codec, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCAB_SIZE, (40,), generator=generator).tolist()
        options = {"stop": ["e", " th", "\n"], "min_tokens": 6, "max_tokens": 30, "ignore_eos": True}

        def joined(steps: list[list[int]]):
            output, text, tokens, last = Output(codec, **options), "", [], None
            for step in steps:
                last = output.push(step)
                text, tokens = text + last.text, tokens + last.token_ids
                if last.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
                    break
            assert last is not None
            return text, tokens, last.finish_reason, last.stop_text

        one_by_one = joined([[token] for token in ids])
        assert joined([ids]) == joined([ids[i : i + 3] for i in range(0, len(ids), 3)]) == one_by_one
