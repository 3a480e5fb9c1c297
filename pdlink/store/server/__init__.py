"""The store as a process of its own: what its clients hold, and the socket they come through."""
