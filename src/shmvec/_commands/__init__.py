"""What ``python -m shmvec`` does, and how it measures."""
