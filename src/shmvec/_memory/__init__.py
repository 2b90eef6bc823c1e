"""The memory of a vector env: the segment and its layout, and what of it is lent to the user."""
