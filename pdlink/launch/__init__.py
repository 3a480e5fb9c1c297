"""Workers started on the nodes of a Ray cluster, and kept there."""
