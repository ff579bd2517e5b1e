"What clients and machines do to a server: nothing of it reaches other clients, and all blocks are free at the end."
import asyncio
import json
import os
import signal
import socket
import time

import httpx
import psutil
import pytest
from conftest import SERVE, Server

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "Name three colours."}]
LONG = dict(model=MODEL, prompt="The sea is", max_tokens=800, ignore_eos=True, temperature=1)


@pytest.fixture(scope="module")
def small():
    s = Server("--kv-cache-memory", "256MiB", "--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-queued-reqs", "64", "--request-timeout", "60", "--max-num-batched-tokens", "256")
    yield s
    assert s.stop() == 0, "".join(s.lines)


def url_of(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def raw(server, path, body, headers=None):
    "A connection with the request sent, and nothing read."
    data, s = json.dumps(body).encode(), socket.create_connection(url_of(server), timeout=60)
    lines = {"Host": "x", "Content-Type": "application/json", "Content-Length": len(data), **(headers or {})}
    s.sendall((f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n").encode() + data)
    return s


def wait_until(condition, patience=15.0):
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if condition(): return True
        time.sleep(0.05)
    return False


def well(server):
    "Answers, holds no blocks, and its books agree."
    assert httpx.post(server.url + "/v1/completions", json=dict(prompt="a", max_tokens=2), timeout=60).status_code == 200
    assert server.used_blocks() == 0
    assert server.live()["open"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_it_answers(small, stream):
    s = raw(small, "/v1/completions", dict(LONG, stream=stream))
    assert wait_until(lambda: small.live()["running"] == 1)
    if stream: assert s.recv(200)
    s.close()
    assert wait_until(lambda: small.live()["open"] == 0, 3), "the request goes on without a client"
    well(small)


def test_leaving_while_the_prompt_is_computed(small):
    for _ in range(3):
        s = raw(small, "/v1/completions", dict(LONG, prompt=[5 + i % 1000 for i in range(1000)], max_tokens=20, cache_salt=str(time.time())))
        assert wait_until(lambda: small.live()["open"] > 0)
        s.close()
    assert wait_until(lambda: small.live()["open"] == 0, 3)
    well(small)


def test_leaving_while_waiting(small):
    "The first eight run, the others wait; all leave."
    sockets = [raw(small, "/v1/completions", dict(LONG, stream=i % 2 == 0, n=2)) for i in range(20)]
    assert wait_until(lambda: small.live()["open"] == 20 and small.live()["waiting"] > 0)
    for s in sockets: s.close()
    assert wait_until(lambda: small.live()["open"] == 0, 5)
    well(small)


def test_leaving_in_the_middle_of_a_body(small):
    s = socket.create_connection(url_of(small))
    s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"prompt\": ")
    time.sleep(0.1)
    s.close()
    well(small)


def test_a_slow_reader_slows_nobody(small):
    slow = raw(small, "/v1/completions", dict(LONG, stream=True, max_tokens=400))
    start = time.monotonic()
    got = httpx.post(small.url + "/v1/completions", json=dict(LONG, max_tokens=32, temperature=0), timeout=60)
    assert got.json()["usage"]["completion_tokens"] == 32 and time.monotonic() - start < 20
    assert wait_until(lambda: small.live()["open"] == 0, 60), "an answer that nobody reads still ends"
    text = b""
    while not text.endswith(b"0\r\n\r\n"): text += slow.recv(1 << 16)
    assert b"[DONE]" in text
    slow.close()
    well(small)


def test_two_hundred_clients_over_a_queue_of_64(small):
    async def main():
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=250)) as c:
            return await asyncio.gather(*(c.post(small.url + "/v1/completions", json=dict(prompt=f"{i} is", max_tokens=4, ignore_eos=True)) for i in range(200)))
    got = asyncio.run(main())
    statuses = [r.status_code for r in got]
    assert set(statuses) == {200, 503} and statuses.count(200) >= 64
    for r in got:
        if r.status_code == 503: assert int(r.headers["retry-after"]) >= 1 and "waiting" in r.json()["error"]["message"]
        else: assert r.json()["usage"]["completion_tokens"] == 4
    well(small)


def test_deadline(small):
    got = httpx.post(small.url + "/v1/completions", json=dict(LONG, timeout=0.3), timeout=60)
    assert got.status_code == 408 and "0.3 s" in got.json()["error"]["message"]
    streamed = httpx.post(small.url + "/v1/completions", json=dict(LONG, timeout=1.0, stream=True), timeout=60)
    assert streamed.status_code == 200 and '"timeout"' in streamed.text and streamed.text.rstrip().endswith("data: [DONE]")
    response = httpx.post(small.url + "/v1/responses", json=dict(input="Tell me a long story.", ignore_eos=True, timeout=1.0, stream=True), timeout=60)
    assert response.text.rstrip().splitlines()[-2] == "event: response.failed" and "longer than 1 s" in response.text
    well(small)


async def stalled(timeout):
    "A client who takes the first event, and then nothing more."
    from llmserve.server import EventStream
    closed, begun = [], asyncio.Event()

    async def rest():
        try:
            while True: yield b"more"
        finally: closed.append(True)

    class Http:
        async def receive(self): await asyncio.Event().wait()

    async def send(message):
        if message.get("body") == b"more":
            begun.set()
            await asyncio.Event().wait()
    start = time.monotonic()
    await EventStream(b"first", rest(), Http(), start + timeout)({}, None, send)
    assert begun.is_set() and closed
    return time.monotonic() - start


def test_a_deadline_holds_for_those_who_stop_reading(): assert asyncio.run(stalled(0.3)) < 2


def test_what_is_large_only_together(small):
    "Sizes that one answer may have, and many may not."
    post = lambda path, **body: httpx.post(small.url + path, json=body, timeout=60)
    for word, body in (("logit_bias", dict(prompt=["a"] * 1024, max_tokens=1, logit_bias={str(i): 1 for i in range(200)})), ("logprobs", dict(prompt=["a"] * 1024, logprobs=64, max_tokens=64)), ("logit_bias", dict(prompt="a", logit_bias={f"x{i}": "" for i in range(200_000)}))):
        answer = post("/v1/completions", **body)
        assert answer.status_code in (400, 422) and word in answer.json()["error"]["message"] and len(answer.text) < 2000
    for tools in ([{"function": None}], [{"function": "x"}], [{}]): assert post("/tokenize", messages=[dict(role="user", content="x")], tools=tools).status_code == 400
    assert post("/detokenize", tokens=[-1]).status_code == post("/detokenize", tokens=[10**9, 1]).status_code == 400
    tool = lambda name: dict(type="function", function=dict(name=name, description=f"Does {name}.", parameters=dict(type="object", properties={})))
    asked = lambda tools, **more: post("/v1/chat/completions", messages=[dict(role="user", content="Hello")], max_tokens=1, tools=[tool(t) for t in tools], **more).json()["usage"]["prompt_tokens"]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "open_door"}}]}}
    assert asked(["open_door", "ring_bell"], tool_choice=allowed) == asked(["open_door"]) < asked(["open_door", "ring_bell"])  # the others are not shown
    well(small)


