"""What happened, for people and their tools: the same events as metrics and as a timeline."""
