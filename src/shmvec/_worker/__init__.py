"""The worker's side: its process, and the hosts of envs in it."""
