"""Every rule of SamplingParams and SpeculativeConfig, with its error message."""

from __future__ import annotations

import json

import pytest

from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.fields import check_limits, with_defaults
from draftwire.contract.validation import (
    build_sampling_params,
    parse_speculative_config,
    resolve_sampling_params,
    resolve_speculative_config,
    speculative_config_from_mapping,
    speculative_config_to_mapping,
)
from draftwire.v1 import config_pb2 as pb
from draftwire.v1 import generate_pb2

NAN, INF = float("nan"), float("inf")
INT32_MAX = 2**31 - 1
INT64 = 2**63

SAMPLING_DEFAULTS = pb.SamplingParams(
    temperature=1,
    top_k=0,
    top_p=1,
    min_p=0,
    repetition_penalty=1,
    presence_penalty=0,
    frequency_penalty=0,
    max_tokens=16,
    min_tokens=0,
    ignore_eos=False,
    skip_special_tokens=True,
    include_stop_text=False,
)

GOOD_SAMPLING = [
    {"temperature": 0},
    {"temperature": 1e6},
    {"top_k": 0},
    {"top_k": INT32_MAX},
    {"top_p": 1e-6},
    {"top_p": 1},
    {"min_p": 0},
    {"min_p": 1},
    {"repetition_penalty": 1e-6},
    {"repetition_penalty": 1000},
    {"presence_penalty": -2},
    {"presence_penalty": 2},
    {"frequency_penalty": -2},
    {"frequency_penalty": 2},
    {"logit_bias": {}},
    {"logit_bias": {0: -100, 5: 100}},
    {"logit_bias": {"7": 1}},
    {"logit_bias": dict.fromkeys(range(1024), 1)},
    {"seed": -INT64},
    {"seed": INT64 - 1},
    {"max_tokens": 1},
    {"max_tokens": INT32_MAX, "min_tokens": INT32_MAX},
    {"min_tokens": 16},
    {"stop": []},
    {"stop": ["é" * 512] * 16},
    {"stop_token_ids": [0] * 128},
    {"ignore_eos": True},
    {"logprobs": 0},
    {"logprobs": 20},
    {"allowed_token_ids": list(range(262144))},
    {"allowed_token_ids": [3, 4], "bad_word_ids": [[3], [4, 4]]},
    {"bad_words": ["é" * 64] * 64},
    {"bad_word_ids": [[0] * 16] * 128},
    {"bad_word_ids": [{"ids": [7]}]},
    {"skip_special_tokens": False},
    {"include_stop_text": True},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 20},
    {"structured_output": {"json_schema": {"type": "object"}}},
    {"structured_output": {"json_schema": '{"type": "object"}'}},
    {"structured_output": {"json_object": True}},
    {"structured_output": {"regex": "a" * 65536}},
    {"structured_output": {"grammar": 'root ::= "a"'}},
    {"structured_output": {"choice": ["a", "b"]}},
    {"structured_output": {"structural_tag": {"structures": [], "triggers": []}}},
]

