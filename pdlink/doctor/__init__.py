"""`pdlink doctor`: what is wrong with this machine, these settings and that deployment, and what to do."""
