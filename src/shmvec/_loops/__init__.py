"""The loops around the envs: episodes, and the policy that is asked in them."""
