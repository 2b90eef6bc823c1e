"""The memory of a vector env: the segment, its layout, rollouts, logs, and results of commands."""