BAD_SAMPLING = [
    ({"temperature": -0.5}, "temperature = -0.5: allowed range [0, inf)"),
    ({"temperature": NAN}, "temperature = nan: allowed range [0, inf)"),
    ({"temperature": INF}, "temperature = inf: allowed range [0, inf)"),
    ({"temperature": 1e39}, "temperature = inf: allowed range [0, inf)"),
    ({"temperature": "hot"}, "temperature = 'hot': allowed range [0, inf)"),
    ({"temperature": True}, "temperature = True: allowed range [0, inf) (expected a number)"),
    ({"top_k": -1}, "top_k = -1: allowed range [0, 2147483647]"),
    ({"top_k": INT32_MAX + 1}, "top_k = 2147483648: allowed range [0, 2147483647]"),
    ({"top_k": 1.5}, "top_k = 1.5: allowed range [0, 2147483647]"),
    ({"top_p": 0}, "top_p = 0.0: allowed range (0, 1]"),
    ({"top_p": 1.1}, "top_p = 1.1: allowed range (0, 1]"),
    ({"top_p": NAN}, "top_p = nan: allowed range (0, 1]"),
    ({"min_p": -0.1}, "min_p = -0.1: allowed range [0, 1]"),
    ({"min_p": 1.5}, "min_p = 1.5: allowed range [0, 1]"),
    ({"repetition_penalty": 0}, "repetition_penalty = 0.0: allowed range (0, inf)"),
    ({"repetition_penalty": -1}, "repetition_penalty = -1.0: allowed range (0, inf)"),
    ({"presence_penalty": 2.5}, "presence_penalty = 2.5: allowed range [-2, 2]"),
    ({"presence_penalty": -2.5}, "presence_penalty = -2.5: allowed range [-2, 2]"),
    ({"frequency_penalty": 2.5}, "frequency_penalty = 2.5: allowed range [-2, 2]"),
    ({"frequency_penalty": -2.5}, "frequency_penalty = -2.5: allowed range [-2, 2]"),
    ({"logit_bias": {1: 100.5}}, "logit_bias = 100.5: allowed range [-100, 100]"),
    ({"logit_bias": {1: -INF}}, "logit_bias = -inf: allowed range [-100, 100]"),
    ({"logit_bias": {-1: 1}}, "logit_bias = {-1: 1}: "),
    ({"logit_bias": {"the": 1}}, "logit_bias = {'the': 1}: "),
    ({"logit_bias": [1]}, "logit_bias = [1]: "),
    ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias = 1025 entries: at most 1024 entries"),
    ({"seed": INT64}, "must be a 64-bit integer"),
    ({"seed": 0.5}, "seed = 0.5: must be a 64-bit integer"),
    ({"max_tokens": 0}, "max_tokens = 0: allowed range [1, 2147483647]"),
    ({"max_tokens": INT32_MAX + 1}, "max_tokens = 2147483648: allowed range [1, 2147483647]"),
    ({"min_tokens": 17}, "min_tokens = 17: allowed range [0, max_tokens = 16]"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens = 5: allowed range [0, max_tokens = 4]"),
    ({"min_tokens": -1}, "min_tokens = -1: allowed range [0, 2147483647]"),
    ({"stop": ["a"] * 17}, "stop = 17 entries: at most 16 entries"),
    ({"stop": [""]}, "stop = '': allowed length 1 to 1024 bytes, got 0"),
    ({"stop": ["é" * 513]}, "allowed length 1 to 1024 bytes, got 1026"),
    ({"stop": "END"}, "stop = 'END': must be a list of text (expected a list)"),
    ({"stop": [1]}, "stop = [1]: must be a list of text"),
    ({"stop": ["\ud800"]}, "must be a list of text"),
    ({"stop_token_ids": [0] * 129}, "stop_token_ids = 129 entries: at most 128 entries"),
    ({"stop_token_ids": [-1]}, "stop_token_ids = [-1]: must be a list of a number"),
    ({"stop_token_ids": 7}, "stop_token_ids = 7: must be a list of a number"),
    ({"ignore_eos": 1}, "ignore_eos = 1: must be true or false"),
    ({"ignore_eos": "yes"}, "ignore_eos = 'yes': must be true or false"),
    ({"logprobs": 21}, "logprobs = 21: allowed range [0, 20]"),
    ({"logprobs": -1}, "logprobs = -1: allowed range [0, 20]"),
    ({"stop_token_ids": [True]}, "stop_token_ids = [True]: must be a list of a number (expected no true or false)"),
    ({"logit_bias": {True: 1}}, "logit_bias = {True: 1}: "),
    ({"logit_bias": {1: True}}, "logit_bias = {1: True}: "),
    ({"logit_bias": {1.5: 1}}, "logit_bias = {1.5: 1}: "),
    ({"allowed_token_ids": [0] * 262145}, "allowed_token_ids = 262145 entries: at most 262144 entries"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids = [-1]: must be a list of a number"),
    ({"allowed_token_ids": [3, 4], "bad_word_ids": [[4], [3]]}, "allowed_token_ids = [3, 4]: at least one token"),
    ({"bad_words": ["a"] * 65}, "bad_words = 65 entries: at most 64 entries"),
    ({"bad_words": [""]}, "bad_words = '': allowed length 1 to 128 bytes, got 0"),
    ({"bad_words": "damn"}, "bad_words = 'damn': must be a list of text (expected a list)"),
    ({"bad_word_ids": [[]]}, "bad_word_ids = []: at least one token"),
    ({"bad_word_ids": [[1]] * 129}, "bad_word_ids = 129 entries: at most 128 entries"),
    ({"bad_word_ids": [[1] * 17]}, "bad_word_ids.ids = 17 entries: at most 16 entries"),
    ({"bad_word_ids": [1]}, "bad_word_ids.ids = 1: must be a list of a number"),
    ({"bad_word_ids": 1}, "bad_word_ids = 1: must be a list of lists of token ids"),
    ({"skip_special_tokens": 1}, "skip_special_tokens = 1: must be true or false"),
    ({"include_stop_text": "yes"}, "include_stop_text = 'yes': must be true or false"),
    ({"prompt_logprobs": 21}, "prompt_logprobs = 21: allowed range [0, 20]"),
    ({"structured_output": {}}, "structured_output = {}: must be a mapping with one key of: json_schema, "),
    ({"structured_output": {"poem": "a"}}, "must be a mapping with one key of: json_schema, json_object, regex, "),
    ({"structured_output": {"regex": "a", "json_object": True}}, "must be a mapping with one key of: "),
    ({"structured_output": {"regex": 1}}, "structured_output.regex = 1: must be text"),
    ({"structured_output": {"regex": ""}}, "structured_output.regex = '': allowed length 1 to 65536 bytes, got 0"),
    ({"structured_output": {"regex": "a" * 65537}}, "allowed length 1 to 65536 bytes, got 65537"),
    ({"structured_output": {"json_schema": "{"}}, "structured_output.json_schema = '{': is not valid JSON: "),
    ({"structured_output": {"json_schema": [1]}}, "structured_output.json_schema = '[1]': must be a JSON object"),
    ({"structured_output": {"json_schema": {"a": {1}}}}, "must be JSON (Object of type set is not JSON serializable)"),
    ({"structured_output": {"json_object": False}}, "structured_output.json_object = False: must be true"),
    ({"structured_output": {"choice": "ab"}}, "structured_output.choice = 'ab': must be a list of texts"),
    ({"structured_output": {"choice": []}}, "structured_output.choice = []: at least one text is required"),
    ({"structured_output": {"choice": ["a", "a"]}}, "structured_output.choice = 'a': is given more than once"),
    ({"structured_output": {"choice": ["a" * 4097]}}, "allowed length 1 to 4096 bytes, got 4097"),
    ({"structured_output": {"choice": [str(i) for i in range(1025)]}}, "at most 1024 entries"),
    ({"best_of": 2}, "best_of = 2: unknown name; known: allowed_token_ids, bad_word_ids, "),
]


@pytest.mark.parametrize("options", GOOD_SAMPLING, ids=str)
def test_sampling_options_within_their_limits_are_taken(options):
    assert isinstance(build_sampling_params(**options), pb.SamplingParams)


@pytest.mark.parametrize(("options", "message"), BAD_SAMPLING, ids=[message[:60] for _, message in BAD_SAMPLING])
def test_sampling_options_outside_are_refused_by_name(options, message):
    with pytest.raises(InvalidArgumentError) as caught:
        build_sampling_params(**options)
    assert message in str(caught.value)
    assert str(caught.value).startswith("sampling_params.")
    assert caught.value.field.startswith("sampling_params.")


def test_every_sampling_parameter_with_a_range_is_tried():
    ranged = {
        field.name
        for field in pb.SamplingParams.DESCRIPTOR.fields
        if any(
            field.GetOptions().Extensions[pb.limits].HasField(name)
            for name in ("min", "max", "max_items", "max_bytes")
        )
    }
    assert ranged <= {name for options, _ in BAD_SAMPLING for name in options}


def test_unset_sampling_parameters_take_their_defaults():
    resolved = resolve_sampling_params(pb.SamplingParams())
    assert resolved == SAMPLING_DEFAULTS
    assert not resolved.HasField("seed")
    assert not resolved.HasField("logprobs")


def test_resolving_leaves_its_argument_as_it_is():
    given = pb.SamplingParams(temperature=0)
    assert resolve_sampling_params(given).max_tokens == 16
    assert given == pb.SamplingParams(temperature=0)


def test_options_of_none_count_as_not_given():
    assert build_sampling_params(temperature=None, seed=None, stop=None) == pb.SamplingParams()


@pytest.mark.parametrize(
    "options",
    [{"logit_bias": {10: 1}}, {"stop_token_ids": [3, 10]}, {"allowed_token_ids": [10]}, {"bad_word_ids": [[3, 10]]}],
)
def test_token_ids_must_be_in_the_vocabulary(options):
    params = build_sampling_params(**options)
    (name,) = options
    assert resolve_sampling_params(params, vocab_size=11).ListFields()
    with pytest.raises(InvalidArgumentError) as caught:
        resolve_sampling_params(params, vocab_size=10)
    assert str(caught.value) == f"sampling_params.{name} = 10: token ids must be in [0, 10)"


DEFAULT_CONFIG = {
    "num_speculative_tokens": 4,
    "draft_sample_method": "greedy",
    "draft_logits": "none",
    "rejection_sample_method": "standard",
    "use_fp64_gumbel": False,
}
GUMBEL = {"draft_sample_method": "gumbel"}
SYNTHETIC = {"rejection_sample_method": "synthetic", "num_speculative_tokens": 2}
COUPLED = {"rejection_sample_method": "coupled"}
EITHER = "needs exactly one of synthetic_acceptance_rates and synthetic_acceptance_length"

GOOD_CONFIGS = [
    {},
    {"num_speculative_tokens": 1},
    {"num_speculative_tokens": 16},
    GUMBEL,
    {**GUMBEL, "draft_logits": "none"},
    {**GUMBEL, "draft_logits": "dense"},
    {**GUMBEL, "draft_logits": {"top_n": 1}},
    {**GUMBEL, "draft_logits": {"top_n": 64}, "rejection_sample_method": "block"},
    {"rejection_sample_method": "block"},
    COUPLED,
    {**GUMBEL, **COUPLED},
    {**SYNTHETIC, "synthetic_acceptance_rates": [1, 0]},
    {**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.5]},
    {**SYNTHETIC, "synthetic_acceptance_rates": [0, 0]},
    {**SYNTHETIC, "synthetic_acceptance_length": 1},
    {**SYNTHETIC, "synthetic_acceptance_length": 3},
    {**SYNTHETIC, "synthetic_acceptance_length": 3, "synthetic_confidence_skill": 0.9},
    {"synthetic_confidence_skill": 0.0},
    {**SYNTHETIC, **GUMBEL, "draft_logits": "dense", "synthetic_acceptance_length": 2.5},
    {"use_fp64_gumbel": True},
    {"method": "eagle3", "model": "some/head"},
    {"method": "eagle"},
]

BAD_CONFIGS = [
    ({"num_speculative_tokens": 0}, "num_speculative_tokens = 0: allowed range [1, 16]"),
    ({"num_speculative_tokens": 17}, "num_speculative_tokens = 17: allowed range [1, 16]"),
    ({"num_speculative_tokens": "4"}, "num_speculative_tokens = '4': allowed range [1, 16]"),
    ({"num_speculative_tokens": True}, "num_speculative_tokens = True: allowed range [1, 16]"),
    ({"draft_sample_method": "beam"}, "draft_sample_method = 'beam': allowed: greedy, gumbel"),
    ({"draft_sample_method": 2}, "draft_sample_method = 2: allowed: greedy, gumbel"),
    ({"draft_sample_method": "unspecified"}, "draft_sample_method = 'unspecified': allowed: greedy, gumbel"),
    ({"draft_logits": "dense"}, "draft_logits = 'dense': only gumbel drafts have logits"),
    ({"draft_logits": {"top_n": 2}}, "draft_logits = 'top_n=2': only gumbel drafts have logits"),
    ({**GUMBEL, "draft_logits": "top_n"}, """draft_logits = 'top_n': allowed: "none", "dense", {"top_n": n}"""),
    ({**GUMBEL, "draft_logits": {"n": 2}}, "draft_logits = {'n': 2}: allowed: "),
    ({**GUMBEL, "draft_logits": {"top_n": 0}}, "draft_logits.n = 0: allowed range [1, 2147483647]"),
    ({**GUMBEL, "draft_logits": {"top_n": "2"}}, "draft_logits.n = '2': allowed range [1, 2147483647]"),
    (
        {"rejection_sample_method": "typical"},
        "rejection_sample_method = 'typical': allowed: standard, synthetic, block, coupled",
    ),
    ({**COUPLED, **GUMBEL, "draft_logits": "dense"}, "draft_logits = 'dense': coupled allows none"),
    (SYNTHETIC, EITHER),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.5], "synthetic_acceptance_length": 2}, EITHER),
    ({**SYNTHETIC, "synthetic_acceptance_rates": []}, EITHER),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5]}, "needs num_speculative_tokens = 2 values, got 1"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.4, 0.3]}, "needs num_speculative_tokens = 2 values, got 3"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.4, 0.5]}, "must not increase"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [1.5, 0.5]}, "synthetic_acceptance_rates = 1.5: allowed range [0, 1]"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, -1]}, "synthetic_acceptance_rates = -1.0: allowed range [0, 1]"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, NAN]}, "synthetic_acceptance_rates = nan: allowed range [0, 1]"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [True, 0.5]}, "rates = [True, 0.5]: allowed range "),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [1.0, False]}, "(expected no true or false)"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": 0.5}, "synthetic_acceptance_rates = 0.5: allowed range [0, 1]"),
    ({**SYNTHETIC, "synthetic_acceptance_rates": [0] * 17}, "at most 16 entries"),
    (
        {"synthetic_confidence_skill": 0.2},
        "synthetic_confidence_skill = 0.2: needs rejection_sample_method synthetic",
    ),
    (
        {**SYNTHETIC, "synthetic_acceptance_length": 2, "synthetic_confidence_skill": 1},
        "synthetic_confidence_skill = 1.0: allowed range [0, 0.9]",
    ),
    ({**SYNTHETIC, "synthetic_acceptance_length": 0.5}, "synthetic_acceptance_length = 0.5: allowed range [1, 17]"),
    (
        {**SYNTHETIC, "synthetic_acceptance_length": 3.5},
        "synthetic_acceptance_length = 3.5: allowed range [1, num_speculative_tokens + 1 = 3]",
    ),
    ({"synthetic_acceptance_length": 2}, "synthetic_acceptance_length = 2.0: needs rejection_sample_method synthetic"),
    (
        {"rejection_sample_method": "block", "synthetic_acceptance_rates": [1, 1, 1, 1]},
        "synthetic_acceptance_rates = [1.0, 1.0, 1.0, 1.0]: needs rejection_sample_method synthetic",
    ),
    ({"use_fp64_gumbel": 1}, "use_fp64_gumbel = 1: must be true or false"),
    ({"method": "medusa"}, "method = 'medusa': allowed: eagle, eagle3, peagle, dflash, dspark"),
    ({"method": ""}, "method = '': allowed length 1 to 64 bytes, got 0"),
    ({"model": 5}, "model = 5: must be text"),
    ({"rejection_sample_method": "strict"}, """'strict': this name is retired: use "standard" """),
    ({"rejection_sample_method": "probabilistic"}, """'probabilistic': this name is retired: use "standard" """),
    (
        {"synthetic_acceptance_rate": 0.7},
        "synthetic_acceptance_rate = 0.7: this name is retired: use synthetic_acceptance_rates",
    ),
    ({"num_spec_tokens": 4}, "num_spec_tokens = 4: unknown name; known: draft_logits, draft_sample_method, "),
]