def test_garbage(small):
    post = lambda body, kind="application/json": httpx.post(small.url + "/v1/chat/completions", content=body, headers={"content-type": kind}, timeout=60)
    for body in (b"", b"{", b"null", b"[]", b"42", b'"a"', b"\xff\xfe\x00", b'{"messages": 1}', b'{"messages": [1]}', b'{"messages": [{"role": 1}]}', b'{"messages": [{"content": "a"}]}', b"[" * 100_000, b'{"messages":' * 50_000,
                 b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": [{"role": "nobody", "content": "a"}], "max_tokens": 1e400}', b'{"messages": [{"role": "user", "content": "a"}], "n": 100000}'):
        r = post(body)
        assert r.status_code in (400, 422), (body[:60], r.status_code, r.text[:200])
        assert r.json()["error"]["message"]
    for bad in ("NaN", "Infinity", "-Infinity", "1e999", '"x"', "[]", "true"):
        for name in ("temperature", "top_p", "presence_penalty", "min_p", "max_tokens", "seed", "top_k"):
            r = post(f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 1, "{name}": {bad}}}'.replace('"max_tokens": 1, "max_tokens"', '"max_tokens"').encode())
            assert r.status_code in (200, 400), (name, bad, r.status_code)
            if bad in ("NaN", "Infinity", "-Infinity", "1e999"): assert r.status_code == 400, (name, bad)
    assert post(b'{"messages": []}', "text/plain").status_code == 400
    for path in ("/v1/completions", "/v1/responses", "/tokenize", "/detokenize"):
        assert httpx.post(small.url + path, content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert httpx.post(small.url + "/detokenize", json=dict(tokens=[10**9])).status_code == 400
    assert httpx.post(small.url + "/v1/completions", json=dict(prompt=[10**9], max_tokens=1)).status_code == 400
    assert httpx.post(small.url + "/v1/completions", json=dict(prompt=[2**70], max_tokens=1)).status_code == 400
    assert httpx.post(small.url + "/v1/completions", json=dict(prompt=[], max_tokens=1)).status_code == 400
    assert httpx.post(small.url + "/v1/completions", json=dict(prompt="a", max_tokens=1, seed=2**80)).status_code == 400
    assert httpx.get(small.url + "/v1/completions").status_code == 405
    well(small)


def test_bodies_that_cannot_be_handed_on(small):
    "Refused at the door, each with its reason, and none leaves a request behind."
    chat = lambda **more: httpx.post(small.url + "/v1/chat/completions", json=dict(messages=QUESTION, max_tokens=2, **more), timeout=60)
    text = lambda **more: httpx.post(small.url + "/v1/completions", content=json.dumps(dict(prompt="a") | more), headers={"content-type": "application/json"}, timeout=60)
    for name in ("max_tokens", "min_tokens", "top_k", "logprobs"): assert text(**{name: 10**20}).status_code == 400, name
    for more in (dict(stop_token_ids=[2**64]), dict(logit_bias={str(2**64): 1}), dict(stop="\ud800"), dict(cache_salt="\ud800"), dict(guided_regex="\ud800"), dict(guided_json={"const": 2**70}), dict(structured_outputs=dict(json_object=1)), dict(structured_outputs=dict(json_object="yes")), dict(stop=["a"] * 300)):
        r = text(max_tokens=2, **more)
        assert r.status_code == 400 and r.json()["error"]["message"], (more, r.status_code, r.text[:200])
    for name, value in (("chat_template", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"), ("messages", []), ("tokenize", True), ("add_generation_prompt", False), ("max_tokens", 3)):
        r = chat(chat_template_kwargs={name: value})
        assert r.status_code == 400 and name in r.json()["error"]["message"], (name, r.text[:200])
    assert chat(chat_template_kwargs=dict(enable_thinking=False)).status_code == 200
    for calls in (5, [5], [{"function": 5}], [{"function": "abc"}], [{"function": {"name": "f", "arguments": "[" * 100_000}}]):
        r = httpx.post(small.url + "/v1/chat/completions", json=dict(messages=[*QUESTION, dict(role="assistant", tool_calls=calls)], max_tokens=2), timeout=60)
        assert r.status_code == 400, (str(calls)[:40], r.status_code, r.text[:200])
    assert chat(chat_template_kwargs=dict(tokenizer=1, tools_of=2)).status_code == 200
    for more in (dict(chat_template="{{ messages }}"), dict(echo=True)): assert chat(**more).status_code == 400, more
    for body in (dict(input="a", top_logprobs=3), dict(input=[1] * 10)): assert httpx.post(small.url + "/v1/responses", json=body).status_code == 400, body
    start = time.monotonic()
    for more in (dict(stop_token_ids=list(range(600_000)), n=128), dict(allowed_token_ids=[5] * 2_000_000), dict(stop=["x" * 10_000_000]), dict(prompt=[{}] * 1_000_000), dict(prompt=["a"] * 65)):
        r = text(max_tokens=2, **more)
        assert r.status_code == 400, (list(more), r.status_code, r.text[:200])
    for body in (dict(messages=[1] * 1_000_000), dict(messages=[dict(role="u", content="")] * 20_000), dict(messages=QUESTION, tools=[{}] * 2000)):
        r = httpx.post(small.url + "/v1/chat/completions", json=body, timeout=60)
        assert r.status_code == 400, (r.status_code, r.text[:200])
    assert time.monotonic() - start < 20
    start = time.monotonic()
    r = text(prompt=[5] * 3_000_000, n=128, max_tokens=2)
    assert r.status_code == 400 and "max_model_len" in r.json()["error"]["message"] and time.monotonic() - start < 5
    well(small)


def test_a_name_is_used_again(small):
    "What is still on its way for an answer that ended does not reach the next request of that name."
    post = lambda **more: httpx.post(small.url + "/v1/completions", json=dict(request_id="again", temperature=0, **more), timeout=60)
    alone = post(prompt="One, two, three,", max_tokens=8).json()["choices"][0]["text"]
    for _ in range(6):
        assert post(prompt="The sea is", max_tokens=300, stop=["e"], n=2).status_code == 200
        r = post(prompt="One, two, three,", max_tokens=8, logprobs=1)
        assert r.status_code == 200 and r.json()["choices"][0]["text"] == alone
    well(small)


def test_large_bodies(small):
    start = time.monotonic()
    r = httpx.post(small.url + "/v1/completions", json=dict(prompt="a " * 5_000_000, max_tokens=1), timeout=60)
    assert r.status_code == 400 and "max_model_len" in r.json()["error"]["message"]
    assert time.monotonic() - start < 5
    assert httpx.post(small.url + "/v1/completions", json=dict(prompt="a" * 20_000_000), timeout=60).status_code == 413

    def pieces():
        for _ in range(20): yield b" " * 1_000_000
    assert httpx.post(small.url + "/v1/completions", content=pieces(), headers={"content-type": "application/json"}, timeout=60).status_code == 413
    well(small)


def test_schema_bombs(small):
    deep = {"type": "object"}
    for _ in range(100): deep = {"type": "object", "properties": {"a": deep}}
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "x" * 100} for i in range(5000)}}
    bombs = [dict(guided_json=deep), dict(guided_json=wide), dict(guided_regex="(((((a{1,900}){1,900}){1,900}){1,900}){1,900})"), dict(guided_regex="(a*)*" * 20000), dict(guided_json={"$ref": "#"}), dict(guided_json={"$ref": "#/definitions/x"}),
             dict(guided_grammar="start: start"), dict(guided_grammar="start: a\na: b\nb: a"), dict(guided_json={"type": "string", "pattern": "(((x{1,500}){1,500}){1,500})"}), dict(guided_choice=[]), dict(guided_choice=["a" * 300_000]),
             dict(guided_json={"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)} | {"5000": {"type": "integer"}}}), dict(guided_grammar="start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(4000)) + '\na4000: "x"'),
             dict(guided_json={"allOf": [{"anyOf": [{"const": i + j * 50} for i in range(50)]} for j in range(50)]})]
    for bomb in bombs:
        start = time.monotonic()
        r = httpx.post(small.url + "/v1/completions", json=dict(prompt="a", max_tokens=4, **bomb), timeout=60)
        assert r.status_code in (200, 400), (str(bomb)[:80], r.status_code, r.text[:200])
        assert time.monotonic() - start < 10, str(bomb)[:80]
    well(small)


