"""Worker processes: how they start, host envs, are supervised and replaced, and their output."""
