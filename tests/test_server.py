"A real server on a port, a real model, driven by the clients that people use."
import asyncio
import json
import math
import re

import httpx
import openai
import pytest

from llmserve.core import InvalidRequest

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "Name three colours."}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather in a city", "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}}, "required": ["city", "unit"], "additionalProperties": False}}}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"], "additionalProperties": False}}}
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}, "required": ["name", "age"], "additionalProperties": False}


@pytest.fixture(scope="module")
def client(server): return openai.OpenAI(base_url=server.url + "/v1", api_key="none", timeout=60, max_retries=0)


def post(server, path, **body): return httpx.post(server.url + path, json=body, timeout=60)


# ---- chat

def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=20, temperature=0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 20 and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_whole(client):
    ask = dict(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0)
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1 and all(c.object == "chat.completion.chunk" for c in chunks)


def test_n_and_seed(client):
    ask = dict(model=MODEL, messages=QUESTION, max_tokens=16, temperature=1, n=3, seed=7)
    first, again = (client.chat.completions.create(**ask) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert [c.index for c in first.choices] == [0, 1, 2] and len(set(texts)) > 1
    assert texts == [c.message.content for c in again.choices]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for c in chunk.choices: streamed[c.index] += c.delta.content or ""
    assert streamed == texts


def test_stop(client):
    ask = dict(model=MODEL, messages=[{"role": "user", "content": "Count from one to ten in words, with commas."}], max_tokens=40, temperature=0)
    text = client.chat.completions.create(**ask).choices[0].message.content
    mark = text[len(text) // 2:len(text) // 2 + 3]
    cut = client.chat.completions.create(**ask, stop=[mark]).choices[0]
    assert cut.message.content == text[:text.index(mark)] and cut.finish_reason == "stop" and cut.model_extra["stop_reason"] == mark


def test_logprobs(client):
    choice = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3).choices[0]
    assert len(choice.logprobs.content) == 5
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob and token.token == token.top_logprobs[0].token
        assert bytes(token.bytes).decode() == token.token
    chunks = list(client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3, stream=True))
    streamed = [t.logprob for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == pytest.approx([t.logprob for t in choice.logprobs.content], abs=0.05)


def test_bias_and_penalties(client, server):
    ids = post(server, "/tokenize", prompt=" blue").json()["tokens"]
    forced = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4, temperature=0, logit_bias={str(ids[0]): 100})
    assert forced.choices[0].message.content.count("blue") == 4
    penalized = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4, temperature=0, logit_bias={str(ids[0]): 30}, frequency_penalty=2, presence_penalty=2)
    assert penalized.choices[0].finish_reason == "length"


def test_extras_of_vllm(client):
    extra = dict(top_k=1, min_p=0.1, repetition_penalty=1.1, priority=3, cache_salt="mine", ignore_eos=True, min_tokens=12, stop_token_ids=[5])
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=12, extra_body=extra)
    assert answer.usage.completion_tokens == 12
    for body, check in ((dict(guided_choice=["red", "green"]), lambda t: t in ("red", "green")), (dict(guided_regex="[0-9]{3}"), lambda t: len(t) == 3 and t.isdigit()),
                        (dict(guided_grammar='start: "a"+ "b"'), lambda t: set(t) <= {"a", "b"}), (dict(structured_outputs=dict(choice=["x"])), lambda t: t == "x"), (dict(guided_json=PERSON), json.loads)):
        text = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=60, temperature=0.5, extra_body=body).choices[0].message.content
        assert check(text), (body, text)


def test_allowed_and_cut_prompts(client, server):
    ids = post(server, "/tokenize", prompt=" red green").json()["tokens"]
    got = client.completions.create(model=MODEL, prompt="Colours:", max_tokens=8, extra_body=dict(allowed_token_ids=ids))
    assert set(got.choices[0].text.split()) <= {"red", "green"}
    long = " ".join(f"word{i}" for i in range(3000))
    whole = post(server, "/tokenize", prompt=long[-2000:]).json()["tokens"]
    for prompt in (long, whole):
        got = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0, echo=True, extra_body=dict(truncate_prompt_tokens=7, return_token_ids=True))
        assert got.usage.prompt_tokens == 7
    room = client.models.list().data[0].model_extra["max_model_len"]
    assert client.completions.create(model=MODEL, prompt=long, max_tokens=4, extra_body=dict(truncate_prompt_tokens=-1)).usage.prompt_tokens == room - 4
    for body, words in ((dict(truncate_prompt_tokens=0), "truncate_prompt_tokens"), (dict(allowed_token_ids=[]), "allowed_token_ids"), (dict(bad_words=[""]), "bad_words")):
        with pytest.raises(openai.BadRequestError, match=words): client.completions.create(model=MODEL, prompt="a", extra_body=body)