def test_others_go_on_while_a_form_is_compiled(small):
    "A schema that takes seconds holds up its own request and nobody else's; who leaves meanwhile leaves nothing."
    large = lambda k: dict(prompt="a", max_tokens=2, guided_json={"type": "object", "properties": {f"p{k}_{i}": {"type": "string"} for i in range(4000)}})
    assert httpx.post(small.url + "/v1/completions", json=dict(prompt="a", max_tokens=2, guided_regex="a+"), timeout=60).status_code == 200
    slow = [raw(small, "/v1/completions", large(k)) for k in range(8)]
    assert wait_until(lambda: small.live()["open"] == 8)
    start = time.monotonic()
    assert httpx.post(small.url + "/v1/completions", json=dict(prompt="a", max_tokens=8), timeout=60).status_code == 200
    assert time.monotonic() - start < 3, "an answer waited for forms of others"
    assert small.live()["open"] > 0, "the forms were compiled at once: this test shows nothing"
    for s in slow: s.close()
    assert wait_until(lambda: small.live()["open"] == 0)
    well(small)


def test_key_and_name():
    s = Server("--kv-cache-memory", "64MiB", "--max-model-len", "256", "--api-key", "sesame", "--served-model-name", "house")
    try:
        assert httpx.get(s.url + "/health").status_code == 200
        assert httpx.get(s.url + "/v1/models").status_code == 401
        assert httpx.get(s.url + "/v1/models", headers={"authorization": "Bearer wrong"}).json()["error"]["code"] == "invalid_api_key"
        key = {"authorization": "Bearer sesame"}
        assert all(httpx.get(s.url + path).status_code == 200 for path in ("/", "/live", "/metrics", "/version")), "what a browser and a scraper ask for"
        assert httpx.get(s.url + "/v1/models", headers={"authorization": "bearer sesame"}).status_code == 200
        assert httpx.get(s.url + "/v1/models", headers=key).json()["data"][0]["id"] == "house"
        assert httpx.post(s.url + "/v1/completions", headers=key, json=dict(model="house", prompt="a", max_tokens=1), timeout=60).status_code == 200
        assert httpx.post(s.url + "/v1/completions", headers=key, json=dict(model="barn", prompt="a", max_tokens=1)).status_code == 404
        slow = raw(s, "/v1/completions", dict(LONG, model="house", max_tokens=60, stream=False), key)
        time.sleep(0.5)
        assert s.stop() == 0, "told to stop while it answers"
        assert b'"completion_tokens":60' in read_all(slow), "an open request ends before the server does"
    finally: s.process.kill()


