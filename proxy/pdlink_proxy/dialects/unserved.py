"""Fields of requests that servers of another engine would pass over without a word, each with the reason.

Our own engine refuses what it does not do by itself (`pdlink.serve.unserved`). Others are the engine's to judge.
"""

from __future__ import annotations

OF_VLLM = {
    "kv_retention": "vLLM hands its connector no such field",
    "skip_reading_prefix_cache": "vLLM takes it in its Python API alone",
}
OF_SGLANG = {
    "kv_retention": "SGLang hands its cache no such field",
    "skip_reading_prefix_cache": "SGLang has no such field",
    "prompt_logprobs": "SGLang has no such field; its /generate takes return_logprob and logprob_start_len",
}
