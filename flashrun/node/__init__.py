"""One node: supervisor, agent, zygote, worker processes and their logs."""
