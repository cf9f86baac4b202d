"""How a worker is chosen: one small file a policy, found by name through `registry`."""
