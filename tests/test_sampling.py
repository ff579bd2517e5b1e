"""Sampling against transformers' processors, statistics of the draws, and refusals by name."""
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from llmserve.core import InvalidRequest, SamplingParams
from llmserve.sampling import SamplingRow, best_logprobs, penalize, sample, target_probs, uniform

VOCAB = 500
fuzz = settings(deadline=None, database=None)

def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 4.0) -> torch.Tensor:
    "Random logits; float32 values this few do not tie."
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale

def at(position: int, seed: int = 0, **params) -> SamplingRow:
    "A row that draws the token at a position, of a request without output so far."
    return SamplingRow(SamplingParams(**params), seed, range(position), position)

def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())

def limit(freedom: int) -> float:
    "Chi-square exceeds this once in 30,000 fair trials (Wilson and Hilferty's approximation)."
    return freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3

# against transformers

@pytest.mark.parametrize("penalty", [0.5, 1.1, 1.3, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits, generator = logits_of(8), random.Random(1)
    tokens = [[generator.randrange(VOCAB) for _ in range(40)] for _ in range(8)]
    expected = torch.cat([RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([t]), line[None].clone()) for t, line in zip(tokens, logits)])
    penalize(logits, [SamplingRow(SamplingParams(repetition_penalty=penalty), tokens=t, num_prompt_tokens=25) for t in tokens])
    torch.testing.assert_close(logits, expected)

def test_presence_and_frequency_look_at_the_output_only():
    logits = torch.zeros(1, 6)
    penalize(logits, [SamplingRow(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), tokens=[0, 0, 1, 2, 2, 3], num_prompt_tokens=3)])
    torch.testing.assert_close(logits, torch.tensor([[0, 0, -1.0, -0.75, 0, 0]]))

WARPERS = dict(temperature=TemperatureLogitsWarper, min_p=MinPLogitsWarper, top_k=TopKLogitsWarper, top_p=TopPLogitsWarper)  # in our order

@pytest.mark.parametrize("params", [dict(temperature=0.3), dict(temperature=1.7), dict(top_k=1), dict(top_k=17), dict(top_p=0.1), dict(top_p=0.73), dict(top_p=0.99), dict(min_p=0.02), dict(min_p=1.0),
                                    dict(temperature=0.7, min_p=0.001, top_k=50, top_p=0.9), dict(temperature=2.5, top_k=20, top_p=0.5)], ids=str)
def test_target_is_that_of_transformers(params):
    logits = logits_of(16)
    expected = logits
    for name in WARPERS:
        if name in params: expected = WARPERS[name](params[name])(None, expected)
    probs = target_probs(logits, [at(5, **params)] * 16)
    torch.testing.assert_close(probs, expected.softmax(-1))
    assert ((probs > 0) == expected.isfinite()).all(), "the same tokens are cut off"

def test_rows_of_one_batch_have_their_own_target():
    cases = [dict(top_k=3), dict(top_p=0.6), dict(min_p=0.1), dict(temperature=3.0), dict(top_k=40, top_p=0.95), {}]
    logits = logits_of(len(cases))
    together = target_probs(logits, [at(5, **c) for c in cases])
    for i, case in enumerate(cases): torch.testing.assert_close(together[i], target_probs(logits[i:i + 1], [at(5, **case)])[0])

def test_a_row_keeps_all_its_tokens_next_to_one_with_top_p():
    logits = logits_of(2, 49_152)
    alone, together = target_probs(logits[:1], [at(5)]), target_probs(logits, [at(5), at(5, top_p=0.5)])
    assert (together[0] > 0).sum() == (alone[0] > 0).sum()
    assert torch.equal(together[0], alone[0])

@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 10**9, 0, -1])
def test_top_k_beyond_the_vocabulary_keeps_all(top_k):
    logits = logits_of(3)
    torch.testing.assert_close(target_probs(logits, [at(5, top_k=top_k)] * 3), logits.softmax(-1))
    assert len(sample(logits, [at(5, top_k=top_k), at(6, top_k=3), at(7, temperature=0)])[0]) == 3

# the draws

