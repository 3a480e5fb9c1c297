"""Where KV bytes lie and how to copy them: layouts, plans and the names of prefixes. Imports no torch."""