def test_parts_and_system(client):
    parts = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Name three "}, {"type": "text", "text": "colours."}]}]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours."}]
    ask = lambda m: client.chat.completions.create(model=MODEL, messages=m, max_tokens=12, temperature=0).choices[0].message.content
    assert ask(parts) == ask(plain)


# ---- forms and tools

def test_json_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for stream in (False, True):
        got = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Describe a person."}], max_tokens=80, temperature=0.7, response_format=form, stream=stream)
        text = "".join(c.choices[0].delta.content or "" for c in got) if stream else got.choices[0].message.content
        assert set(json.loads(text)) == {"name", "age"}


def test_pydantic_parse(client):
    from pydantic import BaseModel

    class Answer(BaseModel):
        yes: bool
        why: str
    got = client.chat.completions.parse(model=MODEL, messages=[{"role": "user", "content": "Is water wet?"}], response_format=Answer, max_tokens=300, temperature=0)
    assert got.choices[0].finish_reason == "length" or isinstance(got.choices[0].message.parsed, Answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_tools_are_called(client, choice, stream):
    got = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "What time is it?"}], tools=[WEATHER, CLOCK], tool_choice=choice, parallel_tool_calls=False, max_tokens=80, temperature=0, stream=stream)
    if stream:
        calls, finish = {}, None
        for c in got:
            if not c.choices: continue
            finish = c.choices[0].finish_reason or finish
            for t in c.choices[0].delta.tool_calls or []:
                call = calls.setdefault(t.index, {"name": "", "arguments": "", "id": t.id})
                call["name"] += t.function.name or ""
                call["arguments"] += t.function.arguments or ""
        found = [(c["name"], c["arguments"]) for c in calls.values()]
        assert all(c["id"] for c in calls.values())
    else:
        found, finish = [(t.function.name, t.function.arguments) for t in got.choices[0].message.tool_calls], got.choices[0].finish_reason
        assert got.choices[0].message.content is None
    assert len(found) == 1 and finish == ("tool_calls" if choice == "required" else "stop")
    name, arguments = found[0][0], json.loads(found[0][1])
    assert name in ("get_weather", "get_time") and set(arguments) == ({"zone"} if name == "get_time" else {"city", "unit"})
    if choice != "required": assert name == "get_time"


def test_tools_may_refer_to_their_own_definitions(client):
    "As pydantic writes nested models; two tools with definitions of one name."
    tool = lambda name, unit: {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"size": {"$ref": "#/$defs/Size"}}, "required": ["size"], "additionalProperties": False, "$defs": {"Size": {"type": "object", "properties": {unit: {"type": "integer", "minimum": 0, "maximum": 99}}, "required": [unit], "additionalProperties": False}}}}}
    got = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Cut a board, 20 cm."}], tools=[tool("cut", "cm"), tool("weigh", "kg")], tool_choice="required", parallel_tool_calls=False, max_tokens=80, temperature=0)
    call = got.choices[0].message.tool_calls[0].function
    assert list(json.loads(call.arguments)["size"]) == [{"cut": "cm", "weigh": "kg"}[call.name]]