@pytest.mark.parametrize("params", [{}, dict(temperature=0.5), dict(top_k=5), dict(top_p=0.8), dict(min_p=0.2)], ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2**62, -7])
def test_draws_follow_the_target(params, seed):
    logits, rows = logits_of(1, 12, seed=3, scale=1.0), [at(i, seed, **params) for i in range(6_000)]
    probs = target_probs(logits, rows[:1])[0]
    counts = torch.bincount(torch.tensor(sample(logits.expand(len(rows), 12), rows)[0]), minlength=12)
    kept = probs > 0
    assert counts[~kept].sum() == 0, "a token that was cut off was drawn"
    assert chi_square(counts[kept], probs[kept]) < limit(int(kept.sum()) - 1)

@pytest.mark.parametrize("seed_step, position_step, stream_step", [(0, 1, 0), (1, 0, 0), (1, -1, 0), (1, 1, 0), (0, 0, 1), (0, 1, 1)])
def test_neighbouring_random_numbers_are_independent(seed_step, position_step, stream_step):
    seeds, positions = [s for s in range(100) for _ in range(200)], [p + 1 for _ in range(100) for p in range(200)]
    one = uniform(seeds, positions)
    other = uniform([s + seed_step for s in seeds], [p + position_step for p in positions], stream_step)
    assert 0 <= one.min() and one.max() < 1
    pairs = torch.bincount(torch.from_numpy((one * 8).astype(int) * 8 + (other * 8).astype(int)), minlength=64)
    assert chi_square(pairs, torch.full((64,), 1 / 64)) < limit(63)

def test_a_row_does_not_depend_on_neighbours_or_order():
    generator = random.Random(0)
    def row(i):
        tokens = [generator.randrange(VOCAB) for _ in range(generator.randrange(3, 30))]
        params = SamplingParams(temperature=generator.choice([0, 0.7, 1.5]), top_k=generator.choice([0, 3, 40]), top_p=generator.choice([1.0, 0.8]), min_p=generator.choice([0.0, 0.05]),
                                repetition_penalty=generator.choice([1.0, 1.2]), frequency_penalty=generator.choice([0.0, 0.5]), logprobs=generator.choice([None, 2]))
        return SamplingRow(params, i, tokens, 2)
    logits, rows = logits_of(64).bfloat16(), [row(i) for i in range(64)]  # rounded so coarsely that maxima tie
    together, logprobs = sample(logits, rows)
    assert together == [sample(logits[i:i + 1], [r])[0][0] for i, r in enumerate(rows)]
    order = generator.sample(range(64), 64)
    assert sample(logits[order], [rows[i] for i in order]) == ([together[i] for i in order], [logprobs[i] for i in order])

def test_sample_leaves_logits_as_they_were():
    logits = logits_of(2)
    before = logits.clone()
    sample(logits, [at(5, logit_bias={1: 50.0}, repetition_penalty=1.5), at(5, temperature=0, repetition_penalty=1.5)])
    assert torch.equal(logits, before)

def test_same_seed_same_tokens_other_seed_others():
    logits = logits_of(1, scale=1.0).expand(50, VOCAB)
    first, again, other = (sample(logits, [at(5 + i, seed) for i in range(50)])[0] for seed in (11, 11, 12))
    assert first == again and first != other and len(set(first)) > 5

def test_greedy_takes_the_best_whatever_the_seed():
    logits = logits_of(20)
    for seed in range(3): assert sample(logits, [at(5, seed, temperature=0)] * 20)[0] == logits.argmax(-1).tolist()

@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logit_bias_of_100_forces_and_forbids(temperature):
    logits = logits_of(40)
    best = logits[0].argmax().item()
    assert sample(logits, [at(5 + i, temperature=temperature, logit_bias={7: 100}) for i in range(40)])[0] == [7] * 40
    tokens, _ = sample(logits[:1].expand(40, VOCAB), [at(5 + i, temperature=temperature, logit_bias={best: -100}) for i in range(40)])
    assert best not in tokens

@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bias", [None, {3: 100, 4: 100}])
def test_min_tokens_masks_end_tokens(temperature, bias):
    logits = torch.zeros(1, 10)
    logits[0, [3, 4]] = 30.0
    for outputs in range(6):
        row = SamplingRow(SamplingParams(temperature=temperature, min_tokens=3, logit_bias=bias), outputs, [0] * (2 + outputs), 2, frozenset({3, 4}))
        assert (sample(logits, [row])[0][0] in (3, 4)) == (outputs >= 3), outputs

