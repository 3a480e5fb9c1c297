"""Workers started on the nodes of somebody else's cluster, and kept there."""
