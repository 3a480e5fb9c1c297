"""Streams as the engines' servers write them, for `test_joining.py`.

`python -m tests.proxy.streams.record sglang http://127.0.0.1:30000` asks a server of a small model by every route
that streams, and writes what it streams beside this file. Recorded with SGLang 0.5.23 and
vLLM 0.32.0, of the models of `tests/e2e/engine_servers.py` and `pdlink.serve.checkpoint`.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

from pdlink.api.openai import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES

PLACE = Path(__file__).parent
_SHORT = {"max_tokens": 20, "ignore_eos": True}
_PROMPT = list(range(20, 60))
_CHAT = [{"role": "user", "content": "hello"}]
_USAGE = {"stream_options": {"include_usage": True}}
_SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (COMPLETIONS, {"prompt": _PROMPT, "return_token_ids": True, **_SHORT, **_USAGE}),
    "completions-logprobs": (COMPLETIONS, {"prompt": ["hello", "world"], "logprobs": 1, **_SHORT}),
    "chat": (CHAT, {"messages": _CHAT, "logprobs": True, "top_logprobs": 1, **_SHORT, **_USAGE}),
    "responses": (RESPONSES, {"input": "hello", "max_output_tokens": 20}),
    "messages": (MESSAGES, {"messages": _CHAT, "max_tokens": 20}),
    "generate": (GENERATE, {"input_ids": _PROMPT, "sampling_params": _SAMPLING}),
    "generate-batch": (
        GENERATE,
        {"text": ["hello", "world"], "sampling_params": _SAMPLING, "return_logprob": True},
    ),
}


def main() -> None:
    engine, url = sys.argv[1:]
    with urllib.request.urlopen(url + "/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    for name, (path, fields) in ASKED.items():
        if path == GENERATE and engine != "sglang":
            continue
        body = {"model": model, "stream": True, "temperature": 0, **fields}
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers)) as answer:
            (PLACE / f"{engine}-{name}.txt").write_bytes(answer.read())


if __name__ == "__main__":
    main()