def test_logprobs_are_those_of_the_raw_logits():
    logits = torch.stack([torch.randperm(VOCAB, generator=torch.Generator().manual_seed(i)) / 50 for i in range(6)])  # far enough apart not to tie
    expected = logits.log_softmax(-1)
    tokens, logprobs = sample(logits, [at(5, temperature=2.0, top_k=300, logprobs=n, logit_bias={9: 10.0}) for n in (0, 1, 5, VOCAB, VOCAB + 7)] + [at(5)])
    assert logprobs[5] is None
    for line, token, found, num in zip(expected, tokens, logprobs, (0, 1, 5, VOCAB, VOCAB)):
        best = line.argsort(descending=True).tolist()
        assert next(iter(found)) == token and set(found) == {token, *best[:num]}
        for i, lp in found.items(): assert lp.logprob == pytest.approx(line[i].item(), abs=1e-5) and lp.rank == best.index(i) + 1

def test_rank_of_a_chosen_token_outside_the_best():
    found = best_logprobs(torch.tensor([3.0, 1.0, 2.0, 0.0]), 3, 1)
    assert {i: lp.rank for i, lp in found.items()} == {3: 4, 0: 1}

# refusals

WRONG = st.one_of(st.sampled_from(["", "1", "abc", (), [1], {}, {"a": 1}, object(), b"1", 1j]), st.booleans())
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
LOW = dict(n=1, temperature=0, top_p=0, top_k=-1, min_p=0, repetition_penalty=0, presence_penalty=-2, frequency_penalty=-2, max_tokens=1, min_tokens=0, logprobs=0, prompt_logprobs=0, seed=-2**63)
HIGH = dict(n=4096, top_p=1, min_p=1, presence_penalty=2, frequency_penalty=2, seed=2**63 - 1)
WHOLE = ["n", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "seed"]

def refused(field: str, value):
    with pytest.raises(InvalidRequest) as e: SamplingParams(**{field: value})
    assert field in str(e.value)

@fuzz
@given(st.sampled_from(sorted(LOW)), st.one_of(WRONG, NOT_FINITE))
def test_wrong_type_or_not_finite_is_refused(field, value): refused(field, value)

@fuzz
@given(st.sampled_from(sorted(LOW)), st.floats(1e-3, 1e9))
def test_too_small_is_refused(field, below): refused(field, LOW[field] - (math.ceil(below) if field in WHOLE else below))

@fuzz
@given(st.sampled_from(sorted(HIGH)), st.floats(1e-3, 1e9))
def test_too_large_is_refused(field, above): refused(field, HIGH[field] + (math.ceil(above) if field in WHOLE else above))

@fuzz
@given(st.sampled_from(WHOLE), st.floats(1, 4096))
def test_fractions_are_refused_where_whole_numbers_are_due(field, value): refused(field, value)

@pytest.mark.parametrize("field", ["top_p", "repetition_penalty"])
def test_zero_is_refused(field): refused(field, 0)

@pytest.mark.parametrize("field, value", [("stop", ""), ("stop", ["a", ""]), ("stop", 3), ("stop", [3]), ("stop", {"a": 1}), ("stop_token_ids", "3"), ("stop_token_ids", [1.0]), ("stop_token_ids", True),
                                          ("logit_bias", [1]), ("logit_bias", {3: math.nan}), ("logit_bias", {3: 101}), ("logit_bias", {3: "1"}), ("logit_bias", {3: None})])
def test_bad_lists_are_refused(field, value): refused(field, value)

@pytest.mark.parametrize("key", ["abc", None, 1.5, math.nan, math.inf, (1,), True])
def test_bad_logit_bias_keys_are_refused(key): refused("logit_bias", {key: 1.0})

@pytest.mark.parametrize("field", ["n", "min_p", "seed", "temperature"])
def test_huge_integers_are_refused(field): refused(field, 10**400)

@pytest.mark.parametrize("field", ["ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"])
def test_flags_must_be_true_or_false(field): refused(field, "no")

@fuzz
@given(st.floats(0, 100), st.floats(0.001, 1), st.integers(-1, 10**6), st.floats(0, 1), st.floats(0.01, 10), st.floats(-2, 2), st.floats(-2, 2), st.integers(-2**63, 2**63 - 1))
def test_what_is_in_range_is_taken_and_can_be_drawn_from(temperature, top_p, top_k, min_p, repetition, presence, frequency, seed):
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, seed=seed)
    (token,), _ = sample(logits_of(1, 50), [SamplingRow(params, seed, [1, 2, 3, 3], 2)])
    assert 0 <= token < 50
