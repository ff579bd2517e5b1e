"""Text of a stream: whatever the cut, deltas join to the full decode, and a stop text never leaks."""
from functools import lru_cache

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from llmserve.core import InvalidModel, Request, SamplingParams
from llmserve.detokenize import Collector, Detokenizer, StopFinder
from llmserve.models import find, load_tokenizer
from llmserve.scheduler import SequenceUpdate

fuzz = settings(deadline=None, database=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
both = pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])

@lru_cache(None)
def tokenizer_of(model: str):
    "A tokenizer, loaded once."
    try: return load_tokenizer(find(model))
    except InvalidModel as e: pytest.skip(f"{model} cannot be fetched: {e}")

@lru_cache(None)
def byte_tokens(model: str) -> list:
    "Ids of the tokens that are one byte, for all bytes the vocabulary has."
    tokenizer = tokenizer_of(model)
    vocab = tokenizer.get_vocab()
    if model == "gemma3-270m": return [vocab[f"<0x{i:02X}>"] for i in range(256)]
    return sorted(i for token, i in vocab.items() if len(token) == 1)

PIECES = st.sampled_from(["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "漢字かな交じり", "한국어", "é", "ẹ̈̂", "Z̶̛͎a̷", "שָׁלוֹם", "السلام عليكم", "नमस्ते", "�", " ", "  \n\n\t", "word", "don't", " .", "<b>", "0 1 2", "\u200d", "\ufeff", "𝔘𝔫𝔦", "\x00"])
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=4)), min_size=1, max_size=10).map("".join)

def joined(tokenizer, ids: list, cut: int, skip: bool = True) -> list:
    "Deltas of the tokens after the cut, the ones before being the prompt."
    d = Detokenizer(tokenizer, ids[:cut], skip)
    return [*(d.push(i) for i in ids[cut:]), d.flush()]

def check_cuts(tokenizer, ids: list, skip: bool = True):
    "At every cut, prompt and deltas are the full decode; after a cut inside a character, deltas are the decode of what follows."
    decode = lambda ids: tokenizer._tokenizer.decode(ids, skip_special_tokens=skip)
    full = decode(ids)
    for cut in range(len(ids) + 1):
        prompt, deltas = decode(ids[:cut]), joined(tokenizer, ids, cut, skip)
        assert "".join(deltas) == (decode(ids[cut:]) if prompt.endswith("�") else full[len(prompt):]), (cut, ids)

# decoding

@both
@fuzz
@given(text=TEXTS)
def test_text_joins_to_the_full_decode_at_every_cut(model, text):
    tokenizer = tokenizer_of(model)
    check_cuts(tokenizer, tokenizer(text, add_special_tokens=False).input_ids)

@both
@fuzz
@given(data=st.data(), skip=st.booleans())
def test_random_tokens_join_to_the_full_decode(model, data, skip):
    tokenizer = tokenizer_of(model)
    token = st.one_of(st.integers(0, len(tokenizer) - 1), st.sampled_from(tokenizer.all_special_ids))
    check_cuts(tokenizer, data.draw(st.lists(token, max_size=16)), skip)

@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
@settings(fuzz, phases=[Phase.generate])
@given(data=st.data())
def test_byte_soup_joins_to_the_full_decode(model, data):
    tokenizer = tokenizer_of(model)
    token = st.one_of(st.sampled_from(byte_tokens(model)), st.integers(0, len(tokenizer) - 1))
    check_cuts(tokenizer, data.draw(st.lists(token, max_size=14)))

@both
def test_a_character_comes_whole_and_at_once(model):
    tokenizer = tokenizer_of(model)
    ids = tokenizer("Hello, wide world! 𓀀 and 🦖.", add_special_tokens=False).input_ids
    deltas = joined(tokenizer, ids, 0)
    assert not any("�" in d for d in deltas) and deltas[-1] == ""
    for i in range(len(ids)):
        text = tokenizer._tokenizer.decode(ids[:i + 1])
        byte = tokenizer._tokenizer.id_to_token(ids[i]).startswith("<0x")  # a run of byte tokens waits for its end
        if not text.endswith("�") and not byte: assert "".join(deltas[:i + 1]) == text, "a finished character waits"

def test_flush_gives_the_unfinished_character():
    tokenizer = tokenizer_of("smollm2-135m")
    ids = tokenizer("a𓀀", add_special_tokens=False).input_ids[:-1]
    deltas = joined(tokenizer, ids, 0)
    assert "".join(deltas[:-1]) == "a" and deltas[-1].startswith("�")

@fuzz
@given(st.lists(st.sampled_from([[0], [1], [2], [3], [4, 5], [6], [7]]), max_size=16))
def test_a_decoder_that_strips_the_first_space_keeps_the_others(characters):
    words = Tokenizer(WordLevel({w: i for i, w in enumerate(["▁", "▁a", "b", "▁▁", "<0xC3>", "<0xA9>", "▁c▁", "."])}, unk_token="."))
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])  # as in Llama 2
    check_cuts(PreTrainedTokenizerFast(tokenizer_object=words), sum(characters, []))

# stop texts, as text

def first_stop(text: str, stops: list) -> tuple:  # (end, begin, stop) or None
    "The stop that is complete first; of those that end together, the longest."
    hits = [(end, -len(s), s) for s in stops for end in range(len(s), len(text) + 1) if text[:end].endswith(s)]
    return min(hits, default=None)

