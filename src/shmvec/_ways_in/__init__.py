"""How one comes to a ``ShmVectorEnv`` without naming it: ``make_vec`` and ``install``."""
