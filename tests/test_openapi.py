"Requests that nobody would write, made from the server's own schema: no error of the server, no crash, no leaked block."
import re
import subprocess
import sys

import pytest
from conftest import Server


@pytest.mark.parametrize("examples, least", [(8, 30), pytest.param(160, 2000, marks=pytest.mark.slow)], ids=["few", "two thousand"])
def test_schemathesis(examples, least):
    s = Server("--kv-cache-memory", "64MiB", "--max-model-len", "64", "--max-num-seqs", "32", "--request-timeout", "10")
    try:
        phases = "fuzzing" if examples < 20 else "coverage,fuzzing,stateful"
        done = subprocess.run([sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", s.url + "/openapi.json", "--checks", "not_a_server_error", "--max-examples", str(examples), "--workers", "8", "--phases", phases, "--generation-database", "none"],
                              capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        assert int(re.search(r"(\d+) generated", done.stdout)[1]) >= least, done.stdout[-1500:]
        assert s.used_blocks() == 0 and s.stop() == 0
    finally: s.process.kill()