def feed(pieces: list, stops: list, include: bool) -> tuple:  # (what was sent by each push, the stop)
    finder, sent = StopFinder(stops, include), []
    for piece in pieces:
        sent.append(finder.push(piece))
        if finder.found: return sent, finder.found
    return [*sent, finder.flush()], None

@settings(fuzz, max_examples=400)
@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=5), max_size=3), st.booleans())
def test_the_stop_that_is_complete_first_wins(pieces, stops, include):
    hit = first_stop("".join(pieces), stops)
    sent, found = feed(pieces, stops, include)
    expected = "".join(pieces) if hit is None else "".join(pieces)[:hit[0] if include else hit[0] + hit[1]]
    assert found == (hit and hit[2])
    for i in range(len(sent) + 1): assert expected.startswith("".join(sent[:i])), "sent too much"
    assert "".join(sent) == expected

def test_text_without_stops_is_not_held_back():
    assert feed(["ab", "c"], [], False)[0] == ["ab", "c", ""]
    assert feed(["abcdef", "g"], ["xyz"], False)[0] == ["abcd", "e", "fg"]  # at most the length of the stop, less one

# stop texts, over tokens

SENTENCE = "The quick brown fox, 漢字 jumps: over 12 lazy dogs' 🦖 tails\n\nUser: again"

def collect(ids: list, group: int = 1, **params) -> tuple:  # (deltas, output)
    "Send tokens of an answer through a collector, some at a time."
    request = Request("r", [1], SamplingParams(max_tokens=None, **params))
    seq, = request.make_sequences()
    collector, deltas = Collector(request, tokenizer_of("smollm2-135m")), []
    for i in range(0, len(ids), group):
        if i + group >= len(ids): seq.finish_reason = "length"
        delta = collector.take(SequenceUpdate(seq, ids[i:i + group]))
        deltas.append(delta)
        if delta.finish_reason: break
    return deltas, collector.outputs[0]

@lru_cache(None)
def answer() -> tuple:  # (token ids, text after each number of tokens; a token that leaves a character unfinished adds none)
    tokenizer = tokenizer_of("smollm2-135m")
    ids, texts = tokenizer(SENTENCE, add_special_tokens=False).input_ids, [""]
    for i in range(len(ids)): texts.append(texts[-1] if (text := tokenizer._tokenizer.decode(ids[:i + 1])).endswith("�") else text)
    return ids, texts

@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("span", [1, 2, 3, 4])
def test_stop_over_tokens_at_every_offset(span, group, include):
    ids, texts = answer()
    for i in range(len(ids) - span + 1):
        last_begin, last_end = len(texts[i + span - 1]), len(texts[i + span])
        for begin in range(len(texts[i]), len(texts[i + 1])):
            stop = SENTENCE[begin:max((last_begin + last_end + 1) // 2, begin + 1)]  # from each character of token i to the middle of the last
            deltas, out = collect(ids, group, stop=[stop, "never"], include_stop_str_in_output=include)
            end, _, _ = first_stop(SENTENCE, [stop])
            expected = SENTENCE[:end if include else end - len(stop)]
            assert all(expected.startswith("".join(d.text for d in deltas[:n])) for n in range(len(deltas) + 1)), "sent too much"
            assert "".join(d.text for d in deltas) == out.text == expected
            assert (out.finish_reason, out.stop_reason, deltas[-1].finish_reason) == ("stop", stop, "stop")
            used = next(n for n, t in enumerate(texts) if len(t) >= end)
            assert out.token_ids == ids[:used] == [i for d in deltas for i in d.token_ids], "tokens after the stop do not count"

@pytest.mark.parametrize("group", [1, 3, 100])
def test_half_a_stop_is_delivered_when_the_answer_ends(group):
    ids, _ = answer()
    deltas, out = collect(ids, group, stop=[" again and again", "aga1n"])
    assert "".join(d.text for d in deltas) == out.text == SENTENCE and (out.finish_reason, out.stop_reason) == ("length", None)

@pytest.mark.parametrize("group", [1, 2, 3])
def test_min_tokens_outlasts_stops(group):
    ids = tokenizer_of("smollm2-135m")(" two" * 8, add_special_tokens=False).input_ids
    assert len(ids) == 8
    for min_tokens in range(1, 8):
        _, out = collect(ids, group, stop="two", min_tokens=min_tokens)
        assert (out.finish_reason, out.stop_reason) == ("stop", "two")
        assert len(out.token_ids) >= min_tokens and out.text == " two" * (len(out.token_ids) - 1) + " "
        assert len(out.token_ids) <= min_tokens + 1
    assert collect(ids, group, stop="two", min_tokens=9)[1].text == " two" * 8

def test_stop_that_is_complete_after_min_tokens_ends_the_answer():
    ids = tokenizer_of("smollm2-135m")(" one two three four five six", add_special_tokens=False).input_ids
    assert collect(ids, stop="two three four", min_tokens=3)[1].text == " one "

def test_end_token_is_no_text():
    tokenizer = tokenizer_of("smollm2-135m")
    for skip in (True, False):
        request = Request("r", [1], SamplingParams(skip_special_tokens=skip))
        seq, = request.make_sequences()
        collector = Collector(request, tokenizer)
        seq.finish_reason = "stop"
        collector.take(SequenceUpdate(seq, tokenizer("Yes.").input_ids + [tokenizer.eos_token_id]))
        assert (collector.outputs[0].text, collector.outputs[0].token_ids[-1]) == ("Yes.", tokenizer.eos_token_id)
