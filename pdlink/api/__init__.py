"""Words that workers, proxy and tools share over HTTP: OpenAI's requests and errors, event streams, health.

Nothing here opens a socket or reads a clock.
"""