@pytest.mark.parametrize("options", GOOD_CONFIGS, ids=str)
def test_configs_within_the_rules_come_back_from_their_mapping(options):
    config = speculative_config_from_mapping(options)
    mapping = speculative_config_to_mapping(config)
    assert mapping == {**DEFAULT_CONFIG, **options}
    assert speculative_config_from_mapping(json.loads(json.dumps(mapping))) == config
    assert resolve_speculative_config(config) == config


@pytest.mark.parametrize(("options", "message"), BAD_CONFIGS, ids=[message[:60] for _, message in BAD_CONFIGS])
def test_configs_outside_the_rules_are_refused_by_name(options, message):
    with pytest.raises(InvalidArgumentError) as caught:
        speculative_config_from_mapping(options)
    assert message in str(caught.value)
    assert caught.value.field.startswith("speculative_config.")


def test_probabilistic_drafts_are_read_as_gumbel():
    config = speculative_config_from_mapping({"draft_sample_method": "probabilistic"})
    assert config.draft_sample_method == pb.DRAFT_SAMPLE_METHOD_GUMBEL


def test_decimal_rates_come_back_as_they_were_written():
    options = {**SYNTHETIC, "synthetic_acceptance_rates": [0.7, 0.1]}
    mapping = speculative_config_to_mapping(speculative_config_from_mapping(options))
    assert mapping["synthetic_acceptance_rates"] == [0.7, 0.1]


