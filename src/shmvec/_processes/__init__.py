"""Worker processes: started, hosting envs, supervised, replaced, and their last words."""
