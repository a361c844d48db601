"""Puts a run together: policy, engine, the run itself;
with `commands` the only room that knows the bridge.
"""
