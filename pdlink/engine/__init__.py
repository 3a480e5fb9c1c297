"""The engine that comes with pdlink: transformers models on a paged cache, batched continuously.

It knows nothing of transfers. It says which blocks a request has and when a layer's KV is in them
(`EngineListener`), and it can be told that somebody else has filled the blocks (`Engine.kv_arrived`).
"""
