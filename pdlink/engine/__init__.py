"""The engine that comes with pdlink: transformers models on a paged cache, batched continuously.

It knows nothing of transfers. It reports which blocks a request has and when a layer's KV is in them
(`EngineListener`). KV that comes from elsewhere is a range of prompt tokens: `Engine.kv_arrived` says how far the
blocks are filled, and a first pass may begin while layers are still on their way.
"""
