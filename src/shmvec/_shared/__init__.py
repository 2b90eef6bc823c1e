"""What both sides need: what lies where in memory, messages, cores."""