def test_tool_results_go_back(client):
    said = [{"role": "user", "content": "What time is it?"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'}}]}, {"role": "tool", "tool_call_id": "c1", "content": "12:30"}]
    assert client.chat.completions.create(model=MODEL, messages=said, tools=[CLOCK], max_tokens=16, temperature=0).choices[0].message is not None


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_looks_like_a_call(size):
    "Llama writes calls without marks; JSON of another kind is an answer, and text behind a call is not lost."
    from llmserve.openai_api import OutputParser, choose_tools

    def read(text, format="llama", **more):
        parser = OutputParser(choose_tools([WEATHER, CLOCK], None, **more), format)
        pieces = [p for a in range(0, len(text), size) for p in parser.push(text[a:a + size])] + parser.push("", last=True)
        return "".join(p.text for p in pieces if p.kind == "content"), [(p.name, json.loads(p.text), p.id) for p in pieces if p.kind == "tool"]
    answer = '{"name": "Bob", "age": 3}\nThat is the JSON you asked for.'
    assert read(answer) == (answer, [])
    assert read('{"name": "get_time"}') == ('{"name": "get_time"}', [])
    content, calls = read('{"name": "get_time", "parameters": {"zone": "UTC"}} and so on')
    assert content == "and so on" and [c[:2] for c in calls] == [("get_time", {"zone": "UTC"})]
    two = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>\n' * 2
    assert len(read(two, "hermes")[1]) == 2 and len(read(two, "hermes", parallel=False)[1]) == 1
    (call,) = read('[TOOL_CALLS][{"name": "get_time", "arguments": {"zone": "CET"}}]', "mistral")[1]
    assert re.fullmatch(r"[a-zA-Z0-9]{9}", call[2]), "Mistral's templates take no other ids"
    for text, format in (('[TOOL_CALLS]get_time[ARGS]{"zone": "CET"}', "mistral"), ('<|tool_call|>[{"name": "get_time", "arguments": {"zone": "CET"}}]', "granite"), ('<tool_call>{"name": "get_time", "arguments": "{\\"zone\\": \\"CET\\"}"}</tool_call>', "hermes")):
        assert [c[:2] for c in read(text, format)[1]] == [("get_time", {"zone": "CET"})], text


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("text, content, thought", [("<think>Hm.</think>Yes.", "Yes.", "Hm."), ("\n<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."), ("Write <think> to begin.", "Write <think> to begin.", ""), ("<think>a</think>b <think>c", "b <think>c", "a"), ("<thin ice", "<thin ice", "")])
def test_reasoning_is_at_the_beginning(text, content, thought, size):
    from llmserve.openai_api import OutputParser
    parser = OutputParser(reasoning=("<think>", "</think>"))
    pieces = [p for a in range(0, len(text), size) for p in parser.push(text[a:a + size])] + parser.push("", last=True)
    read = {kind: "".join(p.text for p in pieces if p.kind == kind).strip() for kind in ("content", "reasoning")}
    assert read == dict(content=content, reasoning=thought)


def test_some_tools_are_allowed():
    from llmserve.openai_api import choose_tools
    allow = lambda mode, *names: {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": n}} for n in names]}}
    assert choose_tools([WEATHER, CLOCK], allow("auto", "get_time")).names == ("get_time",)
    required = choose_tools([WEATHER, CLOCK], allow("required", "get_time"))
    assert required.kind == "required" and json.dumps(required.form.json).count('"const"') == 1
    assert choose_tools([], "auto").kind == choose_tools(None, None).kind == "none"
    for choice in (allow("auto", "barn"), allow("auto"), {"type": "allowed_tools"}):
        with pytest.raises(InvalidRequest, match="allow"): choose_tools([CLOCK], choice)


def test_bytes_of_parts_of_characters():
    from llmserve.models import find, load_tokenizer
    from llmserve.server import token_bytes
    tok = load_tokenizer(find(MODEL))
    ids = tok("A wave 🌊 and naïve 漢字").input_ids
    assert any("\ufffd" in tok.decode([t]) for t in ids)
    assert b"".join(token_bytes(tok, t, tok.decode([t])) for t in ids).decode() == "A wave 🌊 and naïve 漢字"


def test_tools_are_described(server):
    "The template of this model knows no tools; the prompt does all the same."
    from llmserve.models import find, load_tokenizer
    from llmserve.openai_api import render_chat
    tok = load_tokenizer(find(MODEL))
    text = render_chat(tok, [{"role": "system", "content": "Be brief."}, *QUESTION], [CLOCK])
    assert "get_time" in text and "Be brief." in text and text.count("<|im_start|>system") == 1


# ---- completions

def test_completions(client):
    got = client.completions.create(model=MODEL, prompt=["The sea is", "Two and two"], max_tokens=8, temperature=0, n=2)
    assert [c.index for c in got.choices] == [0, 1, 2, 3] and got.choices[0].text == got.choices[1].text != got.choices[2].text
    one = client.completions.create(model=MODEL, prompt="The sea is", max_tokens=8, temperature=0, echo=True)
    assert one.choices[0].text == "The sea is" + got.choices[0].text
    streamed = [""] * 4
    for c in client.completions.create(model=MODEL, prompt=["The sea is", "Two and two"], max_tokens=8, temperature=0, n=2, stream=True): streamed[c.choices[0].index] += c.choices[0].text
    assert streamed == [c.text for c in got.choices]


def test_token_prompts_and_detokenize(client, server):
    ids = post(server, "/tokenize", prompt="The sea is").json()
    assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == 1024
    assert post(server, "/detokenize", tokens=ids["tokens"]).json()["prompt"] == "The sea is"
    same = [client.completions.create(model=MODEL, prompt=p, max_tokens=6, temperature=0).choices[0].text for p in ("The sea is", ids["tokens"], [ids["tokens"]])]
    assert len(set(same)) == 1
    chat = post(server, "/tokenize", messages=QUESTION).json()
    assert chat["count"] > ids["count"]


def test_prompt_logprobs(client):
    "What lm-eval asks for: the log-probabilities of a given text."
    got = client.completions.create(model=MODEL, prompt="The sea is blue", max_tokens=0, echo=True, logprobs=2, temperature=0).choices[0]
    assert got.text == "The sea is blue" and got.logprobs.token_logprobs[0] is None and len(got.logprobs.tokens) == len(got.logprobs.token_logprobs)
    assert all(lp < 0 for lp in got.logprobs.token_logprobs[1:]) and "".join(got.logprobs.tokens) == "The sea is blue"
    assert [got.text[a:a + len(t)] for a, t in zip(got.logprobs.text_offset, got.logprobs.tokens)] == got.logprobs.tokens
    assert all(t in top for t, top in zip(got.logprobs.tokens[1:], got.logprobs.top_logprobs[1:]))


def test_streams_echo_as_wholes_do(client, server):
    ask = dict(model=MODEL, prompt="The sea is blue", echo=True, logprobs=1, temperature=0)
    for most in (0, 4):
        whole = client.completions.create(max_tokens=most, **ask)
        *chunks, last = client.completions.create(max_tokens=most, stream=True, stream_options={"include_usage": True}, **ask)
        assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
        joined = lambda name: [x for c in chunks for x in getattr(c.choices[0].logprobs, name)]
        for name in ("tokens", "text_offset"): assert joined(name) == getattr(whole.choices[0].logprobs, name)
        assert all(a == pytest.approx(b, abs=1e-3) for a, b in zip(joined("token_logprobs"), whole.choices[0].logprobs.token_logprobs))
        assert last.usage.completion_tokens == whole.usage.completion_tokens == most
    assert post(server, "/v1/completions", prompt="a", stream=True, prompt_logprobs=1).status_code == 400
    many = post(server, "/v1/completions", prompt=[[1, 2]] * 1000, n=64, max_tokens=1)
    assert many.status_code == 400 and "1,000 prompts with n=64" in many.json()["error"]["message"]


def test_samples_are_not_cache_hits(client):
    "Answers that share their prompt's blocks have not found it in the cache."
    got = client.completions.create(model=MODEL, prompt="A prompt that nobody else sends, long enough to fill more than one block of the cache: wind, rain, snow.", max_tokens=2, n=3, extra_body=dict(ignore_eos=True))
    assert got.usage.prompt_tokens_details.cached_tokens == 0 and got.usage.completion_tokens == 6


def test_beam_search(client):
    got = client.completions.create(model=MODEL, prompt="The sea is", max_tokens=8, n=2, extra_body=dict(use_beam_search=True))
    assert len(got.choices) == 2 and got.choices[0].text != got.choices[1].text


# ---- responses

def test_responses(client):
    got = client.responses.create(model=MODEL, input="Name three colours.", instructions="Be brief.", max_output_tokens=16, temperature=0)
    assert got.status in ("completed", "incomplete") and got.output_text and got.usage.output_tokens <= 16
    events = list(client.responses.create(model=MODEL, input="Name three colours.", instructions="Be brief.", max_output_tokens=16, temperature=0, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:4]] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == got.output_text
    assert events[-1].response.output[0].content[0].text == got.output_text and events[-1].type == f"response.{got.status}"


def test_responses_with_tools_and_form(client):
    tool = {"type": "function", "name": "get_time", "parameters": CLOCK["function"]["parameters"]}
    got = client.responses.create(model=MODEL, input=[{"role": "user", "content": "What time is it?"}], tools=[tool], tool_choice="required", max_output_tokens=80, temperature=0)
    assert got.output[0].type == "function_call" and json.loads(got.output[0].arguments)["zone"] in ("UTC", "CET")
    events = list(client.responses.create(model=MODEL, input="What time is it?", tools=[tool], tool_choice={"type": "function", "name": "get_time"}, max_output_tokens=80, temperature=0, stream=True))
    assert json.loads("".join(e.delta for e in events if e.type == "response.function_call_arguments.delta"))["zone"] in ("UTC", "CET")
    form = client.responses.create(model=MODEL, input="Describe a person.", text={"format": {"type": "json_schema", "name": "p", "schema": PERSON}}, max_output_tokens=80, temperature=0.5)
    assert set(json.loads(form.output_text)) == {"name", "age"}
    follow = [{"role": "user", "content": "What time is it?"}, got.output[0].model_dump(), {"type": "function_call_output", "call_id": got.output[0].call_id, "output": "12:30"}]
    assert client.responses.create(model=MODEL, input=follow, tools=[tool], tool_choice="none", max_output_tokens=8).output_text is not None


# ---- around

def test_models_health_version(client, server):
    assert [m.id for m in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as e: client.completions.create(model="barn", prompt="a")
    assert e.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as e: client.completions.create(model=MODEL, prompt=[7] * 100_000)
    assert e.value.code == "context_length_exceeded" and "maximum context length" in e.value.message
    asked = dict(messages=QUESTION, tools=[CLOCK])
    counted = httpx.post(server.url + "/tokenize", json=asked).json()["count"]
    assert counted == client.chat.completions.create(model=MODEL, max_tokens=1, **asked).usage.prompt_tokens
    assert httpx.get(server.url + "/health").status_code == 200 and "version" in httpx.get(server.url + "/version").json()


def test_sleep(client, server):
    assert httpx.get(server.url + "/is_sleeping").json() == {"is_sleeping": False}
    assert httpx.post(server.url + "/sleep?level=1").status_code == 200 and httpx.get(server.url + "/is_sleeping").json()["is_sleeping"]
    assert re.search(r"engine_sleep_state\{[^}]*sleep_state=.weights_offloaded.\} 1.0", httpx.get(server.url + "/metrics").text)
    assert client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4).choices, "the next request wakes it"
    assert httpx.post(server.url + "/sleep?level=2").status_code == 200
    assert httpx.post(server.url + "/wake_up").status_code == 200 and not httpx.get(server.url + "/is_sleeping").json()["is_sleeping"]
    assert httpx.post(server.url + "/reset_prefix_cache").status_code == 200


def test_metrics(client, server):
    from prometheus_client.parser import text_string_to_metric_families as parse
    read = lambda: {(s.name, s.labels.get("finished_reason")): s.value for f in parse(httpx.get(server.url + "/metrics").text) for s in f.samples if "le" not in s.labels}
    before = read()
    client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=9, extra_body=dict(ignore_eos=True))
    after = read()
    grown = lambda name, label=None: after[f"vllm:{name}", label] - before.get((f"vllm:{name}", label), 0)
    assert grown("generation_tokens_total") == 9 and grown("request_success_total", "length") == 1 and grown("time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == 8 and grown("e2e_request_latency_seconds_count") == 1 and grown("prompt_tokens_total") > 5
    names = {n for n, _ in after}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
                 "spec_decode_num_accepted_tokens_total", "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum", "iteration_tokens_total_sum", "cache_config_info"): assert f"vllm:{name}" in names, name
    page = httpx.get(server.url + "/").text
    assert "<html" in page and "http" not in page.split("<script>")[1], "the page takes nothing from elsewhere"
    assert server.live()["model"] == MODEL


def test_errors_have_the_shape_of_openai(client, server):
    with pytest.raises(openai.NotFoundError, match="no model"): client.chat.completions.create(model="gpt-9", messages=QUESTION)
    for bad, word in ((dict(n=0), "n must"), (dict(temperature=-1), "temperature"), (dict(max_tokens=0), "max_tokens"), (dict(top_p=0), "top_p"), (dict(messages=[]), "messages"), (dict(logit_bias={"x": 1}), "logit_bias"), (dict(top_logprobs=2), "logprobs"),
                      (dict(response_format={"type": "xml"}), "response_format"), (dict(tools=[{"type": "function"}]), "tool"), (dict(tool_choice="required"), "no tools"), (dict(extra_body=dict(guided_regex="(")), "grammar"),
                      (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), "image_url"), (dict(messages=[{"role": "user", "content": "a " * 3000}]), "max_model_len")):
        with pytest.raises(openai.BadRequestError, match=word) as e: client.chat.completions.create(**{**dict(model=MODEL, messages=QUESTION, max_tokens=4), **bad})
        assert set(e.value.body) >= {"message", "type", "param", "code"}
    with pytest.raises(openai.BadRequestError, match="n must"): client.chat.completions.create(model=MODEL, messages=QUESTION, n=0, stream=True)
    assert httpx.post(server.url + "/v1/chat/completions", content=b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', headers={"content-type": "application/json"}).status_code == 400
    assert post(server, "/nowhere").json()["error"]["type"] == "invalid_request_error"


def test_parallel_clients_share_steps(server):
    async def main():
        c = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", timeout=60)
        ask = lambda i: c.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": f"Say {i}."}], max_tokens=24, temperature=0, extra_body=dict(ignore_eos=True))
        together = await asyncio.gather(*(ask(i) for i in range(16)))
        assert all(t.usage.completion_tokens == 24 for t in together)
    asyncio.run(main())
    assert server.used_blocks() == 0


# ---- other people's clients

def test_langchain(server):
    from typing import Literal

    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        "A person."
        name: str = Field(max_length=20)
        age: int = Field(ge=0, le=150)
    llm = ChatOpenAI(base_url=server.url + "/v1", api_key="none", model=MODEL, temperature=0, max_tokens=60)
    assert llm.invoke("Name three colours.").content
    assert "".join(c.content for c in llm.stream("Name three colours.")) == llm.invoke("Name three colours.").content

    def get_time(zone: Literal["UTC", "CET"]) -> str:
        "The time in a zone."
    call = llm.bind_tools([get_time], tool_choice="get_time").invoke("What time is it in CET?").tool_calls
    assert call[0]["name"] == "get_time" and "zone" in call[0]["args"]
    for method in ("json_schema", "function_calling"):
        assert isinstance(llm.with_structured_output(Person, method=method).invoke("Ada is 36."), Person)


def test_llama_index(server):
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike
    llm = OpenAILike(model=MODEL, api_base=server.url + "/v1", api_key="none", is_chat_model=True, temperature=0, max_tokens=16)
    said = llm.chat([ChatMessage(role="user", content="Name three colours.")]).message.content
    assert said and "".join(c.delta or "" for c in llm.stream_chat([ChatMessage(role="user", content="Name three colours.")])) == said
    base = OpenAILike(model=MODEL, api_base=server.url + "/v1", api_key="none", is_chat_model=False, temperature=0, max_tokens=8)
    assert base.complete("The sea is").text


def test_small_writes_are_sent_at_once():
    "With Nagle's algorithm the first token on a kept connection waits for an acknowledgement, 40 ms."
    import socket

    from llmserve.server import bind

    async def main():
        seen, listener = asyncio.get_running_loop().create_future(), bind("127.0.0.1", 0)

        def connected(reader, writer):
            seen.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
        async with await asyncio.start_server(connected, sock=listener):
            await asyncio.open_connection(*listener.getsockname())
            assert await asyncio.wait_for(seen, 10)
        with pytest.raises(ValueError, match="cannot listen on 192.0.2.1:1"): bind("192.0.2.1", 1)  # nobody's address
    asyncio.run(main())