def read_all(s):
    out = b""
    while True:
        piece = s.recv(1 << 16)
        if not piece: return out
        out += piece
        if b'"usage"' in out: return out


@pytest.mark.parametrize("then", ["exit", "restart"])
def test_the_engine_is_killed(then):
    s = Server("--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--on-engine-failure", then)
    try:
        async def main():
            async with httpx.AsyncClient(timeout=60) as c:
                work = [asyncio.ensure_future(c.post(s.url + "/v1/completions", json=dict(LONG, stream=i % 2 == 1))) for i in range(6)]
                while s.live()["running"] < 4: await asyncio.sleep(0.1)
                await asyncio.sleep(0.5)
                os.kill(s.engine_pid, signal.SIGKILL)
                killed = time.monotonic()
                ended = await asyncio.wait_for(asyncio.gather(*work), 10)
                took = time.monotonic() - killed
                health = (await c.get(s.url + "/health")).status_code if then == "restart" else 503
                return ended, took, health
        ended, took, health = asyncio.run(main())
        assert took < 2 and health == 503
        for r in ended: assert r.status_code == 503 or "engine" in r.text.split("data: ")[-2] and "error" in r.text.split("data: ")[-2], r.text[-300:]
        if then == "exit": assert s.process.wait(20) == 1
        else:
            assert wait_until(lambda: httpx.get(s.url + "/health").status_code == 200, 60)
            well(s)
            assert s.stop() == 0
    finally: s.process.kill()


