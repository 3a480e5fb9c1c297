"""Workers as people run them: the HTTP interface of a role, and the processes of a deployment."""
