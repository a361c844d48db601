"""Puts a run together: policy, engine and loop; only this package and `commands` import `bridge`."""
