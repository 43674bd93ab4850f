"""Every sampling parameter has the same effect with drafts (of the good head) and without."""

from __future__ import annotations

import json
import os

import pytest
import torch
from services import acceptance_rate, crowd

from draftwire.client import Completion
from models import EOS, SENTENCES, VOCAB_SIZE, make_tokenizer, prompts_of

pytestmark = pytest.mark.xdist_group("llama")

TOKENIZER = make_tokenizer()
PROMPTS = prompts_of("llama")[:16]


def beginning(index: int) -> str:
    """Return the first two words of a sentence that the target has learnt."""
    return " ".join(SENTENCES[index].split(" ")[:2])


def with_and_without_drafts(pair, **options) -> tuple[list[Completion], list[Completion]]:
    options = {"temperature": 0, "max_tokens": 40, **options}
    drafts, none = (
        crowd(pair.client, [(prompt, {**options, "num_speculative_tokens": k}) for prompt in PROMPTS]) for k in (7, 0)
    )
    assert acceptance_rate(drafts) > 0
    assert not any(any(completion.drafted) for completion in none)
    return drafts, none


def outcome(completion: Completion):
    """Return the fields of a completion that drafts must not change."""
    return (
        completion.token_ids,
        completion.text,
        completion.token_text_ends,
        completion.finish_reason,
        completion.stop_text,
        completion.stop_token_id,
    )


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def plain(pairs) -> list[Completion]:
    """Greedy completions without other parameters."""
    pair = pairs("llama")
    return crowd(pair.client, [(p, {"temperature": 0, "max_tokens": 40, "num_speculative_tokens": 0}) for p in PROMPTS])


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -2.0, "presence_penalty": -1.0},
        {"repetition_penalty": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": dict.fromkeys(range(40, 300, 3), -100.0)},
        {"logit_bias": {263: 9.0, 221: 6.5}},
        {"min_tokens": 38},
        {"ignore_eos": True},
        {"stop_token_ids": [221, 264], "min_tokens": 7},
        {"allowed_token_ids": list(range(30, 290, 2))},
        {"bad_words": [" the", " and", "in"], "bad_word_ids": [[221], [263, 264]]},
    ],
    ids=lambda options: ",".join(options),
)
def test_parameter_takes_effect_and_drafts_change_nothing(llama, plain, options):
    drafts, none = with_and_without_drafts(llama, **options)
    assert list(map(outcome, drafts)) == list(map(outcome, none))
    assert tokens(none) != tokens(plain)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=json.dumps)
def test_filter_that_leaves_one_token_makes_sampling_greedy(llama, plain, options):
    drafts, none = with_and_without_drafts(llama, temperature=1.5, seed=3, **options)
    assert tokens(drafts) == tokens(none) == tokens(plain)


def test_end_token_ends_the_output_and_is_kept(llama):
    drafts, none = with_and_without_drafts(llama, max_tokens=120)
    assert list(map(outcome, drafts)) == list(map(outcome, none))
    ended = [completion for completion in drafts if completion.finish_reason == "stop"]
    assert len(ended) >= 8
    assert all(completion.token_ids.index(EOS) == len(completion.token_ids) - 1 for completion in ended)


def test_min_tokens_puts_the_end_off(llama):
    drafts, none = with_and_without_drafts(llama, max_tokens=120, min_tokens=90)
    assert list(map(outcome, drafts)) == list(map(outcome, none))
    assert all(EOS not in completion.token_ids[:90] for completion in drafts)
    assert min(len(completion.token_ids) for completion in drafts) >= 90


def test_ignore_eos_goes_on_to_the_limit(llama):
    drafts, _ = with_and_without_drafts(llama, max_tokens=80, ignore_eos=True)
    assert {len(completion.token_ids) for completion in drafts} == {80}
    assert any(EOS in completion.token_ids for completion in drafts)


@pytest.mark.parametrize("k", [0, 7])
@pytest.mark.parametrize(
    ("sentence", "stops", "found"),
    [
        (0, ["ice befo"], "ice befo"),
        (0, ["wall", "straight to", "runs straight"], "runs straight"),
        (1, ["kee", "keeps the three"], "kee"),
        (2, ["Möwen h"], "Möwen h"),
        (3, ["ûl", "€"], "ûl"),
        (8, ["ays 🙂"], "ays 🙂"),
        (7, ["no such words"], None),
    ],
)
def test_stop_text_across_tokens_ends_the_output_before_it(llama, sentence, stops, found, k):
    prompt = beginning(sentence)
    rest = SENTENCES[sentence].removeprefix(prompt)
    completion = llama.client.complete(prompt, temperature=0, max_tokens=120, stop=stops, num_speculative_tokens=k)
    assert completion.text == (rest if found is None else rest[: rest.index(found)])
    assert completion.stop_text == found
    assert completion.finish_reason == "stop"
    assert TOKENIZER.decode(list(completion.token_ids)).startswith(completion.text + (found or ""))