def test_n_without_top_n_is_refused():
    config = pb.SpeculativeConfig(draft_logits=pb.DraftLogits(n=3))
    with pytest.raises(InvalidArgumentError, match=r"draft_logits\.n = 3: allowed only with top_n"):
        resolve_speculative_config(config)


def test_top_n_without_n_is_refused():
    config = pb.SpeculativeConfig(
        draft_sample_method=pb.DRAFT_SAMPLE_METHOD_GUMBEL,
        draft_logits=pb.DraftLogits(form=pb.DRAFT_LOGITS_FORM_TOP_N),
    )
    with pytest.raises(InvalidArgumentError, match="top_n needs n"):
        resolve_speculative_config(config)


def test_enum_numbers_of_another_version_are_refused():
    config = pb.SpeculativeConfig()
    config.rejection_sample_method = 9  # type: ignore[assignment]
    with pytest.raises(InvalidArgumentError, match=r"rejection_sample_method = 9: allowed: 0 \(REJECTION"):
        resolve_speculative_config(config)


def test_json_text_and_file_give_the_same_config(tmp_path):
    text = '{"num_speculative_tokens": 3, "draft_sample_method": "gumbel", "draft_logits": {"top_n": 8}}'
    file = tmp_path / "config.json"
    file.write_text(f"\n {text}\n", encoding="utf-8")
    expected = speculative_config_from_mapping(json.loads(text))
    assert parse_speculative_config(text) == expected
    assert parse_speculative_config(f"  {text} ") == expected
    assert parse_speculative_config(str(file)) == expected


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ('{"num_speculative_tokens": 3', "is not valid JSON: "),
        ("{'num_speculative_tokens': 3}", "is not valid JSON: "),
        ("/no/such/file.json", "must be a JSON object or the path of a file with one ("),
        ("[]", "must be a JSON object or the path of a file with one ("),
        (
            '{"num_speculative_tokens": 3, "num_speculative_tokens": 4}',
            "speculative_config = 'num_speculative_tokens': this key is given more than once",
        ),
        ('{"k": 3}', "speculative_config.k = 3: unknown name"),
        ('{"num_speculative_tokens": null, "k": 3}', "speculative_config.k = 3: unknown name"),
    ],
)
def test_wrong_arguments_are_named(argument, message):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_speculative_config(argument)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"[1, 2]", b"4", b"\xff\xfe{}", b""])
def test_file_without_an_object_is_refused(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"^speculative_config = "):
        parse_speculative_config(str(file))


def test_limits_are_checked_in_depth_with_the_path():
    request = generate_pb2.GenerateRequest(
        chat=generate_pb2.Chat(messages=[generate_pb2.ChatMessage(role="r" * 65, content="")])
    )
    with pytest.raises(InvalidArgumentError, match=r"^chat\.messages\.role = 'r+': allowed length 1 to 64 bytes"):
        check_limits(request)


def test_defaults_do_not_replace_what_is_given():
    assert with_defaults(pb.SamplingParams(temperature=0, top_p=0.5)).temperature == 0


def test_long_values_are_cut_in_the_message():
    with pytest.raises(InvalidArgumentError) as caught:
        build_sampling_params(stop=["x" * 5000])
    assert len(str(caught.value)) < 250