def test_the_engine_does_not_come_back():
    "What was started in place of a dead engine dies too: the server says so and ends, so that whoever watches it can act."
    s = Server("--kv-cache-memory", "64MiB", "--max-model-len", "256", "--on-engine-failure", "restart")
    try:
        first = s.engine_pid
        os.kill(first, signal.SIGKILL)
        def second():
            try: return s.engine_pid != first and s.engine_pid
            except (StopIteration, psutil.NoSuchProcess): return None
        assert wait_until(second, 20)
        os.kill(second(), signal.SIGKILL)
        assert s.process.wait(20) == 1 and "did not start again" in "".join(s.lines)
    finally: s.process.kill()


def test_the_server_is_killed():
    "Its engine does not live on."
    s = Server("--kv-cache-memory", "64MiB", "--max-model-len", "256")
    engine = psutil.Process(s.engine_pid)
    s.process.kill()
    assert wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 10)


def test_bad_starts():
    import subprocess
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    for flags, word in ((("no-such-model",), "no-such-model"), (("--port", str(taken.getsockname()[1])), "cannot listen"), (("--max-body-size", "lots"), "memory size"), (("--chat-template", "./tmpl.jnja"), "no file"), (("--api-key", ""), "api_key is empty"), (("--ssl-certfile", "none.pem"), "ssl_certfile"), (("--max-model-len", "999999", "--kv-cache-memory", "16MiB"), "max_model_len")):
        done = subprocess.run([*SERVE, *flags], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and word in done.stderr and "Traceback" not in done.stderr, (flags, done.stderr[-500:])
