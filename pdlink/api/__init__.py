"""Words that workers, proxy and tools share over HTTP: OpenAI's requests and errors, event streams, health, beats.

Nothing here opens a socket or reads a clock.
"""
