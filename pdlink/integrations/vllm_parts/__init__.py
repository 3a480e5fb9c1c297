"""What `pdlink.integrations.vllm` is made of. Only `versions` and the connector itself know vLLM."""
