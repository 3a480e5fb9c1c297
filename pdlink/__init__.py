"""pdlink moves the KV cache of an LLM from prefill servers to decode servers."""

__version__ = "0.1.0"
