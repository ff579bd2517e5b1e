"Ten minutes of random load with clients that leave: memory stays flat, nothing fails, latency does not creep. SOAK_MINUTES sets another length."
import asyncio
import os
import random
import time

import psutil
import pytest
from conftest import Server

pytestmark = pytest.mark.slow


def percentile(values, p): return sorted(values)[min(int(len(values) * p / 100), len(values) - 1)]


def test_soak(capsys):
    import aiohttp
    minutes = float(os.environ.get("SOAK_MINUTES", 10))
    s = Server("--kv-cache-memory", "192MiB", "--max-model-len", "512", "--max-num-seqs", "16", "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4, "adaptive": true}')
    engine, api = psutil.Process(s.engine_pid), psutil.Process(s.process.pid)
    dice, ttft, errors, memory, left, done = random.Random(0), [], [], [], 0, 0

    async def user(session, until):
        nonlocal left, done
        while time.monotonic() < until:
            prompt, out = f"{dice.random()} " + "the sea is wide and blue, " * dice.randint(1, 60), dice.randint(1, 96)
            body = dict(prompt=prompt, max_tokens=out, stream=True, temperature=dice.choice([0, 1]), seed=dice.randrange(1000), n=dice.choice([1, 1, 1, 2]))
            if dice.random() < 0.15: body["guided_regex"] = "[a-z ]{5,40}"
            leaves = dice.random() < 0.3 and dice.randint(0, 12)
            sent, first, pieces = time.monotonic(), None, 0
            try:
                async with session.post(s.url + "/v1/completions", json=body) as r:
                    if r.status != 200: errors.append((r.status, await r.text()))
                    async for line in r.content:
                        if not line.startswith(b"data: {"): continue
                        if b'"error"' in line: errors.append(line)
                        if first is None: first = time.monotonic()
                        pieces += 1
                        if leaves is not False and pieces >= leaves: left += 1; break
                    else: done += 1
            except aiohttp.ClientError as e: errors.append(repr(e))
            if first: ttft.append((first, first - sent))
            await asyncio.sleep(dice.expovariate(2))

    async def main():
        until = time.monotonic() + minutes * 60
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            users = [asyncio.ensure_future(user(session, until)) for _ in range(16)]
            while time.monotonic() < until:
                memory.append((time.monotonic(), engine.memory_info().rss, api.memory_info().rss))
                await asyncio.sleep(min(5, minutes * 60 / 40))
            await asyncio.gather(*users)
    start = time.monotonic()
    try:
        asyncio.run(main())
        warm = start + minutes * 60 * 0.2
        at = [m for m in memory if m[0] > warm]
        third = len(at) // 3
        mean = lambda rows, k: sum(r[k] for r in rows) / len(rows)
        growth = [mean(at[-third:], k) / mean(at[:third], k) - 1 for k in (1, 2)]
        half = start + minutes * 60 * 0.6
        early, late = [t for at, t in ttft if warm < at <= half], [t for at, t in ttft if at > half]
        figures = dict(minutes=minutes, answered=done, left=left, errors=len(errors), engine_mib=round(at[-1][1] / 2**20), engine_growth=round(growth[0], 4), api_mib=round(at[-1][2] / 2**20), api_growth=round(growth[1], 4),
                       ttft_p50_ms=round(1e3 * percentile([t for _, t in ttft], 50)), ttft_p99_early_ms=round(1e3 * percentile(early, 99)), ttft_p99_late_ms=round(1e3 * percentile(late, 99)))
        with capsys.disabled(): print("\n", figures)
        assert not errors, errors[:3]
        assert left > 0 and done > 0
        assert s.used_blocks() == 0
        if minutes >= 5:
            assert all(abs(g) <= 0.03 for g in growth), figures
            assert percentile(late, 99) < 1.5 * percentile(early, 99), figures
        assert s.stop() == 0
    finally: s.process.kill()
