"""The parent's side: supervision, recovery, and what the caller passes, checked."""