def test_stop_token_ends_the_output_and_is_reported(llama):
    stop = TOKENIZER.encode(SENTENCES[0]).ids[20]
    completion = llama.client.complete(beginning(0), temperature=0, max_tokens=120, stop_token_ids=[stop])
    assert completion.token_ids[-1] == completion.stop_token_id == stop
    assert completion.token_ids.count(stop) == 1
    assert completion.finish_reason == "stop"


def test_logprobs_are_the_targets_with_and_without_drafts(llama, references):
    drafts, none = with_and_without_drafts(llama, logprobs=5, repetition_penalty=1.2)
    model = references("llama").model
    for prompt, with_drafts, without in zip(PROMPTS, drafts, none, strict=True):
        assert with_drafts.token_ids == without.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *without.token_ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        for row, token, one, other in zip(
            expected, without.token_ids, with_drafts.logprobs, without.logprobs, strict=True
        ):
            assert one.logprob == pytest.approx(row[token].item(), abs=1e-3)
            assert other.logprob == pytest.approx(row[token].item(), abs=1e-3)
            assert one.rank == other.rank == int((row > row[token] + 1e-6).sum()) + 1
            assert [value for _, value in one.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
            assert len(other.top) == 5


@pytest.mark.parametrize("k", [0, 7])
@pytest.mark.parametrize("sentence", [2, 3, 5, 6, 8])
def test_characters_split_over_tokens_come_whole(llama, sentence, k):
    prompt = beginning(sentence)[:6] if " " not in SENTENCES[sentence] else beginning(sentence)
    chunks = list(llama.client.generate(prompt, temperature=0, max_tokens=120, num_speculative_tokens=k))
    text = "".join(chunk.text for chunk in chunks)
    assert prompt + text == SENTENCES[sentence]
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk.text for chunk in chunks)


def added_text(prompt: list[int], ids: list[int]) -> str:
    """Return the text that the tokens add to the prompt's text."""
    return TOKENIZER.decode(prompt + ids)[len(TOKENIZER.decode(prompt)) :]


def test_text_is_the_tokenizers_and_each_token_knows_its_end(llama):
    drafts, _ = with_and_without_drafts(llama, max_tokens=80)
    unfinished = 0
    for prompt, completion in zip(PROMPTS, drafts, strict=True):
        ids = list(completion.token_ids)
        assert completion.text == added_text(prompt, ids)
        assert len(completion.token_text_ends) == len(ids)
        assert list(completion.token_text_ends) == sorted(completion.token_text_ends)
        for count, end in enumerate(completion.token_text_ends, start=1):
            so_far = added_text(prompt, ids[:count])
            if not so_far.endswith("\N{REPLACEMENT CHARACTER}"):
                assert completion.text[:end] == so_far
            else:
                unfinished += 1
                assert so_far.startswith(completion.text[:end])
    assert unfinished > 0


def test_prompt_as_text_ids_or_chat_is_the_same_prompt(llama):
    text = "user: The river bends\nassistant:"
    prompts = [text, TOKENIZER.encode(text).ids, [{"role": "user", "content": "The river bends"}]]
    outputs = [llama.client.complete(prompt, temperature=0, max_tokens=20) for prompt in prompts]
    assert len(set(tokens(outputs))) == 1
    assert {output.statistics.prompt_tokens for output in outputs} == {len(prompts[1])}


@pytest.mark.parametrize("k", [0, 7])
def test_context_ends_the_output(llama, k):
    context = llama.client.info().max_model_len
    prompt = (PROMPTS[0] * context)[: context - 5]
    completion = llama.client.complete(prompt, temperature=0, max_tokens=100, ignore_eos=True, num_speculative_tokens=k)
    assert len(completion.token_ids) == 5
    assert completion.finish_reason == "length"


def test_statistics_add_up(llama):
    for completion in with_and_without_drafts(llama)[0]:
        statistics = completion.statistics
        assert statistics.output_tokens == len(completion.token_ids)
        assert statistics.verify_tokens == statistics.verify_steps + sum(statistics.accepted)
        assert 1 + statistics.verify_tokens >= statistics.output_tokens
        assert sum(completion.drafted) <= sum(statistics.accepted)
        assert all(
            accepted <= drafted for accepted, drafted in zip(statistics.accepted, statistics.drafted, strict=True)
        )
        assert list(statistics.drafted) == sorted(statistics.drafted, reverse=True)


def test_vocabulary_is_the_target_s(llama):
    info = llama.client.info()
    assert info.vocab_size == VOCAB_SIZE
    assert info.target.endswith(os.path.basename(llama.target))
