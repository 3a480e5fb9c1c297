"""KV of GPUs through pinned host memory, over any transport of host memory."""
