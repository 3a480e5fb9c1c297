"""README's lines for two vLLM servers, typed as they stand there, on two hosts: network namespaces with a cable."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from pdlink.endpoint.token import http_key_of  # noqa: E402
from tests.e2e.engine_servers import NUM_LAYERS, prompt_of, save_model, until  # noqa: E402
from tests.e2e.vllm_servers import Server  # noqa: E402
from tests.tools import tool  # noqa: E402
from tests.two_hosts import Host, two_hosts  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(600)]

READY_S = 240.0
OF_CPUS = ["--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
"""What this machine adds behind `--`: README's lines are for GPUs."""
NUM_TOKENS = 700
KV_NBYTES = NUM_TOKENS * NUM_LAYERS * 2 * 4 * 32 * 4
"""K and V of four heads of 32 numbers."""
ANSWER = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "detokenize": False}


def curl(host: Host, url: str, body: dict[str, object] | None = None, *more: str) -> str:
    sent = [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    command = [*host.inside, "curl", "-sS", "--max-time", "60", *more, *sent, url]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=90).stdout


def tokens_of(answer: str) -> list[int]:
    found: list[int] = json.loads(answer[answer.index("{") :])["choices"][0]["token_ids"]
    assert len(found) == ANSWER["max_tokens"]
    return found


def test_readmes_lines_for_two_servers_answer_as_one_server_does(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    _, prefill_line, decode_line, proxy_line = tool("newcomer").two_servers_of_readme()
    environment = {**os.environ, **Server("unused", tmp_path / "model", tmp_path / "unused.log", []).settings()}
    prompt = prompt_of(NUM_TOKENS, 1)
    asked: dict[str, object] = {"model": "model", "prompt": prompt, **ANSWER}
    with two_hosts("10.0.0.1", "10.0.0.2") as (first, second), ExitStack() as stack:

        def typed(host: Host, line: str, *behind: str) -> None:
            words = shlex.split(line.replace("$MODEL", "model"))
            assert words[0] == "pdlink"
            words[0] = str(Path(sys.executable).with_name("pdlink"))
            log = stack.enter_context((tmp_path / f"{words[1]}-{words[2].strip('-')}.log").open("wb"))
            process = subprocess.Popen(
                [*host.inside, *words, *behind], cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)

        typed(first, prefill_line, "--", *OF_CPUS)
        typed(second, decode_line, "--", *OF_CPUS)
        typed(first, proxy_line)
        status = ("-o", "/dev/null", "-w", "%{http_code}")
        proxy, prefill = "http://127.0.0.1:8000", "http://10.0.0.1:8100"
        try:  # one that is ready alone would answer alone
            until(
                lambda: '"status":"ok"' in curl(first, f"{proxy}/health").replace(" ", ""), "all are ready", READY_S
            )
        except AssertionError as error:
            logs = "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in tmp_path.glob("*.log"))
            raise AssertionError(f"{error}\n{logs}") from None
        answer = curl(first, f"{proxy}/v1/completions", asked, "-i")
        key = ("-H", f"Authorization: Bearer {http_key_of(token.read_text())}")
        alone = curl(first, f"{prefill}/v1/completions", asked, *key)
        assert "X-Pdlink-KV: transferred" in answer
        assert tokens_of(answer) == tokens_of(alone)
        assert curl(second, f"{prefill}/v1/completions", asked, *status) == "401", "a stranger on the network"
        assert second.received_nbytes() > KV_NBYTES, "the KV has crossed the cable"
