"""The commands of ``python -m shmvec``, and how they measure."""
